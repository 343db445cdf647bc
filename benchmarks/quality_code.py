"""Check that all runs of a folder are made by the same commit.

A finished run is not repeated. A folder started by one commit and continued by another would mix their scores; it is refused.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Final

import cramlm
from cramlm.errors import UsageError
from cramlm.storage.artifacts import publish_file

SOURCES: Final = ("src", "constraints.txt")
FILE: Final = "code.json"


def code_of(root: Path) -> str:
    """Return the last commit that changed the package, like `f42c0da`; with uncommitted changes `f42c0da+` and their hash.

    If `root` is not a checkout, return `cramlm VERSION`.
    """
    try:
        commit, changes = (_git(root, *call, "--", *SOURCES) for call in (("log", "-1", "--format=%h"), ("diff", "HEAD")))
        new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return f"cramlm {cramlm.__version__}"
    if not commit:  # a checkout of something else
        return f"cramlm {cramlm.__version__}"
    contents = [changes, *(f"{name}\n{(root / name).read_text('utf-8')}" for name in new.splitlines())]
    own = "\n".join(contents).strip()
    return commit.strip() + (f"+{hashlib.sha256(own.encode()).hexdigest()[:7]}" if own else "")


def claim(out: Path, code: str) -> None:
    """Record in a folder of runs that `code` makes them.

    Raises:
        UsageError: if another or an unknown commit has made some of them.
    """
    file = out / FILE
    if not file.exists() and not (out.exists() and any(out.iterdir())):
        publish_file(file, (json.dumps({"code": code}) + "\n").encode())
        return
    before = json.loads(file.read_bytes())["code"] if file.exists() else "an unknown commit"
    if before != code:
        raise UsageError(f"{out}: its runs were made by {before}, this is {code}; use that one, or another --out")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
