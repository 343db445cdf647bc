"""The server for its clients and its operator: a real process on a free port."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from commands import cramlm, error_line, printed
from cramlm.inference.predictor import Predictor
from server_process import JSON, PATIENCE, Server, holding, read_all, request_bytes, serving, wait_until

TOKEN = "correct-horse-battery"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def predictor(tiny_export: Path) -> Predictor:
    return Predictor.load(tiny_export)


@pytest.fixture(scope="module")
def server(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a run's folder with time limits of an hour, which runs on when that folder is deleted after it is loaded."""
    run = tmp_path_factory.mktemp("server") / "mine"
    shutil.copytree(tiny_export, run / "export")
    with serving(run, "--read-timeout", "3600", "--max-wait", "3600") as server:
        shutil.rmtree(run)
        yield server


@pytest.fixture
def held_server(tiny_export: Path) -> Iterator[Server]:
    """A server with a token that computes nothing before it is stopped: requests wait in its queue of 8 texts."""
    with holding(tiny_export, TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def hasty_server(tiny_export: Path) -> Iterator[Server]:
    """A server with a read timeout of 0.2 s."""
    with serving(tiny_export, "--read-timeout", "0.2") as server:
        yield server


@contextmanager
def waiting(server: Server, *, texts: int, before: int = 0) -> Iterator[socket.socket]:
    """The connection of a client whose texts wait in the queue, behind those of `before`."""
    body = json.dumps({"texts": ["kinase"] * texts}).encode()
    with server.connect() as connection:
        connection.sendall(request_bytes(body, headers=f"Authorization: Bearer {TOKEN}\r\n"))
        wait_until(lambda: server.metric("cramlm_queue_texts", headers=BEARER) == before + texts)
        yield connection


def probabilities(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [list(prediction["probabilities"].values()) for prediction in response.json()["predictions"]]


def assert_refused(response: httpx.Response, status: int, *needles: str) -> None:
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error", "error_type"}
    assert "\n" not in content["error"]
    for needle in needles:
        assert needle in content["error"], content["error"]


# Predictions


def test_http_python_and_the_command_line_give_the_same_predictions_when_the_folder_is_gone(
    server: Server, tiny_export: Path, predictor: Predictor, texts: list[str]
) -> None:
    assert "mine" in server.client.get("/").text, "a run is served under its name"
    inputs = [text for text in texts if text]
    expected = [{"label": each.label, "probabilities": dict(each.probabilities)} for each in predictor.predict(inputs)]
    predictions = server.post("/v1/predict", {"texts": inputs}).json()["predictions"]
    assert [{key: each[key] for key in ("label", "probabilities")} for each in predictions] == expected
    lines = [json.loads(line) for line in printed("predict", tiny_export, "-", stdin="\n".join(inputs)).splitlines()]
    assert [{key: line[key] for key in ("label", "probabilities")} for line in lines] == expected


def test_predictions_do_not_depend_on_other_requests_in_the_batch(server: Server, predictor: Predictor, texts: list[str]) -> None:
    written = [text for text in texts if text]
    requests = [[text] for text in written] + [written[start : start + size] for start, size in ((0, 3), (3, 10), (13, 26))]
    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda request: server.post("/v1/predict", {"texts": request}), requests * 3))
    for request, response in zip(requests * 3, responses, strict=True):
        np.testing.assert_allclose(probabilities(response), predictor.probabilities(request), atol=1e-5)
    assert server.metric("cramlm_batch_texts_count") < server.metric("cramlm_texts_total")


def test_pairs_are_classified_as_in_python_and_long_texts_are_marked_as_truncated(server: Server, predictor: Predictor) -> None:
    request = {"texts": ["river bank", "the cell", "water " * 46, "water " * 47], "pairs": ["water", None, None, None]}
    response = server.post("/v1/predict", request)
    assert probabilities(response) == predictor.probabilities(request["texts"], request["pairs"]).tolist()
    assert [prediction["truncated"] for prediction in response.json()["predictions"]] == [False, False, False, True]


# Invalid requests


