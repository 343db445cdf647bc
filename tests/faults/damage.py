"""R4: a flipped byte, a truncated or missing file is detected by `verify` and at opening."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, measured
from workloads import World, run_child

from cramlm.data.corpus import verify_corpora
from cramlm.errors import ArtifactError
from cramlm.inference.predictor import Predictor
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Event
from cramlm.retrieval.bm25.index import verify_indexes
from cramlm.retrieval.index import Index
from cramlm.retrieval.selection import read_selection
from cramlm.storage.artifacts import MANIFEST, open_artifact, verify
from cramlm.training.checkpoints import load_newest


def openers(world: World) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield (published folder, function that opens it) for every kind of folder in a run, a store and an unfinished training."""
    catalog, run = world.folder / "catalog", world.folder / "run"
    for kind in ("parts", "corpora", "segments", "indexes"):
        for folder in sorted((catalog / kind).glob("*/")):
            yield folder, lambda: Index.open(catalog)
    yield run / "selection", lambda: read_selection(run / "selection")
    yield run / "tokenizer", lambda: (open_artifact(run / "tokenizer", kind="tokenizer"), Tokenizer.load(run / "tokenizer"))
    yield run / "export", lambda: Predictor.load(run / "export")
    for folder in sorted(run.glob("*/")):
        if (folder / MANIFEST).exists() and folder.name not in ("selection", "tokenizer", "export"):
            kind = json.loads((folder / MANIFEST).read_bytes())["kind"]
            yield folder, lambda folder=folder, kind=kind: open_artifact(folder, kind=kind)
    for folder in _checkpoints(world):
        key = json.loads((folder / MANIFEST).read_bytes())["key"]
        yield folder, lambda folder=folder, key=key: load_newest(folder.parent, fingerprint=key, emit=_raise_warning, stage="phase")


def _raise_warning(event: Event) -> None:
    """Training warns of a damaged checkpoint and continues from an older one."""
    if event.kind == "warning":
        raise ArtifactError(event.message)


@measured("R4", "a byte flipped, a file cut or gone, in every kind of folder: detected by `verify` and at opening")
def damages(figure: Figure, world: World, *, every: int | None, most: int | None, seed: int = 23) -> None:
    """Flip bytes, truncate and remove files. every: flip one byte in so many. most: a sample of so many cases."""
    generator = random.Random(seed)
    _interrupt_a_training(world)
    files = [
        (folder, path, opener)
        for folder, opener in openers(world)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    cases: list[tuple[Path, Path, Callable[[], object], str, int]] = []
    size = 0
    for folder, path, opener in files:
        length = path.stat().st_size
        size += length
        cases += [(folder, path, opener, "flip", offset) for offset in range(0, length, every or 1)]
        cases += [(folder, path, opener, "cut", length * sixteenth // 16) for sixteenth in range(16)]
        cases.append((folder, path, opener, "gone", 0))
    if most is not None and len(cases) > most:
        one_per_file = list({id(case[1]): case for case in cases}.values())
        count = min(len(one_per_file), most // 2)
        cases = [*generator.sample(one_per_file, count), *generator.sample(cases, most - count)]
    figure.notes.append(f"{len(files)} files, {size / 1e3:,.0f} kB")
    for folder, path, opener, how, offset in cases:
        whole = path.read_bytes()
        flipped = bytes([whole[offset] ^ 1 << generator.randrange(8)]) if how == "flip" else b""
        if path.name == MANIFEST and flipped.isspace() and whole[offset : offset + 1].isspace():
            continue  # JSON with other white space is equal
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:offset] + (flipped + whole[offset + 1 :] if how == "flip" else b""))
        try:
            _check(figure, f"{path.relative_to(world.folder)}: {how} at {offset}", folder, path, opener)
        finally:
            path.write_bytes(whole)


def _check(figure: Figure, where: str, folder: Path, path: Path, opener: Callable[[], object]) -> None:
    for name, check in (("verify", lambda: verify(folder)), ("opening", opener)):
        try:
            check()
        except ArtifactError as error:
            figure.check(str(path) in str(error) or str(folder) in str(error), f"{where}: {name} names another file: {error}")
        except Exception as error:
            figure.failures.append(f"{where}: {name} fails with {error!r}")
        else:
            file = path.relative_to(folder).as_posix()
            figure.check(name == "opening" and not is_read(folder, file), f"{where}: not detected by {name}")
    figure.trials += 1


def is_read(folder: Path, name: str) -> bool:
    """Return True if opening reads the file. Predictor does not read the card, the provenance and the language model of an export."""
    return folder.name != "export" or name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def _interrupt_a_training(world: World) -> None:
    """Leave the checkpoints of a training that was stopped after the first of them."""
    world.workloads()["train"].prepare(world.folder / "stopped")
    assert run_child(lambda: world.fit(world.folder / "stopped", stop=lambda: 75 if _checkpoints(world) else None)) == 75
    assert _checkpoints(world), "no checkpoint to damage"


def _checkpoints(world: World) -> list[Path]:
    return sorted((world.folder / "stopped/run/.work/phase-1-joint").glob("step-*"))


@measured("R4", "a whole part or segment that is gone: detected by `cramlm verify` of the store")
def store_damages(figure: Figure, world: World) -> None:
    catalog = world.folder / "catalog"
    for kind in ("parts", "segments"):
        for folder in sorted((catalog / kind).glob("*/")):
            aside = folder.rename(folder.with_name("aside.tmp-1"))
            try:
                verify(catalog)
                verify_corpora(catalog)
                verify_indexes(catalog)
            except ArtifactError as error:
                figure.check(str(folder) in str(error), f"{folder}: another folder is named: {error}")
            else:
                figure.failures.append(f"{kind}: not detected")
            finally:
                aside.rename(folder)
            figure.trials += 1
