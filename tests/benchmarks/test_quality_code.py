"""Every measured run has the commit that made it, and a folder of runs has one commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import cramlm
from cramlm.errors import UsageError
from quality_code import claim, code_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    (root / "docs").mkdir()
    for name in ("src/train.py", "constraints.txt", "docs/log.md"):
        (root / name).write_text("one\n")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *author, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Change")
    return git(root, "rev-parse", "--short", "HEAD")


def test_code_is_the_last_commit_that_changed_the_sources(checkout: Path) -> None:
    (checkout / "src" / "train.py").write_text("two\n")
    trains = commit(checkout)
    (checkout / "docs" / "log.md").write_text("two\n")
    assert commit(checkout) != trains
    assert code_of(checkout) == trains


@pytest.mark.parametrize("name", ["src/new.py", "constraints.txt"])
def test_uncommitted_changes_are_part_of_the_code(checkout: Path, name: str) -> None:
    clean = code_of(checkout)
    codes = []
    for text in ("two\n", "three\n"):
        (checkout / name).write_text(text)
        codes.append(code_of(checkout))
    assert all(code.startswith(f"{clean}+") for code in codes)
    assert codes[0] != codes[1]


def test_outside_of_a_checkout_code_is_the_version(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "README").write_text("another project\n")
    commit(tmp_path)
    assert code_of(tmp_path) == f"cramlm {cramlm.__version__}"


def test_a_folder_of_runs_is_refused_for_another_or_an_unknown_commit(tmp_path: Path) -> None:
    for _ in range(2):
        claim(tmp_path / "runs", "c0ffee1")
    with pytest.raises(UsageError, match="its runs were made by c0ffee1, this is decade2; use that one, or another --out"):
        claim(tmp_path / "runs", "decade2")
    (tmp_path / "news-100").mkdir()
    with pytest.raises(UsageError, match="an unknown commit"):
        claim(tmp_path, "c0ffee1")