@pytest.mark.parametrize(
    ("status", "body", "needle"),
    [
        (400, b"{", "not JSON"),
        (400, b"", "not JSON"),
        (400, b'{"texts": ["a"]} x', "not JSON"),
        (400, b'{"texts": ["\xe9"]}', "not UTF-8: byte 0xE9 at offset 12"),
        (400, b'{"texts": ["a\0"]}', "not JSON"),
        (400, b'{"texts": ["a"], "texts": ["b"]}', "duplicate key"),
        (400, b'{"texts": [NaN]}', "NaN"),
        (400, b'{"texts": [' + b"9" * 10_000 + b"]}", "too many digits"),
        (400, b'{"texts": ' + b"[" * 100_000, "nested too deep"),
        (400, b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, "nested too deep"),
        (422, b"[]", "one JSON object"),
        (422, b"null", "one JSON object"),
        (422, b"{}", "texts: is missing"),
        (422, b'{"texts": "a"}', "texts: "),
        (422, b'{"texts": [1]}', "texts[0]: "),
        (422, b'{"texts": [null]}', "texts[0]: "),
        (422, b'{"texts": [["a"]]}', "texts[0]: "),
        (422, b'{"texts": []}', "texts: "),
        (422, b'{"texts": ["\\ud83d"]}', "lone surrogate"),
        (422, b'{"texts": ["a"], "\\ud83d": 1}', "lone surrogate"),
        (422, b'{"texts": ["\\u0000"]}', "U+0000"),
        (422, b'{"texts": ["a", " \\n"]}', "text 2: is blank; write a text, or leave it out"),
        (422, b'{"texts": ["a"], "pairs": [""]}', "pair 1: is blank; write a text, or leave it out"),
        (422, b'{"texts": ["a"], "pairs": []}', "1 texts but 0 pairs"),
        (422, b'{"texts": ["a"], "model": "other"}', "model: unknown field"),
        (422, b'{"texts": ["a"], "url": "file:///etc/passwd"}', "url: unknown field"),
        (422, b'{"texts": ["a"], "path": "/etc/passwd"}', "path: unknown field"),
        (413, json.dumps({"texts": ["a"] * 65}).encode(), "65 texts"),
        (413, json.dumps({"texts": ["a" * 20_001]}).encode(), "20001 characters"),
    ],
)
def test_an_invalid_body_gets_a_one_line_error(server: Server, status: int, body: bytes, needle: str) -> None:
    assert_refused(server.post("/v1/predict", body), status, needle)


def test_a_body_without_the_json_content_type_is_refused(server: Server) -> None:
    body = b'{"texts": ["a"]}'
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-16"}):
        assert_refused(server.post("/v1/predict", body, headers=kind), 415, "application/json")
    assert_refused(server.post("/v1/predict", body, headers={**JSON, "content-encoding": "gzip"}), 415, "compressed")
    assert server.post("/v1/predict", body, headers={"content-type": 'Application/JSON; charset="UTF-8"'}).status_code == 200


def test_paths_outside_the_api_are_404(server: Server) -> None:
    for path in ("/..%2f..%2fetc/passwd", "/%252e%252e/x", "/v1/../v1/predict", "/v1/models", "/docs", "/v1/predict/", "//"):
        response = server.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert response.startswith(b"HTTP/1.1 404 "), (path, response)
    for method in ("GET", "PUT", "DELETE"):
        assert_refused(server.client.request(method, "/v1/predict"), 405)


