"""R5: bad input files for every row of the fault list, read by every command that reads such files.

Each `Case` has the expected exit code, and words that the last line on stderr must contain (the file, the line, the column).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from figures import Figure, measured
from workloads import World, results

from commands import cramlm

ROWS = [{"text": f"wave ship harbour number {number}", "label": "sea" if number % 2 else "hill"} for number in range(20)]
BAD_LINE = 9  # the line with the bad row in the files below
TASK, CORPUS, PREDICT, EVALUATE = "fit", "index", "predict", "evaluate"
ALL = (TASK, CORPUS, PREDICT, EVALUATE)
TEXTS = (TASK, PREDICT, EVALUATE)  # a blank text is an error here; a corpus drops it
LABELLED = (TASK, EVALUATE)


@dataclass(frozen=True, slots=True)
class Case:
    """row: of the fault list. file: its name. content: None if `make_file` makes something else. words: parts of the last line."""

    row: int
    what: str
    file: str
    content: bytes | None
    code: int
    words: tuple[str, ...] = ()
    commands: tuple[str, ...] = ALL
    skippable: bool = False


def jsonl(rows: Sequence[object] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv(separator: str = ",") -> bytes:
    return "".join(f"{row['text']}{separator}{row['label']}\n" for row in [{"text": "text", "label": "label"}, *ROWS]).encode()


def parquet(**columns: object) -> bytes:
    table = pa.table({"text": [row["text"] for row in ROWS], "label": [row["label"] for row in ROWS]} | columns)
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


def replaced(content: bytes, line: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines[BAD_LINE - 1] = line + b"\n"
    return b"".join(lines)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for some in (_files, _csv_rows, _json_rows, _compressed, _parquet, _tasks):
        yield from some()


def _files() -> Iterator[Case]:
    for name in ("gone.jsonl", "folder.jsonl", "pipe.jsonl", "loop.jsonl", "socket.jsonl"):
        folder_is_corpus = (TASK, PREDICT, EVALUATE) if name.startswith("folder") else ALL
        yield Case(28 if name[0] in "pls" else 1, name, name, None, 2, (name,), folder_is_corpus)
    for name in ("a.jsonl", "a.csv", "a.tsv", "a.txt"):
        yield Case(2, "zero bytes", name, b"", 3, (name, "no rows"), ALL if name != "a.txt" else (CORPUS, PREDICT))
    for name, header in (("a.csv", b"text,label\n"), ("a.tsv", b"text\tlabel\n")):
        yield Case(2, "only a header", name, header, 3, (name, "only a header"))
    for name, encoding in (("utf-16", "utf-16"), ("utf-32", "utf-32"), ("utf-16 big end", "utf-16-be")):
        for suffix, content in ((".csv", csv()), (".jsonl", jsonl())):
            mark = b"\xfe\xff" if encoding.endswith("be") else b""
            yield Case(5, name, f"a{suffix}", mark + content.decode().encode(encoding), 3, ("iconv",))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("../../outside.jsonl", jsonl())
    for name in ("a.zip", "a.jsonl", "a.csv", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        yield Case(23, "a zip archive", name, archive.getvalue(), 3, (name,))
    for name in ("a.tar", "a.tar.gz", "a.tgz", "a.7z", "a.rar"):
        yield Case(23, "an archive by its name", name, b"x" * 600, 3, (name,), ALL)
    disguises = {
        "a.csv": (gzip.compress(csv()), parquet(), zstandard.compress(csv())),
        "a.jsonl": (gzip.compress(jsonl()), parquet(), zstandard.compress(jsonl()), b"%PDF-1.4\n", b"BZh91AY", b"\xfd7zXZ\0\0"),
        "a.jsonl.gz": (jsonl(), zstandard.compress(jsonl())),
        "a.jsonl.zst": (jsonl(), gzip.compress(jsonl())),
        "a.parquet": (csv(), jsonl(), gzip.compress(csv())),
    }
    for name, contents in disguises.items():
        for content in contents:
            yield Case(24, "content of another format", name, content, 3, (name, "looks like"))
    for name in ("a", "a.xlsx", "a.doc", "a.parquet.gz"):
        yield Case(24, "a name without a format", name, jsonl(), 2, (name, "format"))


def _csv_rows() -> Iterator[Case]:
    for separator, suffix in ((",", ".csv"), ("\t", ".tsv")):
        name, good, tab = f"a{suffix}", csv(separator), separator.encode()
        where = f"{name}:{BAD_LINE}"
        bad_lines = {
            7: b"caf\xe9 at sea" + tab + b"sea",
            8: b"nul \0 here" + tab + b"sea",
            9: b'"never closed' + tab + b"sea",
            10: b"one field only",
        }
        for row, line in bad_lines.items():
            yield Case(row, "in line 9", name, replaced(good, line), 3, (where,), skippable=row != 9)
        yield Case(10, "a field too many", name, replaced(good, tab.join([b"a", b"b", b"c"])), 3, (where, "expected 2"), skippable=True)
        yield Case(9, "text behind a quote", name, replaced(good, b'"a"b' + tab + b"sea"), 3, (where,), skippable=True)
        yield Case(13, "an empty label", name, replaced(good, b"wave" + tab), 3, (where, "label"), LABELLED, skippable=True)
        yield Case(11, "a blank text", name, replaced(good, b"  " + tab + b"sea"), 3, (where, "blank"), TEXTS, skippable=True)
        header = tab.join([b"text", b"label"])
        for column in ("Text", "words"):
            other = good.replace(header, tab.join([column.encode(), b"label"]), 1)
            yield Case(3, "no such column", name, other, 3, ("--text-column", repr(column)))
        yield Case(3, "no label column", name, good.replace(header, b"text" + tab + b"class", 1), 3, ("--label-column",), LABELLED)
        yield Case(4, "a column twice", name, good.replace(header, b"text" + tab + b"text", 1), 3, ("1 and 2",))
        long = replaced(good, b"x" * 17_000_000 + tab + b"sea")
        yield Case(19, "a long line", name, long, 3, (where, "max_record_bytes"), (TASK, CORPUS))
    yield Case(3, "bars", "a.csv", csv("|"), 3, ("--text-column", "bars"))


def _json_rows() -> Iterator[Case]:
    good, where = jsonl(), f"a.jsonl:{BAD_LINE}"
    lines: dict[str, tuple[int, bytes]] = {
        "cut off": (15, b'{"text": "wave", "label": '),
        "no key text": (15, b'{"label": "sea"}'),
        "text is a number": (15, b'{"text": 7, "label": "sea"}'),
        "text is null": (15, b'{"text": null, "label": "sea"}'),
        "text is a list": (15, b'{"text": ["wave"], "label": "sea"}'),
        "text is an object": (15, b'{"text": {}, "label": "sea"}'),
        "a key twice": (15, b'{"text": "a", "text": "b", "label": "sea"}'),
        "a list": (15, b'["wave", "sea"]'),
        "a string": (15, b'"wave"'),
        "more behind": (15, b'{"text": "wave", "label": "sea"} {}'),
        "NaN": (15, b'{"text": "wave", "label": "sea", "x": NaN}'),
        "single quotes": (15, b"{'text': 'wave', 'label': 'sea'}"),
        "a comma too many": (15, b'{"text": "wave", "label": "sea",}'),
        "a control character": (15, b'{"text": "wa\x01ve", "label": "sea"}'),
        "a bad escape": (15, b'{"text": "wa\\qve", "label": "sea"}'),
        "a lone surrogate": (17, b'{"text": "wa\\ud83dve", "label": "sea"}'),
        "a lone low surrogate": (17, b'{"text": "wa\\ude00ve", "label": "sea"}'),
        "nested lists": (18, b'{"text": "wave", "label": "sea", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "nested objects": (18, b'{"text": "wave", "label": "sea", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
        "never closed lists": (18, b"[" * 100_000),
        "a byte that is not UTF-8": (7, b'{"text": "caf\xe9", "label": "sea"}'),
        "a NUL byte": (8, b'{"text": "wa\0ve", "label": "sea"}'),
        "a half emoji": (7, b'{"text": "\xf0\x9f\x8c", "label": "sea"}'),
        "an overlong encoding": (7, b'{"text": "\xc0\xaf", "label": "sea"}'),
        "a surrogate in UTF-8": (7, b'{"text": "\xed\xa0\xbd", "label": "sea"}'),
    }
    for what, (row, line) in lines.items():
        yield Case(row, what, "a.jsonl", replaced(good, line), 3, (where,), skippable=True)
    for what, value in {"null": "null", "empty": '""', "blank": '" "'}.items():
        line = f'{{"text": "wave", "label": {value}}}'.encode()
        yield Case(13, f"a label that is {what}", "a.jsonl", replaced(good, line), 3, (where, "label"), LABELLED, skippable=True)
    for label in (b"[1]", b"{}"):
        yield Case(14, "a label of no kind", "a.jsonl", replaced(good, b'{"text": "wave", "label": %b}' % label), 3, (where,), LABELLED)
    yield Case(14, "labels of two types", "a.jsonl", replaced(good, b'{"text": "wave", "label": 7}'), 3, (where, "line 1"), LABELLED)
    blank = replaced(good, b'{"text": " \\t", "label": "sea"}')
    yield Case(11, "a blank text", "a.jsonl", blank, 3, (where, "blank"), TEXTS, skippable=True)
    yield Case(16, "the last line cut", "a.jsonl", good[:-9], 3, ("a.jsonl:20", "truncated"))
    yield Case(15, "one list", "a.jsonl", json.dumps(ROWS, indent=1).encode(), 3, ("a.jsonl:1",))
    repeated = jsonl([{**row, "id": number % 7} for number, row in enumerate(ROWS)])
    yield Case(26, "ids twice", "a.jsonl", repeated, 3, ("a.jsonl",), (CORPUS,))


def _compressed() -> Iterator[Case]:
    text = jsonl([{**row, "text": f"{row['text']} {os.urandom(40).hex()}"} for row in ROWS])
    for name, content in (
        ("a.jsonl.gz", gzip.compress(text)),
        ("a.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(text)),
    ):
        for sixteenth in range(1, 16):
            offset = len(content) * sixteenth // 16
            yield Case(20, f"cut at {sixteenth}/16", name, content[:offset], 3, (name, "truncated"), (TASK, CORPUS))
            flipped = content[:offset] + bytes([content[offset] ^ 8]) + content[offset + 1 :]
            yield Case(21, f"a bit flipped at {sixteenth}/16", name, flipped, 3, (name,), (TASK, CORPUS))
    bomb = zstandard.ZstdCompressor(level=19).compress(b"x" * 100_000_000)
    yield Case(22, "a bomb", "a.jsonl.zst", bomb, 3, ("a.jsonl.zst:1", "max_record_bytes"), (CORPUS,))
    yield Case(22, "a bomb", "a.txt.gz", gzip.compress(b"x" * 100_000_000), 3, ("a.txt.gz:1", "max_record_bytes"), (CORPUS,))


def _parquet() -> Iterator[Case]:
    good, name = parquet(), "a.parquet"
    for sixteenth in range(16):
        yield Case(20, f"cut at {sixteenth}/16", name, good[: len(good) * sixteenth // 16], 3, (name,), (TASK, CORPUS))
    texts = [row["text"] for row in ROWS]
    kinds = {
        "binary": pa.array([text.encode() for text in texts]),
        "list": pa.array([[text] for text in texts]),
        "number": pa.array(range(20)),
        "struct": pa.array([{"a": text} for text in texts]),
    }
    for kind, values in kinds.items():
        yield Case(25, f"text of type {kind}", name, parquet(text=values), 3, (name, "'text'"))
    holes: list[str | None] = [*texts[:8], None, *texts[9:]]
    yield Case(11, "a null text", name, parquet(text=pa.array(holes)), 3, (f"{name}:9",), skippable=True)
    yield Case(13, "a null label", name, parquet(label=pa.array([None, *["a", "b"] * 9, "a"])), 3, (f"{name}:1", "label"), LABELLED)
    damaged = good[:40] + bytes([good[40] ^ 16]) + good[41:]
    yield Case(21, "a bit flipped in a page", name, damaged, 3, (name,), (TASK, CORPUS))
    footer = good[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1"
    yield Case(66, "a footer of 2 GB", name, footer, 3, (name,), (TASK, CORPUS))


def _tasks() -> Iterator[Case]:
    one = [{"text": f"wave {number}", "label": "sea"} for number in range(10)]
    yield Case(32, "one class", "a.jsonl", jsonl(one), 3, ("at least two",), (TASK,))
    yield Case(32, "one row", "a.jsonl", jsonl(one[:1]), 3, ("1 training row",), (TASK,))
    yield Case(33, "labels like ids", "a.jsonl", jsonl([{"text": f"wave {n}", "label": f"{n}.5"} for n in range(10)]), 3, ("bin",), (TASK,))
    unseen = jsonl([*ROWS, {"text": "a", "label": "lake"}])
    yield Case(31, "a label that the model lacks", "a.jsonl", unseen, 3, ("a.jsonl:21", "lake"), (EVALUATE,))


def make_file(case: Case, folder: Path) -> Path:
    """Make the file of a case, or a folder, pipe, link or socket with its name."""
    path = folder / case.file
    if case.content is not None:
        path.write_bytes(case.content)
    elif case.file.startswith("folder"):
        path.mkdir()
    elif case.file.startswith("pipe"):
        os.mkfifo(path)
    elif case.file.startswith("loop"):
        path.symlink_to(path)
    elif case.file.startswith("socket"):
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket has at most 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(case.file)
        finally:
            os.chdir(here)
    return path


def arguments(command_name: str, path: Path, world: World, folder: Path) -> list[str | Path]:
    """Return the command line that reads a file."""
    export = world.folder / "run/export"
    rest: dict[str, list[str | Path]] = {
        TASK: ["--train", path, "--recipe", "labels-only", "--out", folder / "run", "--store", folder / "store"],
        CORPUS: [path, "--out", folder / "index", "--workers", "1"],
        PREDICT: [export, path, "--out", folder / "predictions.jsonl"],
        EVALUATE: [export, path],
    }
    return [command_name, *rest[command_name]]


@measured("R5", "bad input files x commands that read them: one line, the right exit code, the location, nothing published")
def bad_inputs(figure: Figure, world: World, scratch: Path, *, most: int | None = None) -> None:
    """Every case with each of its commands. most: only so many of them, from all rows."""
    chosen = [(case, name) for case in cases() for name in case.commands]
    figure.notes.append(f"of {len(chosen)}")
    step = 1 if most is None or most >= len(chosen) else len(chosen) / most
    rows = set()
    for case, name in (chosen[int(number * step)] for number in range(int(len(chosen) / step))):
        rows.add(case.row)
        with figure.trial(scratch) as folder:
            _one(figure, case, name, world, folder)
    figure.notes.append(f"rows {', '.join(map(str, sorted(rows)))}")


def _one(figure: Figure, case: Case, name: str, world: World, folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    path = make_file(case, folder / "data")
    done = cramlm(*arguments(name, path, world, folder))
    code, errors = done.returncode, done.stderr
    last = (errors.strip().splitlines() or [""])[-1]
    where = f"row {case.row}, {case.what}, {name} {case.file}"
    figure.check(code == case.code, f"{where}: exit {code} instead of {case.code}: {last[:300]}")
    figure.check(last.startswith("cramlm: error: ") and "Traceback" not in errors, f"{where}: not one line: {errors[-300:]}")
    for words in case.words:
        figure.check(words in last, f"{where}: {words!r} is not in {last[:300]!r}")
    # Parts are a cache of single files, not results.
    left = [published for published in results(folder) if Path(published).parent.name != "parts" and published != "run/baseline"]
    figure.check(not left and not (folder / "predictions.jsonl").exists(), f"{where}: published {left}")
    if case.skippable and name == CORPUS:
        done = cramlm(*arguments(name, path, world, folder), "--on-bad-row", "skip")
        code, errors = done.returncode, done.stderr
        figure.check(code == 0 and f"1 of {len(ROWS)} rows rejected, first line {BAD_LINE}" in errors, f"{where}, skipped: {errors[-300:]}")
        counts = [json.loads(path.read_bytes())["files"][0] for path in folder.glob("index/parts/*/statistics.json")]
        rows = [(count["rows_read"], count["rows_used"], count["rows_rejected"]) for count in counts]
        figure.check(rows == [(len(ROWS), len(ROWS) - 1, 1)], f"{where}, skipped: rows read, used, rejected {rows}")
