"""Several ranks in one training are one training: the losses of one process, stops and resumes that are exact, no rank left behind."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_fixtures import FINGERPRINT, assert_same_bits, make_batches, make_model, make_phase, run_phase, weights_of

from cramlm.config.phase import PhaseConfig
from cramlm.errors import ArtifactError, DataError
from cramlm.model.model import Model
from cramlm.records import Event
from cramlm.training.ranks import ALONE, Ranks, Stop, never
from cramlm.training.sequences import share_of_batch
from ranks import error_messages, exit_codes, start_ranks

PHASE = make_phase(steps=12, checkpoint_every=4, evaluate_every=3, dropout=0.2)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_ranks_on_the_cpu_use_no_gpu_where_there_are_fewer_than_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def work(ranks: Ranks) -> None:
        number = torch.tensor([1.0 + ranks.index])
        ranks.sum_([number])
        (tmp_path / f"sum-{ranks.index}").write_text(str(number.item()), "utf-8")

    pids = start_ranks(2, work, errors=tmp_path / "errors")
    assert (exit_codes(pids), error_messages(tmp_path / "errors")) == ([0, 0], [])
    assert {path.read_text("utf-8") for path in tmp_path.glob("sum-*")} == {"3.0"}


Accident = Callable[[Model], int | None]


def at(boundary: int, accident: Accident) -> Callable[[Model], Stop]:
    """A `stop` during whose call at a step boundary something happens to this rank."""

    def stop_of(model: Model) -> Stop:
        calls = count()
        return lambda: accident(model) if next(calls) == boundary else None

    return stop_of


Build = Callable[..., Model]


def train(
    phase: PhaseConfig, folder: Path, *, accidents: Mapping[int, Callable[[Model], Stop]] | None = None, build: Build = make_model
) -> Callable[[Ranks], None]:
    """What each rank does: the phase, from other weights than the first rank's; results in `folder/weights-N` and `folder/losses`."""

    def work(ranks: Ranks) -> None:
        model = build(seed=7 if ranks.index == 0 else 1000 + ranks.index)
        events: list[Event] = []
        stop = (accidents or {}).get(ranks.index, lambda model: never)(model)
        fingerprint = {**FINGERPRINT, **ranks.settings}
        result = run_phase(model, phase, folder / "work", emit=events.append, stop=stop, fingerprint=fingerprint, ranks=ranks)
        save_file(weights_of(model), folder / f"weights-{ranks.index}")
        if ranks.index == 0:
            steps = [dict(event.data) for event in events if event.kind == "step"]
            (folder / "losses").write_text(json.dumps([steps, result.best_score, result.tokens, result.padded_tokens]), "utf-8")

    return work


def results(folder: Path, *, rank: int = 0) -> tuple[dict[str, torch.Tensor], list[Any]]:
    return load_file(folder / f"weights-{rank}"), json.loads((folder / "losses").read_text("utf-8"))


def several(ranks: int, phase: PhaseConfig, folder: Path, **changes: Any) -> list[int]:
    """Train on so many ranks; their exit codes. changes: accidents and build of `train`."""
    return exit_codes(start_ranks(ranks, train(phase, folder, **changes), errors=folder / "errors"))


ADAMW = {"optimizer": {"kind": "adamw"}}
PHASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (ADAMW, {}),
    ({**ADAMW, "external": 0, "text_weight": 0.0}, {}),
    ({"mixing": "interleaved", "loss_scale": "mean"}, {}),
    ({"external": 0, "text_weight": 0.0, "label_smoothing": 0.1}, {}),
    ({"external": 0, "batch_size": 2, "batch_unit": "sequences"}, {}),
    ({"text": "causal", "label_weight": 0.0}, {}),
    ({**ADAMW, "text": "causal", "of_text": {"share": 0.5}}, {}),
    ({**ADAMW, "text": "replaced_tokens"}, {"generator": 16}),
    (ADAMW, {"shape": "moe"}),
    (ADAMW, {"shape": "albert"}),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("changes", "model"), [pytest.param(*case, marks=[] if case == (ADAMW, {}) else pytest.mark.slow) for case in PHASES]
)
def test_any_phase_and_model_on_several_ranks_has_the_losses_of_one_process(
    tmp_path: Path, ranks: int, changes: dict[str, Any], model: dict[str, Any]
) -> None:
    phase, build = make_phase(steps=12, evaluate_every=4, **changes), functools.partial(make_model, **model)
    (tmp_path / "one").mkdir()
    train(phase, tmp_path / "one", build=build)(ALONE)
    expected, (steps, best, tokens, padded) = results(tmp_path / "one")
    folder = tmp_path / "several"
    assert several(ranks, phase, folder, build=build) == [0] * ranks, error_messages(folder / "errors")
    weights, (together, *rest) = results(folder)
    assert rest == [best, tokens, padded]
    for alone, shared in zip(steps, together, strict=True):
        for term in ("loss", "mlm_external", "mlm_task", "causal_external", "causal_task", "classify_task"):
            assert (term in alone) == (term in shared)
            if term in alone:
                assert shared[term] == pytest.approx(alone[term], rel=1e-5), f"{term} at step {alone['step']}"
    for rank in range(1, ranks):
        assert_same_bits(results(folder, rank=rank)[0], weights)
    if phase.optimizer.kind == "adamw":  # Muon gives directions without gradient a size, and their sign hangs on the last bit
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 5, 40])
def test_every_row_is_computed_by_one_rank_and_rows_and_tokens_are_balanced(ranks: int) -> None:
    whole = make_batches(make_phase(batch_size=700)).batch(3)
    shares = [share_of_batch(whole, index, ranks) for index in range(ranks)]
    real = [part for part in shares if len(part.first)]
    assert sum(part.tokens for part in shares) == whole.tokens
    assert sorted(row.tobytes() for part in real for row in part.token_ids) == sorted(row.tobytes() for row in whole.token_ids)
    assert max(len(part.token_ids) for part in shares) - min(len(part.token_ids) for part in shares) <= 1
    fullest = int((whole.sequence >= 0).sum(axis=1).max())
    assert max(part.tokens for part in shares) - min(part.tokens for part in shares) <= fullest
    for part in real:
        assert part.sequence.max() + 1 == len(part.first) == len(part.task_labels) == len(part.external)
        assert (part.sequence.ravel()[part.first] == np.arange(len(part.first))).all()
        assert (part.position.ravel()[part.first] == 0).all()
        assert len(part.masked) == len(part.mlm_labels)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of two ranks after `PHASE` without an accident."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert several(2, PHASE, folder) == [0, 0], error_messages(folder / "errors")
    return results(folder)[0]


