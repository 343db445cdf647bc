"""Serve an exported model over HTTP. This file loads no package of the server; it holds the limits of requests, which bound the memory of
the process whatever clients send, and the address with its access rule.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields

from cramlm.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request, of the queue and of time; all above 0.

    body_bytes: of one body. texts: per request. characters: per text (and per pair). queue_texts: texts in the queue; beyond it 429.
    wait_seconds: longest wait in the queue before 429. read_seconds: for a head, for the body after it, and for a client to read its
    response. drain_seconds: for the requests in flight after SIGTERM. connections: open at the same time. open_bytes: of all bodies
    of requests without a response.
    """

    body_bytes: int = 1_000_000
    texts: int = 64
    characters: int = 20_000
    queue_texts: int = 1024
    wait_seconds: float = 2.0
    read_seconds: float = 10.0
    drain_seconds: float = 8.0
    connections: int = 512
    open_bytes: int = 128_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise UsageError(f"{field.name} is {getattr(self, field.name)}; it must be above 0")
        if self.queue_texts < self.texts:
            raise UsageError(f"the queue takes {self.queue_texts} texts, fewer than one request ({self.texts}); raise --queue-texts")
        if self.open_bytes < self.body_bytes:
            raise UsageError(f"a body may have {self.body_bytes} bytes, all together {self.open_bytes}; lower --max-body-bytes")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens. port: 0 = any free one. token: what clients must send; None = only this machine has access.

    Raises:
        UsageError: for an address that other machines can reach without a token, for a token that no header can carry, or for a host that
            is no address.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    def __post_init__(self) -> None:
        token = self.token
        if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token):
            raise UsageError("the token must be 8 or more printable ASCII characters without spaces; make one with `openssl rand -hex 16`")
        if self.host != "localhost":
            try:
                ipaddress.ip_address(self.host)
            except ValueError as error:
                raise UsageError(
                    f"--host {self.host!r} is not an address; pass localhost or an IP address like 127.0.0.1 or 0.0.0.0"
                ) from error
        if not is_loopback(self.host) and token is None:
            raise UsageError(f"--host {self.host} is open to other machines; pass --token (or set CRAMLM_TOKEN), or use 127.0.0.1")


def is_loopback(host: str) -> bool:
    """Return True if `host`, a name or an IP address without brackets, is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(authority: str) -> bool:
    """Return True if the value of a Host header, `NAME[:PORT]`, names a loopback address."""
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::[0-9]*)?", authority)
    return match is not None and is_loopback(match[1] or match[2] or "")
