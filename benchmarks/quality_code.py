"""Which code made the runs of a folder: one and the same for all of them, whoever resumes them.

A run that is there already is not made again. So a folder that one commit began and another finishes would hold the scores of both under
the name of the second; it is refused instead.
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
    """The last commit that changed what trains, such as `f42c0da`; with uncommitted changes of it `f42c0da+` and their hash.

    `cramlm VERSION` where `root` is no checkout.
    """
    try:
        commit, changes = (_git(root, *call, "--", *SOURCES) for call in (("log", "-1", "--format=%h"), ("diff", "HEAD")))
        new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return f"cramlm {cramlm.__version__}"
    if not commit:  # a checkout, but not of cramlm
        return f"cramlm {cramlm.__version__}"
    contents = [changes, *(f"{name}\n{(root / name).read_text('utf-8')}" for name in new.splitlines())]
    own = "\n".join(contents).strip()
    return commit.strip() + (f"+{hashlib.sha256(own.encode()).hexdigest()[:7]}" if own else "")


def claim(out: Path, code: str) -> None:
    """Note in a folder of runs that `code` makes them.

    Raises:
        UsageError: if other code has made some of them, or code that is not known.
    """
    file = out / FILE
    if not file.exists() and not (out.exists() and any(out.iterdir())):
        publish_file(file, (json.dumps({"code": code}) + "\n").encode())
        return
    before = json.loads(file.read_bytes())["code"] if file.exists() else "code that it does not name"
    if before != code:
        raise UsageError(f"{out}: its runs were made by {before}, this is {code}; go on with that one, or give another --out")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
