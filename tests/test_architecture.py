"""Rules of the source beside the contracts of import-linter (pyproject.toml): no import cycles, no pickle, one place that compiles."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cramlm

SOURCE = Path(cramlm.__file__).parent

WITHOUT_TORCH = ("errors", "records", "config", "io", "text", "data", "retrieval", "linear", "recipes", "cli")
TRANSFORMERS_ONLY_IN = {"model/huggingface/folder.py"}
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


def modules() -> dict[str, Path]:
    """Dotted name below cramlm -> file; a folder's own `__init__` has the folder's name."""
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import; `from a import b` gives a.b, so that importing a module from its folder names the module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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


def test_nothing_unpickles_or_runs_code_from_a_model_folder() -> None:
    wrong = []
    for path in modules().values():
        where = path.relative_to(SOURCE)
        wrong += [f"{where}:{line}: imports {name}" for line, name in imports(path) if name.split(".")[0] in NEVER_IMPORTED]
        wrong += [f"{where}:{line}: imports {name}" for line, name in imports(path) if name in NEVER_CALLED]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            if (name := dotted(node.func)) in NEVER_CALLED:
                wrong.append(f"{where}:{node.lineno}: calls {name}")
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("allow_pickle", "trust_remote_code", "code_revision") and not allowed:
                    wrong.append(f"{where}:{node.lineno}: passes {keyword.arg}")
    assert not wrong, "\n".join(wrong)


def test_only_artifacts_replaces_and_renames() -> None:
    wrong = []
    for path in modules().values():
        if path.name == "artifacts.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func) in ("os.rename", "os.replace", "shutil.move", "shutil.copytree"):
                wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {dotted(node.func)}: results are published by artifacts.py alone")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for() -> None:
    assert not [str(path) for path in modules().values() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


def test_the_document_of_the_faults_names_tests_that_exist() -> None:
    document = SOURCE.parents[1] / "docs" / "faults.md"
    if not document.is_file():
        pytest.skip("an installed package: the documents are not beside it")
    defined = {name for path in Path(__file__).parent.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    named = set(re.findall(r"`(test_\w+)`", document.read_text("utf-8")))
    assert not named - defined


def test_only_one_module_compiles_so_that_all_kernels_are_kept_alike() -> None:
    compiling = {
        name for name, path in modules().items() if re.search(r"\b(njit|numba\.jit|vectorize|guvectorize)\b", path.read_text("utf-8"))
    }
    assert compiling == {"storage.compiled"}


IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if loaded := {"torch", "transformers"} & set(sys.modules):
        sys.exit(f"importing {name} loads {loaded}")
"""


def test_importing_what_needs_no_torch_does_not_load_it() -> None:
    names = [f"cramlm.{name}" for part in WITHOUT_TORCH for name in modules() if name.split(".")[0] == part]
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, "cramlm", *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HELP = """
import contextlib, io, json, sys
from typer.main import get_command
from cramlm.cli.app import app, main


def commands(group, *before):
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *before, name)
    yield before


loaded, printed = {}, {}
for command in sorted(commands(get_command(app))):
    sys.argv = ["cramlm", *command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main()
    printed[" ".join(command)] = text.getvalue()
    loaded[" ".join(command)] = sorted({"torch", "transformers", "sklearn", "numba", "scipy"} & set(sys.modules))
print(json.dumps([printed, loaded]))
"""


def test_the_help_of_every_command_imports_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    printed, loaded = json.loads(done.stdout)
    assert {"", "fit", "predict", "recipes", "recipes show"} <= set(printed)
    assert all(text.startswith(f"Usage: {' '.join(('cramlm', command)).strip()} [OPTIONS]") for command, text in printed.items()), printed
    assert {command: packages for command, packages in loaded.items() if packages} == {}
