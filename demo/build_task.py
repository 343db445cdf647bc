"""Build the demo's task and corpus from documentation that is already on this machine; no network.

    python demo/build_task.py --out runs/demo/data [--seed 13]

The task: which library does a short piece of documentation describe? There are eight libraries with twelve labelled texts each. Docstrings
are read with `ast`, without importing the packages; a task text is the opening prose of a public docstring. The names of all libraries are
replaced by the same word in every text. A quarter of each library's files is held out: dev and test come from held-out files, the corpus
does not contain them. The corpus is the remaining documentation of the standard library and the installed packages, without labels.

Output: train, dev, test.jsonl (text, label), corpus/*.jsonl.zst (id, text, source), all_labels.jsonl (all labelled passages outside the
held-out files, for headroom.py only) and counts.json. Equal seeds and installed versions give the same files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import multiprocessing
import random
import re
import shutil
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

TRAIN_PER_LABEL, DEV_PER_LABEL, TEST_PER_LABEL = 12, 16, 130
MIN_WORDS, MAX_WORDS = 10, 25  # of a task text; longer openings are truncated
HELD_OUT = 0.25  # share of a library's files
PER_FILE = 12  # maximum number of texts of one file in a split
NEAR_COPY = 8  # a task text shares no such number of consecutive words with the opening of another docstring
LEAK = 13  # a passage of the corpus shares no such number of consecutive words with a dev or test text
FILE_BYTES = 8_000_000  # of a corpus file, uncompressed
NEUTRAL = "library"

# Label = top-level package -> other spellings, aliases and makers. All of them are replaced in every text.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "huggingface_hub": ("huggingface", "hugging face", "huggingfacehub", "hf", "hfapi", "hffilesystem"),
    "networkx": ("nx",),
    "numba": ("llvmlite", "nb"),
    "scipy": (),
    "sklearn": ("scikit-learn", "scikit learn", "scikit"),
    "sympy": ("sympify",),
    "torch": ("pytorch", "aten", "libtorch", "torchscript", "functorch", "torchvision", "torchaudio", "c10d", "c10"),
    "transformers": ("🤗", "hfargumentparser"),
}
# Names of related libraries, which would reveal the label.
# fmt: off
NEIGHBOURS = (
    "numpy", "np", "numpydoc", "pandas", "pd", "matplotlib", "plt", "tensorflow", "keras", "jax", "cupy", "dask", "pyarrow", "polars",
    "narwhals", "mpmath", "mypy", "mypyc",
)
# fmt: on

_spellings = {*LIBRARIES, *NEIGHBOURS, *(alias for aliases in LIBRARIES.values() for alias in aliases)}
_alternatives = "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in sorted(_spellings, key=lambda name: (-len(name), name)))
_NAME = re.compile(rf"(?<![^\W_])(?:{_alternatives})(?![^\W\d_])", re.IGNORECASE)
_ROLE = re.compile(r":[\w:]+:`~?([^`<]*)(?:<[^`]*>)?`")
_WORD = re.compile(r"[^\W\d_]+")
_SECTION = re.compile(r"\s*(?:>>>|\.\. |[-=~^*+]{2,}|[-*] |\d+[.)] |:\w|@\w|```|\|)|.*::\s*$|\s*[A-Z]\w*(?: \w+)?:?\s*$")
_SKIPPED = {"tests", "test", "testing", "_vendor", "__pycache__", "site-packages", "idle_test", "licenses"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of documentation. opening: its task text, empty if there is none. words: lower-case words of the opening."""

    package: str
    file: str
    text: str
    opening: str

    @property
    def words(self) -> list[str]:
        return _WORD.findall(self.opening.lower())


def clean(text: str) -> str:
    """Remove role markup, backquotes and trailing blanks; replace library names."""
    plain = _ROLE.sub(r"\1", text).replace("`", "")
    return "\n".join(line.rstrip() for line in _NAME.sub(NEUTRAL, plain).splitlines()).strip()


