"""Tables made by chance, written in every form, read back: the same rows, or, once spoilt, one line; never a row lost in silence.

`make faults ARGS='fuzz --minutes 60'` goes on for an hour and keeps what breaks a rule; a file that it keeps becomes a case by being put
into tests/faults/found, whose files the tests read for ever.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st

from cramlm.errors import CramError
from cramlm.io.readers import Reader
from cramlm.io.rows import Column

Rows = list[tuple[str, str]]
COLUMNS = (Column("text"), Column("label", "label", flag="--label-column"))
MOST_BYTES = 400_000_000  # that a file of a few kB may cost

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=40)
rows = st.lists(st.tuples(texts, st.sampled_from(["007", "1", "NA", "true", "é", "a,b", 'q"q', "x\ny"])), min_size=1, max_size=12)


def as_jsonl(table: Sequence[tuple[str, str]], draw: random.Random) -> bytes:
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=draw.random() < 0.5) for text, label in table]
    end = draw.choice(("\n", "\r\n"))
    return (end.join(lines) + draw.choice((end, ""))).encode()


def as_delimited(table: Sequence[tuple[str, str]], draw: random.Random, separator: str) -> bytes:
    """As spreadsheets write it; line ends inside quotes as in the file are line feeds when read."""

    def field(value: str) -> str:
        needed = any(mark in value for mark in (separator, '"', "\n", "\r"))
        return '"' + value.replace('"', '""') + '"' if needed or draw.random() < 0.2 else value

    return ("\n".join(separator.join(map(field, row)) for row in [("text", "label"), *table]) + "\n").encode()


def as_parquet(table: Sequence[tuple[str, str]], draw: random.Random) -> bytes:
    sink = io.BytesIO()
    columns = pa.table({"text": [text for text, _ in table], "label": [label for _, label in table]})
    pq.write_table(
        columns, sink, write_page_checksum=True, use_dictionary=draw.random() < 0.5, row_group_size=draw.choice((1, 3, 100)),
        compression=draw.choice(("snappy", "zstd", "gzip", "none")),
    )  # fmt: skip
    return sink.getvalue()


def as_gzip(content: bytes, draw: random.Random) -> bytes:
    cut = draw.randrange(len(content) + 1)
    return gzip.compress(content[:cut]) + gzip.compress(content[cut:])


def as_zst(content: bytes, draw: random.Random) -> bytes:
    cut = draw.randrange(len(content) + 1)
    frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=draw.random() < 0.5)
    return frame.compress(content[:cut]) + frame.compress(content[cut:])


FORMS: dict[str, Callable[[Sequence[tuple[str, str]], random.Random], bytes]] = {
    "a.jsonl": as_jsonl,
    "a.csv": lambda table, draw: as_delimited(table, draw, ","),
    "a.tsv": lambda table, draw: as_delimited(table, draw, "\t"),
    "a.parquet": as_parquet,
    "a.jsonl.gz": lambda table, draw: as_gzip(as_jsonl(table, draw), draw),
    "a.jsonl.zst": lambda table, draw: as_zst(as_jsonl(table, draw), draw),
    "a.csv.zst": lambda table, draw: as_zst(as_delimited(table, draw, ","), draw),
}


def read(path: Path, on_bad_row: str = "fail") -> tuple[Rows, Reader]:
    reader = Reader(path, COLUMNS, on_bad_row="skip" if on_bad_row == "skip" else "fail")
    return [(row.values[0] or "", row.values[1] or "") for row in reader], reader


def broken_rule(path: Path, expected: Rows | None) -> str | None:
    """What is wrong with how a file is read. expected: its rows, if it is as it was written."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for on_bad_row in ("fail", "skip"):
        try:
            found, reader = read(path, on_bad_row)
        except CramError as error:
            if expected is not None:
                return f"refused although it is whole: {error}"
            if "\n" in str(error) or str(path) not in str(error):
                return f"not one line that names the file: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            if expected is not None and found != expected:
                return f"other rows: {found!r}"
            if reader.rows_read != reader.rows_used + len(reader.rejected) or reader.rows_used != len(found):
                return f"rows do not add up: {reader.rows_read} read, {reader.rows_used} used, {len(found)} given"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return f"took {grown / 1e6:.0f} MB" if grown > MOST_BYTES else None


def spoil(content: bytes, draw: random.Random) -> bytes:
    """Cut it, flip, insert, repeat or exchange some bytes."""
    place = draw.randrange(len(content) + 1)
    other = draw.randrange(len(content) + 1)
    low, high = min(place, other), max(place, other)
    odd = draw.choice((b"\0", b'"', b"\n", b"\r", b"\xff", b"\xed\xa0\x80", b"[" * 1000, b"{", b"\\ud83d", b"\xef\xbb\xbf", b",", b"\t"))
    match draw.randrange(6):
        case 0:
            return content[:place]
        case 1 if content:
            place = min(place, len(content) - 1)
            return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        case 2:
            return content[:place] + odd + content[place:]
        case 3:
            return content[:high] + content[low:high] * draw.choice((1, 50)) + content[high:]
        case 4:
            return content[:low] + content[high:]
    return content[:low] + draw.randbytes(high - low) + content[high:]


def one(folder: Path, table: Rows, seed: int) -> str | None:
    """A table in a form chosen by `seed`: whole, then spoilt; returns what broke a rule. The file stays in `folder`."""
    draw = random.Random(seed)
    name = draw.choice(sorted(FORMS))
    content, path = FORMS[name](table, draw), folder / name
    path.write_bytes(content)
    if (wrong := broken_rule(path, table)) is not None:
        return f"{name}, whole: {wrong}"
    for _ in range(4):
        content = spoil(content, draw)
        path.write_bytes(content)
        if (wrong := broken_rule(path, None)) is not None:
            return f"{name}, spoilt: {wrong}"
    return None


def fuzz(*, minutes: float, out: Path) -> int:
    """Until the time is over; returns 1 if something was found."""
    draw, end, trials, found = random.Random(), time.monotonic() + 60 * minutes, 0, 0
    alphabet = [*"abc ,;\t\"'\n\r{}[]:\\é漢\u202e\u0301😀\x01\x85\u2028", "NA", "null", "\\u0000"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        while time.monotonic() < end:
            table = [
                ("".join(draw.choices(alphabet, k=draw.randint(1, 30))), draw.choice(("007", "a,b", "x\ny", "é")))
                for _ in range(draw.randint(1, 20))
            ]
            seed = draw.randrange(2**62)
            trials += 1
            if (wrong := one(folder, table, seed)) is not None:
                found += 1
                kept = out / f"{seed}"
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                (kept / "wrong.txt").write_text(f"{wrong}\n{table!r}\n", "utf-8")
                print(f"{kept}: {wrong[:300]}", file=sys.stderr, flush=True)
            for path in folder.iterdir():
                path.unlink()
    print(json.dumps({"fuzz": {"minutes": minutes, "files": 5 * trials, "found": found}}))
    return int(found > 0)
