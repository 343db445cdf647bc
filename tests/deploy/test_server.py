"""The server as its clients and its operator meet it: a real process on a free port."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cramlm.deploy.predictor import Predictor
from cramlm.model.tokenization import Tokenizer
from serving import JSON, LABELS, Server, export_tiny, read_all, request_bytes, serving, wait_until

TOKEN = "correct-horse-battery"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return export_tiny(tmp_path_factory.mktemp("served") / "export", tokenizer)


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor.load(folder)


@pytest.fixture(scope="module")
def server(folder: Path, predictor: Predictor) -> Iterator[Server]:
    """With default limits. Its model's folder is taken away once it is loaded."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with serving(copy) as server:
        shutil.rmtree(copy)
        yield server


@pytest.fixture(scope="module")
def strict_server(folder: Path) -> Iterator[Server]:
    """With a token, a short patience, a queue of 8 texts, and 0.3 s in which they gather, so that they are seen waiting."""
    options = ("--read-timeout", "1", "--queue-texts", "8", "--max-texts", "8", "--batch-window-ms", "300")
    with serving(folder, *options, environment={"CRAMLM_TOKEN": TOKEN}) as server:
        yield server


def probabilities(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [list(answer["probabilities"].values()) for answer in response.json()["predictions"]]


def assert_refused(response: httpx.Response, status: int, *needles: str) -> None:
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"error", "error_type"}
    assert "\n" not in answer["error"]
    for needle in needles:
        assert needle in answer["error"], answer["error"]


# Answers


def test_http_python_and_the_command_line_give_the_same_answers(
    server: Server, folder: Path, predictor: Predictor, texts: list[str]
) -> None:
    asked = [text for text in texts if text]
    expected = [{"label": answer.label, "probabilities": dict(answer.probabilities)} for answer in predictor.predict(asked)]
    answers = server.post("/v1/predict", {"texts": asked}).json()["predictions"]
    assert [{key: answer[key] for key in ("label", "probabilities")} for answer in answers] == expected
    command = [sys.executable, "-m", "cramlm", "predict", str(folder), "-"]
    result = subprocess.run(command, input="\n".join(asked), capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [{key: line[key] for key in ("label", "probabilities")} for line in lines] == expected


def test_an_answer_does_not_depend_on_the_requests_computed_with_it(server: Server, predictor: Predictor, texts: list[str]) -> None:
    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda text: server.post("/v1/predict", {"texts": [text]}), texts * 3))
    for text, response in zip(texts * 3, responses, strict=True):
        assert probabilities(response)[0] == pytest.approx(predictor.probabilities([text])[0].tolist(), abs=1e-5)
    assert server.metric("cramlm_batch_texts_count") < server.metric("cramlm_texts_total")


def test_pairs_are_read_as_in_python_and_long_texts_say_that_they_were_cut(server: Server, predictor: Predictor) -> None:
    asked = {"texts": ["river bank", "the cell", "water " * 46, "water " * 47], "pairs": ["water", None, None, None]}
    response = server.post("/v1/predict", asked)
    assert probabilities(response) == predictor.probabilities(asked["texts"], asked["pairs"]).tolist()
    assert [answer["truncated"] for answer in response.json()["predictions"]] == [False, False, False, True]


def test_a_model_that_is_deleted_while_it_serves_still_answers(server: Server, predictor: Predictor) -> None:
    assert probabilities(server.post("/v1/predict", {"texts": ["aspirin"]})) == predictor.probabilities(["aspirin"]).tolist()


def test_clients_of_text_embeddings_inference_get_the_shapes_they_expect(server: Server, predictor: Predictor) -> None:
    (row,) = predictor.probabilities(["river bank"]).tolist()
    ranked = [{"score": score, "label": label} for score, label in sorted(zip(row, LABELS, strict=True), reverse=True)]
    for single in ("river bank", ["river bank"]):
        assert server.post("/predict", {"inputs": single}).json() == ranked
    assert server.post("/predict", {"inputs": [["river bank"]]}).json() == [ranked]
    pair = server.post("/predict", {"inputs": ["river bank", "water"]}).json()
    assert [entry["score"] for entry in pair] == sorted(predictor.probabilities(["river bank"], ["water"])[0].tolist(), reverse=True)
    raw = server.post("/predict", {"inputs": "river bank", "raw_scores": True}).json()
    assert [entry["label"] for entry in raw] == [entry["label"] for entry in ranked]
    assert sum(entry["score"] for entry in raw) != pytest.approx(1, abs=0.1)
    assert_refused(server.post("/predict", {"inputs": "water " * 60}), 413, "must have less than 49 tokens. Given: 62")
    assert server.post("/predict", {"inputs": "water " * 60, "truncate": True}).status_code == 200


# Requests that are wrong