def opening(text: str) -> str:
    """Return the first prose (before sections, lists, examples) in one line, at most MAX_WORDS words; empty if short or no sentence."""
    prose: list[str] = []
    for line in text.splitlines():
        if line.strip() and _SECTION.match(line):
            break
        prose += line.split()
    return " ".join(prose[:MAX_WORDS]) if len(prose) >= MIN_WORDS and re.fullmatch(r"[A-Z][a-z]*\W?", prose[0]) else ""


def docstrings(source: str) -> Iterator[str]:
    """Yield each docstring after a line with its name and arguments, and other long strings (documentation attached later)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        stack: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while stack:
        node, heading = stack.pop()
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield f"{heading}\n{inspect.cleandoc(text)}"
            case ast.Expr() | ast.Assign():
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.count("\n") >= 3:
                        yield f"\n{inspect.cleandoc(part.value)}"
            case ast.Module(body=body) | ast.If(body=body) | ast.Try(body=body) | ast.With(body=body):
                stack += [(child, "") for child in reversed(body)]
            case ast.ClassDef(name=name, body=body):
                stack += [(child, f"{name}:" if child is body[0] else "") for child in reversed(body)]
            case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
                arguments = ", ".join(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
                stack += [(child, f"{name}({arguments}):") for child in body[:1]]
            case _:
                pass


def read_file(job: tuple[str, str, str]) -> list[Piece]:
    """Return the pieces of a file; none if it is not UTF-8 or does not parse."""
    package, name, path = job
    try:
        source = Path(path).read_text("utf-8")
        texts = list(docstrings(source)) if path.endswith(".py") else ["\n" + part for part in re.split(r"\n(?=#+ )", source)]
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    pieces = []
    for text in texts:
        heading, _, body = (clean(part) for part in text.partition("\n"))
        if len(_WORD.findall(body)) >= MIN_WORDS:
            public = path.endswith(".py") and not heading.startswith("_")
            pieces.append(Piece(package, name, f"{heading} {body}".strip(), opening(body) if public else ""))
    return pieces


def find_files() -> list[tuple[str, str, str]]:
    """Return (package, name, path) of every source and documentation file, sorted."""
    jobs = []
    for root, whole in ((Path(sysconfig.get_path("purelib")), ""), (Path(sysconfig.get_path("stdlib")), "python")):
        for path in root.rglob("*"):
            name = path.relative_to(root)
            documents = path.suffix in {".py", ".rst", ".md"} or path.name == "METADATA"
            if documents and _SKIPPED.isdisjoint(name.parts) and "LICENSE" not in path.name.upper():
                jobs.append((whole or name.parts[0].removesuffix(".py").split("-")[0], name.as_posix(), str(path)))
    return sorted(jobs)


def runs(words: list[str], length: int, step: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield every `step`-th n-gram of `length` words."""
    return (tuple(words[start : start + length]) for start in range(0, len(words) - length + 1, step))


def without_duplicates(pieces: Iterable[Piece]) -> list[Piece]:
    """Drop pieces whose lower-case words are those of an earlier one."""
    seen: set[bytes] = set()
    kept = []
    for piece in pieces:
        key = hashlib.blake2b(" ".join(_WORD.findall(piece.text.lower())).encode(), digest_size=16).digest()
        if key not in seen:
            seen.add(key)
            kept.append(piece)
    return kept


def is_held_out(piece: Piece, seed: int) -> bool:
    """Return True for a quarter of the files of a library, by a hash of the file name and the seed."""
    digest = hashlib.blake2b(f"{seed} {piece.file}".encode(), digest_size=8).digest()
    return piece.package in LIBRARIES and int.from_bytes(digest, "big") / 2**64 < HELD_OUT


def take(candidates: list[Piece], count: int, rng: random.Random) -> list[Piece]:
    """Sample `count` pieces, at most PER_FILE of a file."""
    per_file: Counter[str] = Counter()
    chosen: list[Piece] = []
    for piece in rng.sample(candidates, len(candidates)):
        if len(chosen) < count and per_file[piece.file] < PER_FILE:
            per_file[piece.file] += 1
            chosen.append(piece)
    return chosen


