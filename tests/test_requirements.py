"""What pyproject.toml says about other packages; `make test-lowest` runs the suite with the lower bounds."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import cramlm
from lowest import lower_bounds

SOURCE = Path(cramlm.__file__).parent
NAMES = {"sklearn": "scikit-learn", "prometheus_client": "prometheus-client", "Stemmer": "pystemmer", "ir_measures": "ir-measures"}
COMES_WITH = {"elastic_transport": "elasticsearch", "llvmlite": "numba", "markupsafe": "jinja2", "starlette": "fastapi"}
CHOSEN_BY_THE_USER = {"codecarbon", "mlflow", "trackio", "wandb"}  # trackers that somebody has or has not; any version


def imported() -> set[str]:
    """The packages that the source imports anywhere, by their names on the index."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    packages = found - set(sys.stdlib_module_names) - {"cramlm"} - CHOSEN_BY_THE_USER
    return {COMES_WITH.get(name, NAMES.get(name, name)) for name in packages}


def test_every_package_that_is_imported_is_declared() -> None:
    assert imported() - set(lower_bounds()) == set()


def test_a_package_has_the_same_lower_bound_wherever_it_is_required() -> None:
    assert {name: bounds for name, bounds in lower_bounds().items() if len(bounds) > 1} == {}