def assert_goes_on_exactly(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """The same two ranks again finish, with these bits."""
    assert several(2, PHASE, folder) == [0, 0], error_messages(folder / "errors")
    assert_same_bits(results(folder)[0], expected)


@pytest.mark.faults
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_61_training_resumes_with_the_same_bits_after_a_rank_was_killed(
    tmp_path: Path, killed: int, undisturbed: dict[str, torch.Tensor]
) -> None:
    """A broken connection is noticed at once: with the timeout of an hour this test would not end."""
    folder = tmp_path / "killed"
    codes = several(2, PHASE, folder, accidents={killed: at(7, lambda model: os.kill(os.getpid(), signal.SIGKILL))})
    assert codes == ([-signal.SIGKILL, 4] if killed == 0 else [4, -signal.SIGKILL])
    (line,) = error_messages(folder / "errors")
    assert line.startswith(f"rank {1 - killed} of 2: another rank is gone")
    assert "run the same command again" in line
    assert_goes_on_exactly(folder, undisturbed)


@pytest.mark.slow
def test_61_a_rank_that_is_late_ends_all_within_the_timeout_and_a_slow_dev_score_does_not(tmp_path: Path) -> None:
    def late(ranks: Ranks) -> None:
        ranks.on_leader(lambda: time.sleep(6))
        if ranks.index == 1:
            time.sleep(5)
        ranks.largest_exit_code(None)

    assert exit_codes(start_ranks(2, late, errors=tmp_path, timeout=3)) == [4, 4]
    assert "within 3 s" in error_messages(tmp_path)[0]


@pytest.mark.slow
def test_61_ranks_end_within_the_timeout_if_one_does_not_connect(tmp_path: Path) -> None:
    pids = start_ranks(3, lambda ranks: None, errors=tmp_path, timeout=4)
    os.kill(pids[2], signal.SIGKILL)
    assert exit_codes(pids) == [4, 4, -signal.SIGKILL]


@pytest.mark.slow
def test_53_a_signal_to_one_rank_stops_all_at_the_same_boundary_twice_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    folder = tmp_path / "stopped"
    for rank, boundary in ((1, 5), (0, 4)):
        codes = several(2, PHASE, folder, accidents={rank: at(boundary, lambda model: 75)})
        assert codes == [75, 75]
        (line,) = error_messages(folder / "errors")
        assert "stopped after step" in line
    assert (folder / "work" / "step-00000009").is_dir()
    assert_goes_on_exactly(folder, undisturbed)


@pytest.mark.slow
def test_60_another_number_of_ranks_is_refused_in_the_middle_of_a_phase(tmp_path: Path) -> None:
    assert several(2, PHASE, tmp_path, accidents={0: at(5, lambda model: 75)}) == [75, 75]
    assert several(3, PHASE, tmp_path) == [5, 5, 5]
    (line,) = error_messages(tmp_path / "errors")
    assert "ranks 2 -> 3" in line
    with pytest.raises(ArtifactError, match="ranks 2 -> unset"):
        train(PHASE, tmp_path)(ALONE)


@pytest.mark.slow
def test_weights_that_differ_between_ranks_are_not_saved(tmp_path: Path) -> None:
    def nudge(model: Model) -> None:
        with torch.no_grad():
            model.classifier.dense.weight[0, 0] += 1e-6

    assert several(2, PHASE, tmp_path, accidents={1: at(2, nudge)}) == [4, 4]
    (line,) = error_messages(tmp_path / "errors")
    assert "drifted apart" in line


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "codes"), [(0, [3, 3, 3]), (1, [4, 3, 4])])
def test_an_error_of_one_rank_ends_all_with_one_line_each(tmp_path: Path, failing: int, codes: list[int]) -> None:
    def fail(ranks: Ranks) -> None:
        if failing == 0:
            ranks.lead()
        if ranks.index == failing:
            raise DataError("train.jsonl:3: no label; add one")
        ranks.on_leader(lambda: None)
        ranks.largest_exit_code(None)

    assert exit_codes(start_ranks(3, fail, errors=tmp_path)) == codes
    lines = error_messages(tmp_path)
    assert "train.jsonl:3: no label; add one" in lines
    assert all("another rank is gone" in line for line in lines if "no label" not in line)
