"""R11: malicious folders and archives. No code in them is executed, and nothing is written outside of the output folder.

The parent process traces every program start and every file that any thread opens for writing (syscalls.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from crashes import command
from figures import Figure, measured
from syscalls import CHANGES, Call, supervise
from workloads import World

from cramlm.storage.artifacts import MANIFEST, hash_json
from damaging import Marker, edit_header, edit_json

PRIVATE = f"{tempfile.gettempdir()}/cramlm-"  # private folders from tempfile
PICKLES = ("pytorch_model.bin", "model.pt", "scaler.pkl", "head.joblib", "MODEL.PTH", "weights.pkl.gz", "optimizer.ckpt", "x.dill")


@dataclass(frozen=True, slots=True)
class Attack:
    """spoil: changes the target (a copy of the export, the catalog or the run). codes: the expected exit codes."""

    name: str
    target: str
    arguments: tuple[str, ...]
    spoil: Callable[[Path, Path], object]
    codes: tuple[int, ...] = (5,)


def attacks(alike: int | None) -> Iterator[Attack]:
    """Yield all attacks, or only so many of those that differ by a name alone."""
    predict = ("predict", "{target}", "{texts}", "--out", "{out}/predictions.jsonl")
    for name in PICKLES[:alike]:
        yield Attack(name, "export", predict, lambda folder, mark, name=name: (folder / name).write_bytes(pickle.dumps(Marker(mark))))
    yield Attack(
        "objects.npy", "export", predict, lambda folder, mark: np.save(folder / "x.npy", np.array([Marker(mark)]), allow_pickle=True)
    )
    for file, key in list(product(("tokenizer_config.json", "config.json"), ("auto_map", "trust_remote_code", "custom_code")))[:alike]:
        yield Attack(f"{key} in {file}", "export", predict, _with_code(file, key))
    yield Attack("a header of 2^62 bytes", "export", predict, _huge_header)
    yield Attack("overlapping tensors", "export", predict, _overlap)
    yield Attack("config nested 100,000 deep", "export", predict, _text("config.json", "[" * 100_000 + "]" * 100_000))
    yield Attack("tokenizer that is no tokenizer", "export", predict, _text("tokenizer.json", '{"version": "1.0", "model": {"type": "x"}}'))
    yield Attack("weights that are a pickle by content", "export", predict, _pickle_inside)
    yield Attack("a manifest that names files above", "export", ("verify", "{target}"), _manifest_above)
    yield Attack("a manifest nested 100,000 deep", "export", ("verify", "{target}"), _text(MANIFEST, "[" * 100_000 + "]" * 100_000))
    search = ("search", "{target}", "wave ship")
    yield Attack("a catalog that leads elsewhere", "catalog", search, _text("catalog.json", '{"corpus": "../../../etc", "index": "/etc"}'))
    yield Attack("an object array in an index", "catalog", search, _objects("segments/*/postings.npy"))
    yield Attack("an object array in a corpus", "catalog", search, _objects("corpora/*/source.npy"))
    yield Attack("hostile text in a run", "run", ("report", "{target}", "--out", "{out}/page.html"), _hostile_text, (0, 5))
    for name in ("a.jsonl", "a.tar", "a.zip", "a.csv", "a.tar.gz")[:alike]:
        index = ("index", "{out}/" + name, "--out", "{out}/index")
        yield Attack(f"an archive with ../ named {name}", "export", index, _archive(name), (3,))


@measured("R11", "hostile folders and archives: nothing executed, nothing written elsewhere, refused with one line")
def hostile(figure: Figure, world: World, scratch: Path, *, alike: int | None = None) -> None:
    """For model folders, indexes, runs and archives; tests/serving has hostile requests. alike: as in `attacks`."""
    for attack in attacks(alike):
        with figure.trial(scratch) as folder:
            target, out = folder / attack.target, folder / "out"
            out.mkdir(parents=True)
            shutil.copytree(world.folder / ("run/export" if attack.target == "export" else attack.target), target)
            (out / "texts.txt").write_text("wave ship\n")
            mark = folder / "executed"
            attack.spoil(target, mark)
            seen: list[str] = []
            paths = {"target": str(target), "out": str(out), "texts": str(out / "texts.txt")}
            code = supervise(
                command([argument.format(**paths) for argument in attack.arguments], out),
                lambda call, out=out, seen=seen: _watch(call, out, seen),
                names=(*CHANGES, "execve", "execveat"),
            )
            errors = (out / "stderr").read_text()
            figure.check(code in attack.codes, f"{attack.name}: exit {code}: {errors[-300:]}")
            figure.check("Traceback" not in errors, f"{attack.name}: a traceback")
            figure.check(not mark.exists(), f"{attack.name}: code was executed")
            figure.check(not seen, f"{attack.name}: {seen[:3]}")


def _watch(call: Call, out: Path, seen: list[str]) -> None:
    if call.name.startswith("exec"):
        seen.append(f"starts {call.path}")
    elif call.changes and not call.path.startswith((str(out), PRIVATE, "/dev/", "pipe:", "socket:", "anon_inode:", "/proc/self")):
        seen.append(f"{call.name} {call.path}")


def _unlisted(folder: Path) -> None:
    """Remove the manifest, so that the attack is refused and not the changed hash."""
    (folder / MANIFEST).unlink(missing_ok=True)


def _with_code(file: str, key: str) -> Callable[[Path, Path], object]:
    def spoil(folder: Path, mark: Path) -> None:
        _unlisted(folder)
        (folder / "modeling_evil.py").write_text(f"import os; os.mkdir({str(mark)!r})", "utf-8")
        value = {"AutoModelForSequenceClassification": "modeling_evil.Model"} if key == "auto_map" else True
        edit_json(folder / file, **{key: value})

    return spoil


def _text(file: str, content: str) -> Callable[[Path, Path], object]:
    def spoil(folder: Path, mark: Path) -> None:
        if file != MANIFEST:
            _unlisted(folder)
        (folder / file).write_text(content, "utf-8")

    return spoil


def _huge_header(folder: Path, mark: Path) -> None:
    _unlisted(folder)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def _overlap(folder: Path, mark: Path) -> None:
    _unlisted(folder)

    def change(fields: dict[str, Any]) -> None:
        tensors = [value for name, value in fields.items() if name != "__metadata__"]
        tensors[1]["data_offsets"] = tensors[0]["data_offsets"]

    edit_header(folder / "model.safetensors", change)


def _pickle_inside(folder: Path, mark: Path) -> None:
    _unlisted(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Marker(mark)))


def _manifest_above(folder: Path, mark: Path) -> None:
    _list_file(folder, "../../../../../../../../etc/passwd", {"bytes": 1, "sha256": "0" * 64})


def _list_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Set a file's entry in the manifest, with a valid hash of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = entry
    del manifest["sha256"]
    edit_json(folder / MANIFEST, files=manifest["files"], sha256=hash_json(manifest))


def _objects(pattern: str) -> Callable[[Path, Path], object]:
    def spoil(folder: Path, mark: Path) -> None:
        (path,) = folder.glob(pattern)
        np.save(path, np.array([Marker(mark)]), allow_pickle=True)
        content = path.read_bytes()
        _list_file(path.parent, path.name, {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    return spoil


def _hostile_text(folder: Path, mark: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "warning", "stage": "<script>", "message": "</script><img src=x onerror=alert(1)>", "time": 1e308}\n{"half')


def _archive(name: str) -> Callable[[Path, Path], object]:
    def spoil(folder: Path, mark: Path) -> None:
        content = io.BytesIO()
        if ".tar" in name or name == "a.csv":
            with tarfile.open(fileobj=content, mode="w:gz" if name.endswith("gz") else "w") as archive:
                for inside in (f"../../../../..{mark}", "link"):
                    entry = tarfile.TarInfo(inside)
                    entry.type, entry.linkname = (tarfile.SYMTYPE, "/etc/passwd") if inside == "link" else (tarfile.REGTYPE, "")
                    archive.addfile(entry, io.BytesIO(b""))
        else:
            with zipfile.ZipFile(content, "w") as zip_file:
                zip_file.writestr(f"../../../../..{mark}", "x")
        (folder.parent / "out" / name).write_bytes(content.getvalue())

    return spoil