def split(pieces: list[Piece], seed: int) -> dict[str, list[Piece]]:
    """Return train, dev, test, all_labels and corpus."""
    owners = Counter(run for piece in pieces if piece.opening for run in set(runs(piece.words, NEAR_COPY)))
    by_label: dict[tuple[str, bool], list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.package in LIBRARIES and piece.opening and all(owners[run] == 1 for run in runs(piece.words, NEAR_COPY)):
            by_label[piece.package, is_held_out(piece, seed)].append(piece)
    rng = random.Random(seed)
    parts: dict[str, list[Piece]] = defaultdict(list)
    for label in sorted(LIBRARIES):
        if len(by_label[label, True]) < 2 * DEV_PER_LABEL or len(by_label[label, False]) < TRAIN_PER_LABEL:
            raise SystemExit(f"build_task: too little documentation of {label} is installed; run `make setup` first")
        held_out = take(by_label[label, True], DEV_PER_LABEL + TEST_PER_LABEL, rng)
        parts["dev"] += held_out[:DEV_PER_LABEL]
        parts["test"] += held_out[DEV_PER_LABEL:]
        parts["train"] += take(by_label[label, False], TRAIN_PER_LABEL, rng)
        parts["all_labels"] += by_label[label, False]
    for part in parts.values():
        rng.shuffle(part)
    step = LEAK - NEAR_COPY + 1  # every n-gram of LEAK words contains one of NEAR_COPY words that starts at a multiple of `step`
    held_out_ngrams = {run for piece in (*parts["dev"], *parts["test"]) for run in runs(piece.words, NEAR_COPY)}
    labelled = {id(piece) for piece in parts["train"]}
    for piece in pieces:
        words = _WORD.findall(piece.text.lower())
        if not is_held_out(piece, seed) and id(piece) not in labelled and held_out_ngrams.isdisjoint(runs(words, NEAR_COPY, step)):
            parts["corpus"].append(piece)
    return parts


def write(parts: dict[str, list[Piece]], out: Path) -> dict[str, Any]:
    """Write the files, replacing the folder `out`, and return the counts."""
    temporary = out.with_name(f".{out.name}.building")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "corpus").mkdir(parents=True)
    for name in ("train", "dev", "test", "all_labels"):
        rows = [json.dumps({"text": piece.opening, "label": piece.package}, ensure_ascii=False) + "\n" for piece in parts[name]]
        (temporary / f"{name}.jsonl").write_text("".join(rows), "utf-8")
    lines: list[bytes] = []
    files, size = 0, 0
    for number, piece in enumerate(parts["corpus"], start=1):
        lines.append(json.dumps({"id": str(number), "text": piece.text, "source": piece.package}, ensure_ascii=False).encode() + b"\n")
        size += len(lines[-1])
        if sum(map(len, lines)) > FILE_BYTES or number == len(parts["corpus"]):
            compressed = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(b"".join(lines))
            (temporary / "corpus" / f"{files:02}.jsonl.zst").write_bytes(compressed)
            files, lines = files + 1, []
    counts = {
        "texts": {name: len(part) for name, part in parts.items()},
        "corpus_megabytes": round(size / 1e6, 1),
        "corpus_sources": dict(Counter(piece.package for piece in parts["corpus"]).most_common(12)),
    }
    (temporary / "counts.json").write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo's task and corpus from the documentation on this machine.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced if it is there")
    parser.add_argument("--seed", type=int, default=13)
    arguments = parser.parse_args()
    with multiprocessing.Pool() as pool:
        pieces = without_duplicates(piece for found in pool.imap(read_file, find_files(), chunksize=64) for piece in found)
    counts = write(split(pieces, arguments.seed), arguments.out)
    texts = counts["texts"]
    print(f"task: {len(LIBRARIES)} libraries; {texts['train']} train, {texts['dev']} dev, {texts['test']:,} test texts: {arguments.out}")
    print(f"raw text: {texts['corpus']:,} passages of documentation without labels, {counts['corpus_megabytes']} MB")


if __name__ == "__main__":
    main()
