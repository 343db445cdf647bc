"""Lucene (the Java programs of lucene/) from Python.

The jar is $LUCENE_JAR, or the one that `python benchmarks/lucene/fetch_jar.py` writes to runs/lucene/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCES = Path(__file__).parent / "lucene"
FETCHED = Path(__file__).parents[1] / "runs" / "lucene"


@dataclass(frozen=True)
class LuceneResults:
    """Results of each query, best first: position[offsets[q]:offsets[q + 1]]. seconds: (Q,) CPU time of each."""

    offsets: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lucene:
    """A Java program with Lucene. folder: for the class file and the files through which both processes exchange data."""

    jar: Path
    folder: Path
    program: str

    @staticmethod
    def compile(folder: Path, program: str = "LuceneSearch") -> Lucene:
        """Compile a program of lucene/ into `folder`. Raises FileNotFoundError if Java or the jar is missing."""
        named = os.environ.get("LUCENE_JAR")
        jars = [Path(named)] if named else sorted(FETCHED.glob("*.jar"))
        if not jars or not jars[-1].is_file():
            raise FileNotFoundError("no Lucene jar: run python benchmarks/lucene/fetch_jar.py, or set LUCENE_JAR")
        if not shutil.which("java") or not shutil.which("javac"):
            raise FileNotFoundError("no java and javac: install a JDK, 17 or later")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["javac", "-nowarn", "-proc:none", "-cp", str(jars[-1]), "-d", str(folder), str(SOURCES / f"{program}.java")]
        subprocess.run(command, check=True)
        return Lucene(jars[-1], folder, program)

    def index(self, terms: Path, index: Path) -> tuple[str, int, float]:
        """Index a file with one text per line, terms with spaces between them, into one segment.

        Return Lucene's version, the number of texts and CPU seconds.
        """
        version, documents, seconds = self._run("index", terms, index).split()
        return version, int(documents), float(seconds)

    def search(self, index: Path, batches: Sequence[tuple[Sequence[Sequence[str]], int]], *, warm_up: int = 0) -> list[LuceneResults]:
        """Return for each batch, (queries, limit), the best documents of every query. A query is a list of terms joined by OR.

        The first `warm_up` queries of the first batch are searched once before, without measuring, so that Java compiles the code.
        """
        arguments: list[object] = []
        for number, (queries, limit) in enumerate(batches):
            lines = self.folder / f"queries-{number}.txt"
            lines.write_text("".join(" ".join(terms) + "\n" for terms in queries), "utf-8")
            arguments += [lines, limit, self.folder / f"results-{number}.bin"]
        self._run("search", index, warm_up, *arguments)
        return [_read(self.folder / f"results-{number}.bin", len(queries)) for number, (queries, _) in enumerate(batches)]

    def command(self, *arguments: object) -> list[str]:
        """Return the command line that runs the program."""
        java = ["java", "-XX:+UseSerialGC", "-Xmx6g", "-cp", f"{self.jar}{os.pathsep}{self.folder}", self.program]
        return [*java, *map(str, arguments)]

    def _run(self, *arguments: object) -> str:
        return subprocess.run(self.command(*arguments), check=True, text=True, stdout=subprocess.PIPE).stdout


def _read(path: Path, queries: int) -> LuceneResults:
    content = path.read_bytes()
    path.unlink()
    seconds = np.frombuffer(content, ">i8", queries) / 1e9
    offsets = np.concatenate(([0], np.cumsum(np.frombuffer(content, ">i4", queries, 8 * queries), dtype=np.int64)))
    hits = int(offsets[-1])
    position = np.frombuffer(content, ">i4", hits, 12 * queries).astype(np.int64)
    score = np.frombuffer(content, ">f4", hits, 12 * queries + 4 * hits).astype(np.float32)
    return LuceneResults(offsets, position, score, seconds)
