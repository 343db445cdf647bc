"""Print the oldest version that pyproject.toml allows of each requirement, as constraints for pip: `make test-lowest` installs them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds() -> dict[str, set[str]]:
    """name -> the lower bounds that it has among the dependencies and the extras.

    Raises:
        ValueError: for a requirement without one.
    """
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    bounds: dict[str, set[str]] = {}
    for requirement in (*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)):
        match = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?", requirement)
        if match is None:
            raise ValueError(f"{requirement!r}: write it as NAME>=VERSION, or NAME>=VERSION,<VERSION")
        bounds.setdefault(match[1], set()).add(match[2])
    return bounds


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={max(versions)}\n" for name, versions in sorted(lower_bounds().items()))
