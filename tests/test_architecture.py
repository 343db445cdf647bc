"""The rules of docs/architecture.md, read from the source: who may import whom, what is never used, how long a file may be.

Imports are found with `ast`, those inside functions too. Only `cramlm/__init__.py` is exempt from the levels: it resolves names lazily.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cramlm

SOURCE = Path(cramlm.__file__).parent
MOST_LINES = 400

# From the ground up; a folder stands for everything in it. A module imports from lower lines and, in a folder, from its own folder.
LEVELS = [
    {"errors", "signals"},
    {"records"},
    {"amounts", "locks", "retriever_config"},
    {"phase_config"},
    {"head_config"},
    {"config", "artifacts", "arrays", "compiled"},
    {"data"},
    {"model", "retrieval"},
    {"training"},
    {"evaluation"},
    {"deploy"},
    {"stages"},
    {"pipeline", "recipes"},
    {""},  # `import cramlm`, whose names come from all of the above
    {"console", "doctor", "options"},
    {"experiments"},
    {"commands"},
    {"cli", "estimator"},
    {"__main__"},
]
WITHOUT_TORCH = (
    "errors",
    "records",
    "amounts",
    "retriever_config",
    "phase_config",
    "head_config",
    "config",
    "artifacts",
    "data",
    "retrieval",
    "recipes",
    "console",
    "commands",
    "cli",
)
TRANSFORMERS_ONLY_IN = {"model/hf.py"}
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
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


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


def level(module: str) -> int:
    top = module.split(".")[0]
    places = [number for number, names in enumerate(LEVELS) if top in names]
    assert places, f"cramlm.{module} belongs to no level; add it to LEVELS and to docs/architecture.md"
    return places[0]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{base}.{attribute}" if (base := dotted(value)) else ""
        case _:
            return ""


def test_imports_go_strictly_downward() -> None:
    known = modules()
    wrong = []
    for module, path in known.items():
        if not module:
            continue
        for line, target in inner_imports(path, known):
            inside_folder = target != module and target.split(".")[0] == module.split(".")[0]
            if not inside_folder and level(target) >= level(module):
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: cramlm.{module} may not import {f'cramlm.{target}'.rstrip('.')}")
    assert not wrong, "\n".join(wrong)


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


def test_data_and_retrieval_never_reach_torch() -> None:
    known = modules()
    wrong = []
    for module in known:
        if module.split(".")[0] not in ("data", "retrieval"):
            continue
        trails, reached = [(module,)], {module}
        while trails:
            trail = trails.pop()
            wrong += [
                f"{' -> '.join(trail)}:{line}: imports {name}"
                for line, name in imports(known[trail[-1]])
                if name.split(".")[0] in ("torch", "transformers")
            ]
            for _, target in inner_imports(known[trail[-1]], known):
                if target and target not in reached:
                    reached.add(target)
                    trails.append((*trail, target))
    assert not wrong, "\n".join(wrong)


def test_only_one_file_imports_transformers() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}: imports {name}"
        for path in modules().values()
        for line, name in imports(path)
        if name.split(".")[0] == "transformers" and path.relative_to(SOURCE).as_posix() not in TRANSFORMERS_ONLY_IN
    ]
    assert not wrong, "\n".join(wrong)


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


def test_no_file_grows_over_400_lines() -> None:
    lengths = {path.relative_to(SOURCE).as_posix(): len(path.read_text("utf-8").splitlines()) for path in modules().values()}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}


def test_every_module_says_what_it_is_for() -> None:
    assert not [str(path) for path in modules().values() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


def test_the_document_of_the_architecture_names_every_file() -> None:
    document = SOURCE.parents[1] / "docs" / "architecture.md"
    if not document.is_file():
        pytest.skip("an installed package: the documents are not beside it")
    tree = document.read_text("utf-8").partition("src/cramlm/\n")[2].partition("```")[0]
    named = set(re.findall(r"(\w+\.py) ", tree.partition("\ntests/")[0]))
    assert named == {path.name for path in modules().values()}


def test_the_document_of_the_faults_names_tests_that_exist() -> None:
    document = SOURCE.parents[1] / "docs" / "faults.md"
    if not document.is_file():
        pytest.skip("an installed package: the documents are not beside it")
    defined = {name for path in Path(__file__).parent.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    named = set(re.findall(r"`(test_\w+)`", document.read_text("utf-8")))
    assert len(named) > 80
    assert not named - defined


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_it_does_not_load_torch_or_transformers(module: str) -> None:
    names = ", ".join(f"cramlm.{name}" for name in modules() if name.split(".")[0] == module)
    code = f"import sys; import cramlm, {names}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


HELP = """
import resource
from cramlm.cli import main
try:
    main()
except SystemExit:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)
"""


def test_the_help_answers_in_under_300_milliseconds_of_cpu() -> None:
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", HELP, "--help"], capture_output=True, text=True, check=True)
        assert "Usage" in done.stdout
        seconds.append(float(done.stdout.split()[-1]))
    assert statistics.median(seconds) < 0.3, seconds
