"""Rules of the source beside the contracts of import-linter (pyproject.toml): no import cycles, no pickle, one place that compiles;
and what pyproject.toml says about other packages (`make test-lowest` runs the suite with the lower bounds)."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import cramlm
from commands import python
from lowest import lower_bounds

SOURCE = Path(cramlm.__file__).parent

WITHOUT_TORCH = ("errors", "records", "config", "io", "text", "data", "retrieval", "linear", "recipes", "cli")
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NEVER_CALLED = {
    "np.save",
    "numpy.save",
    "safetensors.torch.save_file",
    "save_file",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.jit.save",
    "joblib.load",
    "joblib.dump",
}
REPLACING = {"os.rename", "os.replace", "shutil.move", "shutil.copytree"}  # results are published by storage/artifacts.py alone
NAMES = {"sklearn": "scikit-learn", "prometheus_client": "prometheus-client", "Stemmer": "pystemmer", "ir_measures": "ir-measures"}
COMES_WITH = {"elastic_transport": "elasticsearch", "llvmlite": "numba", "markupsafe": "jinja2", "starlette": "fastapi"}
CHOSEN_BY_THE_USER = {"codecarbon", "mlflow", "trackio", "wandb"}  # trackers that somebody has or has not; any version


def modules() -> dict[str, Path]:
    """Dotted name below cramlm -> file; a folder's own `__init__` has the folder's name."""
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@functools.cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import; `from a import b` gives a.b, so that importing a module from its folder names the module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def inner_imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, module below cramlm) of every import of our own."""
    for line, name in imports(path):
        if name.split(".")[0] == "cramlm":
            module = name.removeprefix("cramlm").lstrip(".")
            yield line, module if module in known else module.rpartition(".")[0]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{base}.{attribute}" if (base := dotted(value)) else ""
        case _:
            return ""


def test_modules_of_one_folder_do_not_import_each_other_in_a_circle() -> None:
    known = modules()
    depends = {
        module: {target for _, target in inner_imports(path, known)} & set(known) - {module, ""} for module, path in known.items() if module
    }
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in finished:
            for target in sorted(depends[module]):
                visit(target, (*trail, module))
            finished.add(module)

    for module in sorted(depends):
        visit(module, ())


def test_nothing_unpickles_or_runs_code_from_a_model_folder_and_only_artifacts_replaces_folders() -> None:
    wrong = []
    for path in modules().values():
        where = path.relative_to(SOURCE)
        for line, name in imports(path):
            if name.split(".")[0] in NEVER_IMPORTED or name in NEVER_CALLED:
                wrong.append(f"{where}:{line}: imports {name}")
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if (name := dotted(node.func)) in NEVER_CALLED or (name in REPLACING and path.name != "artifacts.py"):
                wrong.append(f"{where}:{node.lineno}: calls {name}")
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("allow_pickle", "trust_remote_code", "code_revision") and not allowed:
                    wrong.append(f"{where}:{node.lineno}: passes {keyword.arg}")
    assert not wrong, "\n".join(wrong)


def test_only_one_module_compiles_so_that_all_kernels_are_kept_alike() -> None:
    compiling = {
        name for name, path in modules().items() if re.search(r"\b(njit|numba\.jit|vectorize|guvectorize)\b", path.read_text("utf-8"))
    }
    assert compiling == {"storage.compiled"}


HELP = """
import contextlib, importlib, io, json, sys
from typer.main import get_command
from cramlm.cli.app import app, main


def commands(group, *before):
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *before, name)
    yield before


names, loaded, printed = sys.argv[1:], {}, {}
for command in sorted(commands(get_command(app))):
    sys.argv = ["cramlm", *command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main()
    printed[" ".join(command)] = text.getvalue()
    loaded[" ".join(command)] = sorted({"torch", "transformers", "sklearn", "numba", "scipy", "numpy"} & set(sys.modules))
for name in names:
    importlib.import_module(name)
    if packages := {"torch", "transformers"} & set(sys.modules):
        sys.exit(f"importing {name} loads {packages}")
print(json.dumps([printed, loaded]))
"""


def test_the_help_of_every_command_imports_no_heavy_package_and_what_needs_no_torch_does_not_load_it() -> None:
    """It takes twice as long with numpy alone."""
    names = [f"cramlm.{name}" for part in WITHOUT_TORCH for name in modules() if name.split(".")[0] == part]
    printed, loaded = json.loads(python(HELP, "cramlm", *names))
    assert {"", "fit", "predict", "recipes", "recipes show"} <= set(printed)
    assert all(text.startswith(f"Usage: {' '.join(('cramlm', command)).strip()} [OPTIONS]") for command, text in printed.items()), printed
    assert {command: packages for command, packages in loaded.items() if packages} == {}


def imported() -> set[str]:
    """The packages that the source imports anywhere, by their names on the index."""
    found = {name.partition(".")[0] for path in modules().values() for _, name in imports(path)}
    packages = found - set(sys.stdlib_module_names) - {"cramlm"} - CHOSEN_BY_THE_USER
    return {COMES_WITH.get(name, NAMES.get(name, name)) for name in packages}


def test_every_package_that_is_imported_is_declared() -> None:
    assert imported() - set(lower_bounds()) == set()


def test_a_package_has_the_same_lower_bound_wherever_it_is_required() -> None:
    assert {name: bounds for name, bounds in lower_bounds().items() if len(bounds) > 1} == {}
