"""Fetch a jar with Lucene 9.9 from the Python package index: Maven's is not reachable from everywhere, and pyserini's wheel carries one.

    python benchmarks/lucene/fetch_jar.py            # 142 MB, kept in runs/lucene/; prints its path

Nothing is installed: the wheel is unpacked and thrown away. Lucene is under the Apache License 2.0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "runs" / "lucene"
WHEEL = "pyserini==0.24.0"


def main() -> None:
    """Print the jar's path, fetching it if it is not there."""
    if not (jars := sorted(FOLDER.glob("*.jar"))):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith("fatjar.jar"))
                FOLDER.mkdir(parents=True, exist_ok=True)
                partial = FOLDER / "fetching"
                partial.write_bytes(archive.read(name))
                jars = [partial.rename(FOLDER / Path(name).name)]
    print(jars[-1])


if __name__ == "__main__":
    main()