@pytest.mark.parametrize(
    ("status", "body", "needle"),
    [
        (400, b"{", "not JSON"),
        (400, b"", "not JSON"),
        (400, b'{"texts": ["a"]} x', "not JSON"),
        (400, b'{"texts": ["\xe9"]}', "not UTF-8: byte 0xE9 at offset 12"),
        (400, b'{"texts": ["a\0"]}', "not JSON"),
        (400, b'{"texts": ["a"], "texts": ["b"]}', "twice"),
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
        (422, b'{"texts": ["\\u0000"]}', "U+0000"),
        (422, b'{"texts": ["a"], "pairs": []}', "1 texts but 0 pairs"),
        (422, b'{"texts": ["a"], "model": "other"}', "model: is no field"),
        (422, b'{"texts": ["a"], "url": "file:///etc/passwd"}', "url: is no field"),
        (422, b'{"texts": ["a"], "path": "/etc/passwd"}', "path: is no field"),
        (413, json.dumps({"texts": ["a"] * 65}).encode(), "65 texts"),
        (413, json.dumps({"texts": ["a" * 20_001]}).encode(), "20001 characters"),
    ],
)
def test_a_wrong_body_gets_a_line_that_says_what_is_wrong(server: Server, status: int, body: bytes, needle: str) -> None:
    assert_refused(server.post("/v1/predict", body), status, needle)


@pytest.mark.parametrize("inputs", [[], [[]], ["a", "b", "c"], [["a"], "b"], [["a", "b", "c"]], {"a": 1}, 7, None, [["\ud800"]]])
def test_wrong_inputs_of_the_other_interface_are_refused_too(server: Server, inputs: object) -> None:
    assert_refused(server.post("/predict", {"inputs": inputs}), 422)
    assert_refused(server.post("/predict", {"inputs": "a", "truncation_direction": "Left"}), 422, "truncation_direction")


def test_a_body_that_is_not_declared_as_json_is_refused(server: Server) -> None:
    body = b'{"texts": ["a"]}'
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-16"}):
        assert_refused(server.post("/v1/predict", body, headers=kind), 415, "application/json")
    assert_refused(server.post("/v1/predict", body, headers={**JSON, "content-encoding": "gzip"}), 415, "compressed")
    assert server.post("/v1/predict", body, headers={"content-type": 'Application/JSON; charset="UTF-8"'}).status_code == 200


def test_paths_that_lead_elsewhere_lead_nowhere(server: Server) -> None:
    for path in ("/..%2f..%2fetc/passwd", "/%252e%252e/x", "/v1/../v1/predict", "/v1/models", "/docs", "/v1/predict/", "//"):
        answer = server.exchange(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404 "), (path, answer)
    for method in ("GET", "PUT", "DELETE"):
        assert_refused(server.client.request(method, "/v1/predict"), 405)


def test_what_is_not_http_is_answered_and_closed(server: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/predict HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        assert server.exchange(garbage + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert server.exchange(b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000).startswith(b"HTTP/1.1 431 ")


def test_a_body_over_a_megabyte_is_refused_before_it_is_sent_and_costs_no_memory(server: Server) -> None:
    before = server.rss_bytes
    answer = server.exchange(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 200000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    with server.connect() as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")  # while the client could still go on
    for _ in range(3):
        assert server.post("/v1/predict", b"a" * 20_000_000).status_code == 413  # to a client that sends all before it listens
    assert server.rss_bytes - before < 10_000_000


# Clients that misbehave


def test_half_sent_requests_are_closed_in_time_and_delay_nobody(strict_server: Server) -> None:
    halves = [
        b"",
        b"POST /v1/pre",
        request_bytes(b"{" * 50)[:-20],
        b"POST /v1/predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ]
    connections = [strict_server.connect() for _ in range(300)]
    started = time.monotonic()
    for number, connection in enumerate(connections):
        connection.sendall(halves[number % len(halves)])
    asked = time.monotonic()
    assert strict_server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, **BEARER}).status_code == 200
    assert time.monotonic() - asked < 1
    answers = [read_all(connection) for connection in connections]
    assert time.monotonic() - started < 8
    for number, answer in enumerate(answers):
        status = 401 if number % len(halves) >= 2 else 408  # the token is asked for before the body
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (number, answer)
    for connection in connections:
        connection.close()


def test_a_request_that_trickles_is_closed_although_it_never_rests(strict_server: Server) -> None:
    with strict_server.connect() as connection:
        started = time.monotonic()
        request = request_bytes(b" " * 1000, headers=f"Authorization: Bearer {TOKEN}\r\n")
        try:
            for byte in request:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - started < 4


def test_more_than_the_queue_holds_is_refused_at_once_in_batches_and_alone(strict_server: Server) -> None:
    def ask(count: int) -> tuple[int, httpx.Response]:
        return count, strict_server.post("/v1/predict", {"texts": ["kinase"] * count}, headers={**JSON, **BEARER})

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, [1, 2] * 12))
    accepted = [(count, response) for count, response in answers if response.status_code == 200]
    refused = [response for _, response in answers if response.status_code != 200]
    assert accepted
    assert refused
    assert all(len(response.json()["predictions"]) == count for count, response in accepted)
    for response in refused:
        assert_refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
    assert strict_server.metric("cramlm_queue_texts", headers=BEARER) == 0


def test_a_client_that_goes_away_leaves_its_place_in_the_queue(strict_server: Server) -> None:
    request = request_bytes(json.dumps({"texts": ["kinase"] * 8}).encode(), headers=f"Authorization: Bearer {TOKEN}\r\n")

    def goes_away() -> bool:
        with strict_server.connect() as connection:
            connection.sendall(request)
            time.sleep(0.05)
        wait_until(lambda: strict_server.metric("cramlm_queue_texts", headers=BEARER) == 0)
        return strict_server.metric("cramlm_abandoned_requests_total", headers=BEARER) > 0

    assert any(goes_away() for _ in range(20))  # now and then the texts are computed before


# Who may ask


def test_without_the_token_nothing_is_answered_but_that_the_server_lives(strict_server: Server) -> None:
    for headers in ({}, {"authorization": TOKEN}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": "Basic " + TOKEN}):
        response = strict_server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, **headers})
        assert_refused(response, 401, "token")
        assert response.headers["www-authenticate"] == "Bearer"
        assert strict_server.client.get("/metrics", headers=headers).status_code == 401
    for path in ("/healthz", "/readyz", "/openapi.json", "/"):
        assert strict_server.client.get(path).status_code == 200