def test_invalid_http_gets_a_response_and_closes_the_connection(server: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/x\r\n\r\n", b"POST /v1/predict HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        assert server.exchange(garbage + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert server.exchange(b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000).startswith(b"HTTP/1.1 400 ")


def test_a_body_over_a_megabyte_is_refused_without_reading_it(server: Server) -> None:
    before = server.rss_bytes
    response = server.exchange(
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 200000000\r\n\r\n"
    )
    assert response.startswith(b"HTTP/1.1 413 ")
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")  # while the client could still go on
    for _ in range(3):
        assert server.post("/v1/predict", b"a" * 20_000_000).status_code == 413  # to a client that sends all before it listens
    assert server.rss_bytes - before < 10_000_000


# Slow and invalid clients


WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALVES = (
    b"",
    b"POST /v1/pre",
    request_bytes(b"{" * 50)[:-20],
    b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n5\r\nab",
    WHOLE + b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n",
)


def test_half_sent_requests_do_not_delay_others(server: Server) -> None:
    connections = [server.connect() for _ in range(300)]
    for number, connection in enumerate(connections):
        connection.sendall(HALVES[number % len(HALVES)])
    assert server.post("/v1/predict", {"texts": ["a"]}).status_code == 200
    for connection in connections:
        connection.close()


def test_more_half_sent_requests_than_connections_do_not_block_the_server(hasty_server: Server) -> None:
    """In one segment a whole request and half of another, more often than the server takes connections."""
    connections = [hasty_server.connect() for _ in range(520)]
    for connection in connections:
        with contextlib.suppress(OSError):  # closed before it was sent
            connection.sendall(WHOLE + b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
    for connection in connections:
        with connection:
            read_all(connection)
    wait_until(lambda: hasty_server.exchange(WHOLE).startswith(b"HTTP/1.1 200 "))  # 408 if the deadline passes before it is sent


def test_an_unread_body_has_a_deadline_after_its_response(hasty_server: Server) -> None:
    def is_closed_after_its_response() -> bool:
        got_response = False  # as on a busy machine, where the deadline may pass before the request is sent
        with hasty_server.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
            got_response = connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"a")  # which ends uvicorn's own deadline of an idle connection
            read_all(connection)
        return got_response

    wait_until(is_closed_after_its_response)


def test_an_invalid_chunk_after_a_complete_response_closes_the_connection_silently(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"no chunk\r\n")
        read_all(connection)
    assert len(server.lines) == 2


def test_responses_to_pipelined_requests_are_in_order(server: Server) -> None:
    requests = [
        request_bytes(b'{"texts": ["a"]}'),
        WHOLE,
        request_bytes(b"{"),
        WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    ]
    responses = server.exchange(b"".join(requests)).split(b"HTTP/1.1 ")[1:]
    assert [response[:3] for response in responses] == [b"200", b"200", b"400", b"200"]


def test_a_connection_whose_response_is_not_read_is_closed(hasty_server: Server) -> None:
    before = hasty_server.open_files
    with hasty_server.connect() as connection:
        connection.setblocking(False)
        page = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
        with contextlib.suppress(OSError):  # until the server reads no more, or closes
            while connection.send(page):
                time.sleep(0.01)
        wait_until(lambda: hasty_server.open_files <= before)


@pytest.mark.parametrize("half", HALVES)
def test_half_sent_requests_are_closed(hasty_server: Server, half: bytes) -> None:
    connections = [hasty_server.connect() for _ in range(5)]
    for connection in connections:
        with contextlib.suppress(OSError):  # closed before it was sent
            connection.sendall(half)
    for connection in connections:
        with connection:
            responses = read_all(connection)
        assert not responses or b"HTTP/1.1 408 " in responses


def test_a_request_sent_byte_by_byte_is_closed_at_the_deadline(hasty_server: Server) -> None:
    def trickle(connection: socket.socket) -> None:
        for byte in request_bytes(b" " * 100_000):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with hasty_server.connect() as connection, pytest.raises(OSError):  # noqa: PT011 - a broken pipe or a reset
        trickle(connection)


def test_a_full_queue_refuses_requests_at_once(held_server: Server) -> None:
    with waiting(held_server, texts=7):
        for count in (2, 8):
            response = held_server.post("/v1/predict", {"texts": ["kinase"] * count}, headers={**JSON, **BEARER})
            assert_refused(response, 429)
            assert int(response.headers["retry-after"]) >= 1
        with waiting(held_server, texts=1, before=7):
            assert_refused(held_server.post("/v1/predict", {"texts": ["kinase"]}, headers={**JSON, **BEARER}), 429)


def test_the_texts_of_a_disconnected_client_leave_the_queue(held_server: Server) -> None:
    with waiting(held_server, texts=8):
        pass
    wait_until(lambda: held_server.metric("cramlm_queue_texts", headers=BEARER) == 0)
    assert held_server.metric("cramlm_abandoned_requests_total", headers=BEARER) == 1


# Access


def test_without_the_token_only_the_open_paths_respond(held_server: Server) -> None:
    for headers in ({}, {"authorization": TOKEN}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": "Basic " + TOKEN}):
        response = held_server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, **headers})
        assert_refused(response, 401, "token")
        assert response.headers["www-authenticate"] == "Bearer"
        assert held_server.client.get("/metrics", headers=headers).status_code == 401
    for scheme in ("Bearer", "bearer"):
        assert held_server.client.get("/metrics", headers={"authorization": f"{scheme} {TOKEN}"}).status_code == 200
    for path in ("/healthz", "/readyz", "/openapi.json", "/"):
        assert held_server.client.get(path).status_code == 200
        if path != "/openapi.json":
            head = held_server.exchange(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert re.match(rb"HTTP/1.1 200 (?s:.*)\r\n\r\n\Z", head), "the headers alone, as monitors ask for"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000"])
def test_a_server_without_a_token_accepts_loopback_hosts(server: Server, host: str) -> None:
    for origin in ({}, {"origin": f"http://{host}"}):
        assert server.client.get("/metrics", headers={"host": host, **origin}).status_code == 200
        assert server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, "host": host, **origin}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "example.com:8000",
        "localhost.example.com",
        "127.0.0.1.example.com",
        "8.8.8.8",
        "[2001:db8::1]",
        "0.0.0.0",
        "[::1",
        "",
    ],
)
def test_a_server_without_a_token_refuses_other_hosts(server: Server, host: str) -> None:
    """DNS rebinding: a browser that resolves example.com to 127.0.0.1 sends the page's own name as Host."""
    for path in ("/metrics", "/", "/healthz", "/nowhere"):
        assert_refused(server.client.get(path, headers={"host": host}), 403, "Host", "--token")
    assert_refused(server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, "host": host}), 403, "Host")
    both = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    assert server.exchange(both).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("origin", ["http://example.com", "https://localhost.example.com", "null", "http://localhost:1", "file://", ""])
