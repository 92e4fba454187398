"""Which callers may enter: by the host that they name, and by the origin of a web page.

A page in a browser must not reach a node by a name that an attacker resolves (DNS rebinding), nor
from another origin. So a Host header must be a name of the node: a loopback name, a name of its
machine, a name that its owner set, or the IP address that the connection came in by, which no
resolved name can equal. And an Origin header must name the node too, with the port of Host, or be
an origin that the owner set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from kakeya.core import errors
from kakeya.core.hosts import is_loopback_host, plain_address

_HOST = re.compile(
    r"(?:\[([0-9a-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+))(?::(\d{0,5}))?", re.ASCII | re.IGNORECASE
)
"""HOST or HOST:PORT; nothing that names a user, a path or a second host."""
_USUAL_PORTS = {"http": "80", "https": "443"}


class Forbidden(errors.KakeyaError):
    """This caller may not ask this node."""

    code = "forbidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerCheck:
    """Decides which callers enter.

    `hosts` are names and addresses beside loopback, without ports; `origins` are those of web pages
    that may call, as browsers send them; SCHEME://* is every origin of a scheme. Lower case.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def check(self, headers: Headers, own_address: str = "") -> None:
        """Raise Forbidden or InvalidArgument. Bearer tokens, when there are any, belong here.

        `own_address` is the address of this end of the connection, without its port.
        """
        given = headers.getlist("host")
        if len(given) != 1:
            raise errors.InvalidArgument(f"one Host header is needed, {len(given)} came")
        host, port = _split(given[0])
        if not self._is_own(host, own_address):
            raise Forbidden(
                f"Host {given[0][:300]!r} is no name of this node; its owner can add one: "
                f"--http-host {host or 'NAME'}, or http_hosts under [listen]"
            )
        origin = headers.get("origin")
        if origin is None or self.is_listed(origin):
            return
        scheme, page_host, page_port = _split_origin(origin.lower())
        usual = _USUAL_PORTS.get(scheme)
        is_same_port = (page_port or usual) == (port or usual)
        if usual is None or not is_same_port or not self._is_own(page_host, own_address):
            raise Forbidden(
                f"the page of the origin {origin[:300]!r} may not call this node; its owner can "
                f"let it: --http-origin {origin[:300]}, or http_origins under [listen]"
            )

    def is_listed(self, origin: str) -> bool:
        """Whether the owner lets the pages of an origin call."""
        lowered = origin.lower()
        return lowered in self.origins or f"{lowered.partition('://')[0]}://*" in self.origins

    def _is_own(self, host: str, own_address: str) -> bool:
        if not host:
            return False
        is_named = host in self.hosts or host.endswith(".localhost") or is_loopback_host(host)
        return is_named or _is_same_address(host, own_address)


def _split(host: str) -> tuple[str, str]:
    """The host, in lower case, and the port of a Host header; both "" for anything else."""
    match = _HOST.fullmatch(host)
    if match is None:
        return "", ""
    return (match[1] or match[2]).lower().removesuffix("."), match[3] or ""


def _split_origin(origin: str) -> tuple[str, str, str]:
    """Scheme, host and port of an origin."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return "", "", ""
    return (parts.scheme, *_split(parts.netloc))


def _is_same_address(host: str, own_address: str) -> bool:
    """Whether both are one IP address. A zone only says by which of our interfaces."""
    try:
        return plain_address(host) == plain_address(own_address)
    except ValueError:
        return False