def test_an_address_that_others_reach_needs_a_token(folder: Path) -> None:
    for options, needle in (
        (["--host", "0.0.0.0"], "--token"),
        (["--host", "::"], "--token"),
        (["--host", "0.0.0.0", "--token", "short"], "8 or more"),
        (["--host", "example"], "not an address"),
        (["--queue-texts", "3"], "queue"),
        (["--max-wait", "0"], "above 0"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "cramlm", "serve", str(folder), *options], capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("cramlm: error: ")
        assert needle in result.stderr
        assert result.stderr.count("\n") == 1


# What the operator sees


def test_the_description_of_the_interface_names_every_path_and_answer(server: Server) -> None:
    description = server.client.get("/openapi.json").json()
    assert set(description["paths"]) == {"/v1/predict", "/predict", "/healthz", "/readyz", "/metrics"}
    for path in ("/v1/predict", "/predict"):
        operation = description["paths"][path]["post"]
        assert operation["description"]
        assert {"200", "400", "401", "413", "415", "422", "429", "503"} <= set(operation["responses"])
        assert operation["responses"]["422"]["content"]["application/json"]["schema"]["$ref"].endswith("/Fault")


def test_requests_are_counted_and_never_quoted(server: Server) -> None:
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


def test_a_folder_that_is_no_model_and_a_port_that_is_taken_are_one_line(folder: Path, tmp_path: Path, server: Server) -> None:
    for arguments, code, needle in (([tmp_path / "nowhere", "--port", "0"], 5, "nowhere"), ([folder, "--port", server.port], 4, "--port")):
        command = [sys.executable, "-m", "cramlm", "serve", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == code, result.stderr
        last = result.stderr.splitlines()[-1]
        assert last.startswith("cramlm: error: ")
        assert needle in last
        assert "Traceback" not in result.stderr


def test_while_it_loads_it_lives_but_is_not_ready_and_a_signal_ends_it(folder: Path) -> None:
    with serving(folder, ready=False) as server:
        assert server.client.get("/healthz").json() == {"status": "ok"}
        response = server.client.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        assert_refused(server.post("/v1/predict", {"texts": ["a"]}), 503, "loading")
        code, seconds = server.stop()
        assert code == 0
        assert seconds < 10
        assert len(server.lines) == 1


def test_at_sigterm_requests_in_flight_are_answered_and_the_process_ends_with_0(strict_server: Server) -> None:
    idle, half = strict_server.connect(), strict_server.connect()
    half.sendall(b"POST /v1/predict HTTP/1.1\r\n")
    answers: list[int] = []

    def ask() -> None:
        answers.append(strict_server.post("/v1/predict", {"texts": ["a"] * 4}, headers={**JSON, **BEARER}).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: strict_server.metric("cramlm_queue_texts", headers=BEARER) == 4)
    strict_server.process.send_signal(signal.SIGTERM)
    response = strict_server.client.get("/readyz")
    assert (response.status_code, response.json()) == (503, {"status": "draining"})
    assert_refused(strict_server.post("/v1/predict", {"texts": ["a"]}, headers={**JSON, **BEARER}), 503, "draining")
    assert strict_server.process.wait(timeout=10) == 0
    asking.join()
    assert answers == [200]
    for connection in (idle, half):
        connection.close()
    assert not [line for line in strict_server.lines if "error" in line.lower() or "Traceback" in line]


def test_control_c_ends_it_with_130(server: Server) -> None:
    code, seconds = server.stop(signal.SIGINT)
    assert code == 130
    assert seconds < 10
    assert len(server.lines) == 2