def test_a_server_without_a_token_refuses_other_origins(server: Server, origin: str) -> None:
    assert_refused(server.client.get("/metrics", headers={"origin": origin}), 403, "Origin")
    assert_refused(server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, "origin": origin}), 403, "Origin")


def test_http_1_0_needs_no_host_and_a_token_allows_any_host(server: Server, held_server: Server) -> None:
    assert server.exchange(b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    proxied = {**BEARER, "host": "models.example.com", "origin": "https://models.example.com"}
    assert held_server.client.get("/metrics", headers=proxied).status_code == 200


def test_an_address_open_to_other_machines_needs_a_token(tiny_export: Path) -> None:
    for options, needle in (
        (["--host", "0.0.0.0"], "--token"),
        (["--host", "::"], "--token"),
        (["--host", "0.0.0.0", "--token", "short"], "8 or more"),
        (["--host", "example"], "not an address"),
        (["--queue-texts", "3"], "queue"),
        (["--max-wait", "0"], "--max-wait"),
    ):
        result = cramlm("serve", tiny_export, *options)
        assert needle in error_line(result, 2)
        assert result.stderr.count("\n") == 1


# Operation


def test_the_openapi_description_lists_every_path_and_response(server: Server) -> None:
    description = server.client.get("/openapi.json").json()
    assert set(description["paths"]) == {"/v1/predict", "/healthz", "/readyz", "/metrics"}
    responses = description["paths"]["/v1/predict"]["post"]["responses"]
    assert {"200", "400", "401", "408", "413", "415", "422", "429", "503"} <= set(responses)
    assert responses["422"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")


def test_metrics_and_logs_count_requests_without_their_texts(server: Server) -> None:
    secret = "xylophone-4711"
    for body in ({"texts": [secret]}, {"texts": [secret], "model": secret}, {"texts": [[secret]]}, {secret: 1}):
        server.post("/v1/predict", body)
    server.client.get(f"/{secret}")
    assert secret not in "\n".join(server.lines)
    page = server.client.get("/metrics").text
    assert secret not in page
    for name in ("cramlm_request_seconds_bucket", "cramlm_batch_tokens_bucket", 'cramlm_requests_total{path="/v1/predict",status="200"}'):
        assert name in page
    assert server.metric("cramlm_tokens_total") > server.metric("cramlm_texts_total") > 0


def test_a_folder_without_a_model_and_a_used_port_give_a_one_line_error(tiny_export: Path, tmp_path: Path, server: Server) -> None:
    for arguments, code, needle in (
        ([tmp_path / "nowhere", "--port", "0"], 2, "nowhere"),
        ([tiny_export, "--port", server.port], 4, "--port"),
    ):
        assert needle in error_line(cramlm("serve", *map(str, arguments)), code)


@pytest.mark.faults
def test_while_loading_the_server_is_alive_but_not_ready_and_stops_on_a_signal(tiny_export: Path) -> None:
    def block_the_tokenizer() -> None:
        def wait_at_the_tokenizer(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and str(arguments[0]).endswith("tokenizer.json"):
                threading.Event().wait()

        sys.addaudithook(wait_at_the_tokenizer)

    with serving(tiny_export, ready=False, prepare=block_the_tokenizer) as server:
        assert server.client.get("/healthz").json() == {"status": "ok"}
        response = server.client.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        assert_refused(server.post("/v1/predict", {"texts": ["a"]}), 503, "loading")
        assert server.stop()[0] == 0
        assert len(server.lines) == 1


@pytest.mark.faults
def test_at_sigterm_requests_in_flight_finish_and_the_exit_code_is_0(held_server: Server) -> None:
    idle, half, half_body = held_server.connect(), held_server.connect(), held_server.connect()
    half.sendall(b"POST /v1/predict HTTP/1.1\r\n")
    half_body.sendall(request_bytes(b"{" * 50, headers=f"Authorization: Bearer {TOKEN}\r\n")[:-20])
    with waiting(held_server, texts=4) as connection:
        held_server.process.send_signal(signal.SIGTERM)
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 200 ")
    assert response.count(b'"label"') == 4
    assert held_server.process.wait(timeout=PATIENCE) == 0
    for connection in (idle, half, half_body):
        connection.close()
    assert len(held_server.lines) == 2


@pytest.mark.faults
def test_sigint_gives_exit_code_130(tiny_export: Path) -> None:
    with serving(tiny_export) as server:
        assert server.stop(signal.SIGINT)[0] == 130
        assert len(server.lines) == 2
