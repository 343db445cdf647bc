"""Arrow tables on disk: whole or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cramlm.errors import ArtifactError
from cramlm.storage.arrays import check_column, open_table, save_table

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.large_string())])
TEXTS = ["wave", "ilé \U0001f30a", "", "ship"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.arrow"
    batches = [pa.record_batch([pa.array([n]), pa.array([text], pa.large_string())], schema=SCHEMA) for n, text in enumerate(TEXTS)]
    save_table(path, SCHEMA, batches)
    return path


def texts_of(path: Path) -> list[Any]:
    texts: list[Any] = check_column(path, open_table(path, SCHEMA).column("text")).to_pylist()
    return texts


def test_a_table_read_back_equals_the_batches_that_were_written(table: Path) -> None:
    assert texts_of(table) == TEXTS
    assert open_table(table, SCHEMA).column("number").to_pylist() == [0, 1, 2, 3]


def test_a_truncated_table_is_rejected_and_a_flipped_byte_gives_texts_or_an_error(table: Path) -> None:
    whole, refused = table.read_bytes(), 0
    damaged = range(0, len(whole), 5)
    for index in damaged:
        if index % 35 == 0:
            table.write_bytes(whole[:index])
            with pytest.raises(ArtifactError, match=r"table\.arrow: damaged"):
                texts_of(table)
        table.write_bytes(whole[:index] + bytes([whole[index] ^ 0x80]) + whole[index + 1 :])
        try:
            found = texts_of(table)
        except ArtifactError:
            refused += 1
        else:
            assert all(isinstance(text, str) for text in found)
    assert refused > len(damaged) / 10


def test_a_table_with_other_columns_or_a_missing_one_is_rejected(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="its columns are number, text"):
        open_table(table, pa.schema([("text", pa.large_string())]))
    with pytest.raises(ArtifactError, match="missing"):
        open_table(tmp_path / "none.arrow", SCHEMA)
