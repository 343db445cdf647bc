"""The selected passages as one Arrow table: `selection.arrow`, memory-mapped, a row per passage in order of (rank, position).

    position int64 · rank int32 · score float32 · query int32 · weight float32 · id · source (dictionary) · text, in a union also retriever

records.Selection describes the numbers. The text is copied from the corpus without being decoded; JSON lines are an export format only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import Corpus
from cramlm.records import FloatArray, Selection
from cramlm.retrieval.ranking import STAGE, Ranking
from cramlm.storage.artifacts import Artifact, open_artifact
from cramlm.storage.counts import count
from cramlm.storage.tables import check_column, open_table, save_table

KIND: Final = STAGE
SELECTION_FILE: Final = "selection.arrow"
_NUMBERS: Final = {"position": np.int64, "rank": np.int32, "score": np.float32, "query": np.int32, "weight": np.float32}
_ROWS: Final = 4096  # of a record batch: bounds the memory for text while a selection is written


class SelectionTable:
    """A published selection. Opening it reads no text."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises ArtifactError if the table is damaged."""
        self.artifact = artifact
        self.path = artifact.path / SELECTION_FILE
        self._table = open_table(self.path, _schema(union=False), _schema(union=True))

    @staticmethod
    def open(folder: Path) -> SelectionTable:
        """Raises ArtifactError if the folder holds no selection, or a damaged one."""
        return SelectionTable(open_artifact(folder, kind=KIND))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def numbers(self) -> Selection:
        """Everything but the text, as arrays."""
        return Selection(**{name: self._array(name) for name in _NUMBERS})

    def texts(self) -> list[str]:
        """The passages."""
        texts: list[str] = check_column(self.path, self._table.column("text")).to_pylist()
        count("decoded", texts)
        return texts

    def text_characters(self) -> int:
        """Characters of all passages together."""
        import pyarrow.compute

        total: int = pyarrow.compute.sum(pyarrow.compute.utf8_length(check_column(self.path, self._table.column("text")))).as_py()
        return total

    def rows(self, most: int | None = None) -> Iterator[dict[str, Any]]:
        """The first `most` passages as plain values, by column without the weight; scores have seven digits."""
        names = [name for name in self._table.schema.names if name != "weight"]
        for batch in self._table.select(names).slice(0, most).to_batches(max_chunksize=_ROWS):
            for column in batch.columns:
                check_column(self.path, column)
            for row in batch.to_pylist():
                yield row | {"score": float(f"{row['score']:.7g}")}

    def json_lines(self) -> Iterator[str]:
        """A JSON object and a line end per passage."""
        return (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())

    def write_parquet(self, path: Path) -> None:
        """Write id, source and text of the passages as a file that a corpus can be read from."""
        import pyarrow.parquet as pq

        table = self._table.select(["id", "source", "text"])
        for column in table.columns:
            check_column(self.path, column)
        with path.open("wb") as file:
            pq.write_table(table, file, compression="none", use_dictionary=["source"], row_group_size=_ROWS)

    def _array(self, name: str) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = self._table.column(name).to_numpy()
        return column


def save_selection(
    folder: Path, corpus: Corpus, kept: Ranking, weight: FloatArray, *, sources: Sequence[int], retrievers: Sequence[str]
) -> None:
    """Write the table of these passages of a corpus. sources: numbers of the sources that occur, in the order of the dictionary.
    retrievers: the names of those that `kept.member` counts.

    Raises:
        ArtifactError: if the corpus is damaged.
    """
    import pyarrow as pa

    schema = _schema(union=len(retrievers) > 1)
    numbers = Selection(kept.position, kept.rank, kept.query, kept.score, weight)
    names = pa.array([corpus.sources[number] for number in sources], pa.string())
    place = np.empty(len(corpus.sources), np.int32)
    place[list(sources)] = np.arange(len(sources), dtype=np.int32)

    def batches() -> Iterator[Any]:
        for start in range(0, len(numbers), _ROWS):
            chosen = slice(start, start + _ROWS)
            positions = numbers.position[chosen]
            text, offsets = corpus.gather(positions)
            columns = {name: pa.array(getattr(numbers, name)[chosen]) for name in _NUMBERS}
            columns["id"] = pa.array(corpus.ids(positions), pa.large_string())
            columns["source"] = pa.DictionaryArray.from_arrays(pa.array(place[corpus.source[positions]]), names)
            columns["text"] = pa.LargeStringArray.from_buffers(len(positions), pa.py_buffer(offsets), pa.py_buffer(text))
            check_column(corpus.path, columns["text"])
            if len(retrievers) > 1:
                found_by = pa.array(kept.member[chosen].astype(np.int32))
                columns["retriever"] = pa.DictionaryArray.from_arrays(found_by, pa.array(retrievers, pa.string()))
            corpus.release()
            yield pa.record_batch([columns[name] for name in schema.names], schema=schema)

    save_table(folder / SELECTION_FILE, schema, batches())


def _schema(*, union: bool) -> Any:
    import pyarrow as pa

    words = pa.dictionary(pa.int32(), pa.string())
    kinds = {name: pa.from_numpy_dtype(dtype) for name, dtype in _NUMBERS.items()}
    head = [(name, kinds[name]) for name in ("position", "rank", "score", "query", "weight")]
    columns = [("position", kinds["position"]), ("id", pa.large_string()), ("source", words), *head[1:]]
    return pa.schema([*columns, *([("retriever", words)] if union else []), ("text", pa.large_string())])
