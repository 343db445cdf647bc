"""The queue and the model's thread, in this process, with a real model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cramlm.errors import DivergedError
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface.folder import load_classifier
from cramlm.serving import Limits
from cramlm.serving.app import build_app
from cramlm.serving.batching import Batcher, BusyError, NotReadyError, ServedModel, load_model
from cramlm.serving.middleware import Metrics
from server_process import PATIENCE, serving_alone

NEVER = 1e6  # seconds


@pytest.fixture(scope="module")
def loaded(tiny_export: Path) -> ServedModel:
    return load_model(tiny_export, None)


@contextmanager
def batching(
    loaded: ServedModel,
    *,
    window_seconds: float = 0.0,
    limits: Limits = Limits(),  # noqa: B008
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Batcher]:
    """A started batcher of the running loop with a loaded model."""
    is_loaded = threading.Event()
    settings: dict[str, Any] = {"limits": limits, "metrics": Metrics(), "window_seconds": window_seconds, "clock": clock}
    batcher = Batcher(lambda: loaded, loaded=lambda _: is_loaded.set(), **settings)
    with pytest.raises(NotReadyError, match="loading"):
        batcher.submit(["too early"], [None])
    batcher.start(asyncio.get_running_loop())
    assert is_loaded.wait(PATIENCE)
    assert batcher.ready, "the model is announced before texts are accepted"
    try:
        yield batcher
    finally:
        assert batcher.close(seconds=PATIENCE)


def test_a_cancelled_request_leaves_the_queue_at_once(loaded: ServedModel) -> None:
    async def submit() -> int:
        with batching(loaded, window_seconds=NEVER, limits=Limits(texts=4, queue_texts=4, wait_seconds=NEVER)) as batcher:
            first = batcher.submit(["a"] * 4, [None] * 4)
            with pytest.raises(BusyError):
                batcher.submit(["b"], [None])
            first.cancel()
            await asyncio.sleep(0)
            second = batcher.submit(["b"] * 4, [None] * 4)
            batcher.drain()  # which ends the window
            with pytest.raises(NotReadyError, match="draining"):
                batcher.submit(["c"], [None])
            return len((await second).values)

    assert asyncio.run(submit()) == 4


def test_a_request_that_waited_too_long_is_refused(loaded: ServedModel) -> None:
    now = 0.0

    async def submit() -> list[object]:
        nonlocal now
        with batching(loaded, window_seconds=NEVER, limits=Limits(wait_seconds=2), clock=lambda: now) as batcher:
            late = batcher.submit(["a"], [None])
            now = 1.0
            recent = batcher.submit(["b"], [None])
            now = 2.5
            batcher.drain()
            return await asyncio.gather(late, recent, return_exceptions=True)

    late, recent = asyncio.run(submit())
    assert isinstance(late, BusyError)
    assert not isinstance(recent, BaseException)


def test_a_draining_server_accepts_no_texts(loaded: ServedModel) -> None:
    async def submit() -> list[httpx.Response]:
        with batching(loaded) as batcher:
            app = build_app(batcher, name="mine", kind="classification", reads_pairs=False, limits=Limits(), metrics=Metrics(), token=None)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                before = await client.get("/readyz")
                batcher.drain()
                return [before, await client.get("/readyz"), await client.post("/v1/predict", json={"texts": ["a"]})]

    ready, drains, refused = asyncio.run(submit())
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert (drains.status_code, drains.json()) == (503, {"status": "draining"})
    assert refused.status_code == 503
    assert "draining" in refused.json()["error"]


def test_a_failing_request_does_not_fail_the_others(loaded: ServedModel) -> None:
    async def submit() -> list[object]:
        with batching(loaded, window_seconds=0.1) as batcher:
            requests = [["fine"], ["\ud83d"], ["fine too"]]
            return await asyncio.gather(*(batcher.submit(each, [None]) for each in requests), return_exceptions=True)

    one, bad, other = asyncio.run(submit())
    assert isinstance(bad, Exception)
    assert not isinstance(one, BaseException)
    assert not isinstance(other, BaseException)


def test_lengths_count_tokens_before_truncation(loaded: ServedModel) -> None:
    texts = ["water", "water " * 45, "water " * 46, "water " * 47, "water " * 100, "water " * 40]
    pairs = [None, None, None, None, None, "river " * 40]
    assert loaded.compute(texts, pairs).lengths.tolist() == [3, 47, 48, 49, 102, 83]


def test_a_server_with_auto_precision_gives_the_labels_of_fp32(loaded: ServedModel, tiny_export: Path, texts: list[str]) -> None:
    auto = load_model(tiny_export, None, precision="auto").compute(texts, [None] * len(texts))
    exact = loaded.compute(texts, [None] * len(texts))
    np.testing.assert_array_equal(auto.values.argmax(axis=1), exact.values.argmax(axis=1))
    np.testing.assert_array_equal(auto.lengths, exact.lengths)
    np.testing.assert_array_equal(auto.values, Predictor.load(tiny_export, precision="auto").probabilities(texts))


def test_an_onnx_folder_gives_the_models_outputs(loaded: ServedModel, tiny_onnx: Path, texts: list[str]) -> None:
    other = load_model(tiny_onnx, 1)
    assert (other.predictor.labels, other.predictor.max_length) == (loaded.predictor.labels, loaded.predictor.max_length)
    inputs = [*texts, "water " * 46, "water " * 47, "water " * 100, "water " * 40]
    pairs = [*[None] * (len(inputs) - 1), "river " * 40]
    ours, theirs = loaded.compute(inputs, pairs), other.compute(inputs, pairs)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    np.testing.assert_allclose(ours.values, theirs.values, atol=1e-4)


def test_an_onnx_folder_is_served_without_pytorch_in_the_process(tiny_onnx: Path, loaded: ServedModel) -> None:
    with serving_alone(tiny_onnx) as server:
        (prediction,) = server.post("/v1/predict", {"texts": ["aspirin reduces pain " * 40]}).json()["predictions"]
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    expected = loaded.compute(["aspirin reduces pain " * 40], [None]).values[0]
    np.testing.assert_allclose(list(prediction["probabilities"].values()), expected, atol=1e-4)
    assert prediction["truncated"]


def test_a_model_with_logits_that_are_not_finite_raises(tiny_export: Path) -> None:
    broken = load_classifier(tiny_export)
    for parameter in broken.model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(DivergedError):
        ServedModel(Predictor(broken)).compute(["a"], [None])


def responses_of(served: ServedModel, *requests: dict[str, Any]) -> list[httpx.Response]:
    """The responses to requests to a server of this model."""

    async def submit() -> list[httpx.Response]:
        with batching(served) as batcher:
            app = build_app(batcher, name="mine", kind="classification", reads_pairs=False, limits=Limits(), metrics=Metrics(), token=None)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return [await client.post("/v1/predict", json=request) for request in requests]

    return asyncio.run(submit())


def test_pairs_are_refused_for_a_checkpoint_that_marks_the_second_text(tiny_export: Path) -> None:
    with_types = ServedModel(Predictor(replace(load_classifier(tiny_export), has_pair_embeddings=True)))
    alone, pair = responses_of(with_types, {"texts": ["a"]}, {"texts": ["a"], "pairs": ["b"]})
    assert alone.status_code == 200
    assert pair.status_code == 422
    assert "token_type_ids" in pair.json()["error"]


@pytest.mark.parametrize("trained_on_pairs", [True, False])
def test_a_client_that_sends_the_wrong_number_of_texts_reads_the_name_of_the_field(tiny_export: Path, trained_on_pairs: bool) -> None:
    predictor = Predictor(load_classifier(tiny_export))
    predictor.trained_on_pairs = trained_on_pairs
    single, pair = responses_of(ServedModel(predictor), {"texts": ["a", "b"]}, {"texts": ["a", "b"], "pairs": ["c", "d"]})
    refused, accepted = (single, pair) if trained_on_pairs else (pair, single)
    assert accepted.status_code == 200
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("pairs: this model reads ")
    assert "--" not in refused.json()["error"]
