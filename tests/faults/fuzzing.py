"""Random tables, written in every format and read back: the same rows, or, once damaged, one line; no row is lost silently.

`make faults ARGS='fuzz --minutes 60'` runs for an hour and keeps the files that violate a rule; moved to tests/faults/found they become
cases of the tests.
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
MAX_BYTES = 400_000_000  # memory to read a file of a few kB

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\t"), min_size=1, max_size=40)  # a tab may be ambiguous
rows = st.lists(st.tuples(texts, st.sampled_from(["007", "1", "NA", "true", "é", "a,b", 'q"q', "x\ny"])), min_size=1, max_size=12)


def as_jsonl(table: Sequence[tuple[str, str]], rng: random.Random) -> bytes:
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=rng.random() < 0.5) for text, label in table]
    end = rng.choice(("\n", "\r\n"))
    return (end.join(lines) + rng.choice((end, ""))).encode()


def as_delimited(table: Sequence[tuple[str, str]], rng: random.Random, separator: str) -> bytes:
    """Return csv as spreadsheets write it."""

    def field(value: str) -> str:
        needed = any(character in value for character in (separator, '"', "\n", "\r"))
        return '"' + value.replace('"', '""') + '"' if needed or rng.random() < 0.2 else value

    return ("\n".join(separator.join(map(field, row)) for row in [("text", "label"), *table]) + "\n").encode()


def as_parquet(table: Sequence[tuple[str, str]], rng: random.Random) -> bytes:
    sink = io.BytesIO()
    columns = pa.table({"text": [text for text, _ in table], "label": [label for _, label in table]})
    pq.write_table(
        columns, sink, write_page_checksum=True, use_dictionary=rng.random() < 0.5, row_group_size=rng.choice((1, 3, 100)),
        compression=rng.choice(("snappy", "zstd", "gzip", "none")),
    )  # fmt: skip
    return sink.getvalue()


def as_gzip(content: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(content) + 1)
    return gzip.compress(content[:cut]) + gzip.compress(content[cut:])


def as_zst(content: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(content) + 1)
    frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=rng.random() < 0.5)
    return frame.compress(content[:cut]) + frame.compress(content[cut:])


FORMS: dict[str, Callable[[Sequence[tuple[str, str]], random.Random], bytes]] = {
    "a.jsonl": as_jsonl,
    "a.csv": lambda table, rng: as_delimited(table, rng, ","),
    "a.tsv": lambda table, rng: as_delimited(table, rng, "\t"),
    "a.parquet": as_parquet,
    "a.jsonl.gz": lambda table, rng: as_gzip(as_jsonl(table, rng), rng),
    "a.jsonl.zst": lambda table, rng: as_zst(as_jsonl(table, rng), rng),
    "a.csv.zst": lambda table, rng: as_zst(as_delimited(table, rng, ","), rng),
}


def read(path: Path, on_bad_row: str = "fail") -> tuple[Rows, Reader]:
    reader = Reader(path, COLUMNS, on_bad_row="skip" if on_bad_row == "skip" else "fail")
    return [(row.values[0] or "", row.values[1] or "") for row in reader], reader


def violation(path: Path, expected: Rows | None) -> str | None:
    """Read a file and return the rule that is violated, if any. expected: the rows of a file that is not damaged."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for on_bad_row in ("fail", "skip"):
        try:
            table, reader = read(path, on_bad_row)
        except CramError as error:
            if expected is not None:
                return f"an undamaged file is refused: {error}"
            if "\n" in str(error) or str(path) not in str(error):
                return f"not one line that names the file: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            if expected is not None and table != expected:
                return f"other rows: {table!r}"
            if reader.counts.rows_read != reader.counts.rows_used + len(reader.counts.rejected) or reader.counts.rows_used != len(table):
                return f"rows do not add up: {reader.counts.rows_read} read, {reader.counts.rows_used} used, {len(table)} returned"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return f"took {grown / 1e6:.0f} MB" if grown > MAX_BYTES else None


def damage(content: bytes, rng: random.Random) -> bytes:
    """Truncate the content, or flip, insert, repeat, delete or exchange bytes."""
    offset = rng.randrange(len(content) + 1)
    low, high = sorted((offset, rng.randrange(len(content) + 1)))
    odd = rng.choice((b"\0", b'"', b"\n", b"\r", b"\xff", b"\xed\xa0\x80", b"[" * 1000, b"{", b"\\ud83d", b"\xef\xbb\xbf", b",", b"\t"))
    match rng.randrange(6):
        case 0:
            return content[:offset]
        case 1 if content:
            offset = min(offset, len(content) - 1)
            return content[:offset] + bytes([content[offset] ^ 1 << rng.randrange(8)]) + content[offset + 1 :]
        case 2:
            return content[:offset] + odd + content[offset:]
        case 3:
            return content[:high] + content[low:high] * rng.choice((1, 50)) + content[high:]
        case 4:
            return content[:low] + content[high:]
    return content[:low] + rng.randbytes(high - low) + content[high:]


def check_table(folder: Path, table: Rows, seed: int) -> str | None:
    """Write a table in a format chosen by `seed`, read it, damage it four times; return the first violation. The file stays in `folder`."""
    rng = random.Random(seed)
    name = rng.choice(sorted(FORMS))
    content, path = FORMS[name](table, rng), folder / name
    path.write_bytes(content)
    if (wrong := violation(path, table)) is not None:
        return f"{name}, undamaged: {wrong}"
    for _ in range(4):
        content = damage(content, rng)
        path.write_bytes(content)
        if (wrong := violation(path, None)) is not None:
            return f"{name}, damaged: {wrong}"
    return None


def fuzz(*, minutes: float, out: Path) -> int:
    """Check random tables for so many minutes; return 1 if one violates a rule."""
    rng, end, trials, violations = random.Random(), time.monotonic() + 60 * minutes, 0, 0
    alphabet = [*"abc ,;\t\"'\n\r{}[]:\\é漢\u202e\u0301😀\x01\x85\u2028", "NA", "null", "\\u0000"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        while time.monotonic() < end:
            table = [
                ("".join(rng.choices(alphabet, k=rng.randint(1, 30))), rng.choice(("007", "a,b", "x\ny", "é")))
                for _ in range(rng.randint(1, 20))
            ]
            seed = rng.randrange(2**62)
            trials += 1
            if (wrong := check_table(folder, table, seed)) is not None:
                violations += 1
                kept = out / f"{seed}"
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                (kept / "wrong.txt").write_text(f"{wrong}\n{table!r}\n", "utf-8")
                print(f"{kept}: {wrong[:300]}", file=sys.stderr, flush=True)
            for path in folder.iterdir():
                path.unlink()
    print(json.dumps({"fuzz": {"minutes": minutes, "files": 5 * trials, "violations": violations}}))
    return int(violations > 0)
