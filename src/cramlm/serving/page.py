"""The page at `/`: one file without anything from elsewhere, under a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from importlib.resources import files

_TEMPLATE = files("cramlm.serving").joinpath("page.html").read_text("utf-8")


def _hash_of(tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", _TEMPLATE, re.DOTALL)
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page(name: str, *, guarded: bool) -> bytes:
    """The page for a model; a guarded server's page has a field for the token."""
    return _TEMPLATE.replace("{name}", html.escape(name)).replace("{token}", "" if guarded else "hidden").encode()
