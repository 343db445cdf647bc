"""What the tests of several folders share: one thread, made-up texts, a tokenizer trained on them, and a small model of either shape.

The process that distributes the tests among workers reads this file, too, and runs no test: torch and cramlm are imported by fixtures.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from cramlm.model.model import Model
    from cramlm.model.tokenizer import Tokenizer

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # set in many containers: every worker and every process would compile all sources anew
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: threads that wait for one another take most of a small linear fit
os.environ["HF_HUB_DISABLE_XET"] = "1"  # before huggingface_hub: its stand-in implements LFS, not the service that it prefers
gc.disable()  # until all tests are collected: imports make few cycles and many objects, which a collection would visit again and again
os.fsync = lambda file: None  # a run of the tiny task syncs 400 files, and no result of a test must survive a power loss

NOTHING_TIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("default", max_examples=20, **NOTHING_TIMED)
settings.register_profile("slow", max_examples=200, **NOTHING_TIMED)  # make test-slow
settings.load_profile("default")

WORDS = (
    *("the", "of", "and", "kinase", "inhibits", "receptor", "protein", "cell", "acts", "strongly", "dose", "rats", "aspirin"),
    *("reduces", "pain", "river", "bank", "water", "ọ̀rọ̀", "ilé"),
)


def pytest_collection_finish() -> None:
    gc.enable()


setups = count()


def pytest_runtest_setup() -> None:
    """Exempt what is alive from garbage collection, before every eighth test: training collects at every checkpoint, which takes 0.2 s
    over all that a session of tests has imported, and a forked child would copy the pages."""
    if next(setups) % 8 == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store for the tests that name none: the user's may hold stages of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAMLM_STORE", str(tmp_path_factory.mktemp("store")))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The models here are far too small for more, and threads that wait for one another make the suite slow on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty texts of 0 to 60 words."""
    generator = random.Random(11)
    return ["", *(" ".join(generator.choices(WORDS, k=generator.randint(1, 60))) for _ in range(39))]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Tokenizer:
    from cramlm.config.run import TokenizerConfig
    from cramlm.model.tokenizer import Tokenizer, train_tokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, TokenizerConfig(vocab_size=200), folder)
    return Tokenizer.load(folder)


@pytest.fixture(params=["bert", "modernbert"])
def model(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Model:
    """Weights large enough for probabilities that differ between texts."""
    from cramlm.config.head import HeadConfig
    from cramlm.config.run import EncoderConfig
    from cramlm.model.model import ModelSpec, build_model

    head = HeadConfig(pooling="cls" if request.param == "bert" else "mean")
    encoder = EncoderConfig(shape=request.param, layers=2, hidden=32, heads=4, intermediate=48, max_positions=64, init_std=0.3)
    return build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=3), seed=5)


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The folder of `export_tiny`; no test may change it."""
    from server_process import export_tiny

    return export_tiny(tmp_path_factory.mktemp("tiny-export") / "export", tokenizer)


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """A function that returns the folder of a name, which `make` writes once for all pytest-xdist workers of this session."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = shared / name, shared / f"{name}.made"
        with (shared / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not made.exists():
                make(folder)
                made.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_onnx(once: Once, tiny_export: Path, texts: list[str]) -> Path:
    """The ONNX form of `tiny_export`; no test may change it."""
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install 'cramlm[onnx]'")
    from cramlm.export.onnx import export_onnx
    from cramlm.records import Example

    examples = [Example(str(index), text, None, None) for index, text in enumerate(texts)]
    return once("tiny-onnx", lambda folder: export_onnx(tiny_export, out=folder, texts=examples))


@pytest.fixture(scope="module")  # its event loop ends with it: the tests of other modules call asyncio.run
def browser() -> Iterator[Any]:
    """Chromium that makes no requests of its own; a test is skipped without it or without playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=[f"--{flag}" for flag in flags.split()])
        yield opened
        opened.close()


# The fitted run that all tests share; prefer it to another run. A test that needs other settings, other data or an interrupted run fits
# its own with `tiny_task.tiny_config`.


@pytest.fixture(scope="session")
def session_run(once: Once) -> Path:
    """A folder with data/, run.toml, store/ and the finished run/ of `tiny_config`. Never change it: use `tiny_run` or `copied_run`."""
    from tiny_task import fit_tiny_run

    return once("session-run", fit_tiny_run)


@pytest.fixture(scope="session")
def linear_runs(once: Once) -> Path:
    """A folder with data/, store/ and the finished runs static/, bayes/ and tfidf/; no test may change it."""
    from tiny_task import fit_linear_runs

    return once("linear-runs", fit_linear_runs)


@pytest.fixture(scope="module")
def tiny_run(session_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of `session_run` for the tests of one file. Its run.toml names the data of `session_run`, which no test may change."""
    before = {path: path.read_bytes() for path in (session_run / "data").iterdir()}
    yield Path(shutil.copytree(session_run, tmp_path_factory.mktemp("tiny-run") / "copy"))
    assert {path: path.read_bytes() for path in (session_run / "data").iterdir()} == before, "a test changed the data of `session_run`"


@pytest.fixture
def copied_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of run/ alone that one test may change; data, run.toml and store are those of `tiny_run`."""
    return Path(shutil.copytree(tiny_run / "run", tmp_path / "run"))
