from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_fixtures import FINGERPRINT

from cramlm.errors import ArtifactError
from cramlm.records import Event, silent
from cramlm.training.checkpoints import Progress, load_newest, restore_weights, save_checkpoint
from damaging import cut, flip

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.tensor([1.0, -2.0])}
MOMENTS = {"adamw/a.weight/exp_avg": torch.ones(2, 3), "adamw/a.weight/step": torch.tensor(5.0)}


def save(work: Path, step: int) -> Path:
    return save_checkpoint(work, Progress(step=step), weights=WEIGHTS, moments=MOMENTS, best={}, fingerprint=FINGERPRINT)


def names(work: Path) -> list[str]:
    return sorted(path.name for path in work.iterdir())


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 9_999, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000020", "step-00009999"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("weights.safetensors", lambda path: flip(path, path.stat().st_size // 2)),
        ("optimizer.safetensors", lambda path: cut(path, 0.5)),
        ("state.json", Path.unlink),
        ("manifest.json", lambda path: flip(path, path.stat().st_size // 2)),
    ],
    ids=["flipped weights", "cut moments", "no state", "flipped manifest"],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path, file: str, damage: Callable[[Path], object]) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20) / file)
    events: list[Event] = []
    assert load_newest(tmp_path, fingerprint=FINGERPRINT, emit=events.append, stage="phase").progress.step == 10
    assert [event.kind for event in events] == ["warning"]
    assert "step-00000020" in events[0].message


def test_a_checkpoint_of_other_settings_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    save(tmp_path, 10)
    changed = {"config": {"seed": 8, "phase": {"steps": 60}}, "data": "abc"}
    with pytest.raises(ArtifactError, match=r"config\.phase\.steps 30 -> 60; config\.seed 7 -> 8") as caught:
        load_newest(tmp_path, fingerprint=changed, emit=silent, stage="phase")
    assert caught.value.exit_code == 5


def test_a_state_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramlm.training.checkpoints.asdict", lambda _: {"step": 3, "epoch": 1})
    save(tmp_path, 3)
    with pytest.raises(ArtifactError, match="not a checkpoint of this version"):
        load_newest(tmp_path, fingerprint=FINGERPRINT, emit=silent, stage="phase")


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for leftover in (".step-00000020.tmp-123", ".step-00000005.tmp-old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path, fingerprint=FINGERPRINT, emit=silent, stage="phase") is not None
    assert names(tmp_path) == ["step-00000010"]


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"a.weight": WEIGHTS["a.weight"]}, "'b.bias' is missing"),
        ({**WEIGHTS, "c": torch.ones(1)}, "'c' is unknown"),
        ({**WEIGHTS, "b.bias": torch.ones(3)}, r"'b.bias' is torch.float32 \[3\], the model has torch.float32 \[2\]"),
        ({**WEIGHTS, "b.bias": torch.ones(2, dtype=torch.float64)}, "torch.float64"),
    ],
)
def test_weights_that_do_not_fit_name_the_tensor(weights: dict[str, Tensor], complaint: str) -> None:
    with pytest.raises(ArtifactError, match=complaint):
        restore_weights({name: value.clone() for name, value in WEIGHTS.items()}, weights, origin="step-1")
