"""Which requests need an API key, and what its holder may ask.

    /, /health, /healthz      no key: they tell that a node is here, and nothing of it
    /page/...                 no key: the files of the page, which every node has
    /metrics, /api/v1/...     a key of role admin: they tell of the fleet and of other clients
    /api/v1/requests/...      any key: each client may see its own requests, see `sees_all`
    /api/v1/jobs...           any key, likewise
    /api/v1/capabilities...   any key
    all others                any key

A caller on this machine needs no key, unless the owner wants one of all. A caller behind a proxy on
this machine is one of another machine: the proxy names it in X-Forwarded-For.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from kakeya.core.errors import Denied, Unauthenticated
from kakeya.core.hosts import is_loopback_host
from kakeya.gateway.http.keys import ApiKey, KeyRing, KeyRole
from kakeya.wire.security import CLIENT_NAME

_OPEN = frozenset({"/", "/health", "/healthz"})
_PAGE = "/page/"
_OF_CLIENTS = ("/api/v1/requests/", "/api/v1/jobs/", "/api/v1/capabilities/")
_SEES_ALL = "kakeya.sees_all"


class InvalidKey(Unauthenticated):
    """The caller shows no API key, or none that counts here."""

    code = "invalid_api_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCheck:
    """Decides whether a request has the key that it needs.

    `needed` are the callers that need one: those of other machines, all, or (on a network that its
    owner trusts) none.
    """

    ring: KeyRing
    needed: Literal["remote", "always", "never"] = "remote"

    async def check(self, scope: Scope) -> None:
        """Raise InvalidKey or Denied. The name of a key becomes the name of the client."""
        if scope["path"] in _OPEN or scope["path"].startswith(_PAGE):
            return
        given = _keys_of(Headers(scope=scope))
        holder = None
        for key in given:
            holder = holder or await self.ring.find(key)
        if holder is not None:
            _name_client(scope, holder.name)
        is_admin = holder is not None and holder.role is KeyRole.ADMIN
        scope[_SEES_ALL] = is_admin or (self.needed != "always" and _is_local(scope))
        if self.needed == "always" or (self.needed == "remote" and not _is_local(scope)):
            _check_holder(holder, scope["path"], is_given=bool(given))


def sees_all(scope: Scope) -> bool:
    """Whether a caller may see the requests of other clients: the owner, by a key of role admin or
    on the node's own machine."""
    found: bool = scope.get(_SEES_ALL, _is_local(scope))
    return found


def client_of(scope: Scope) -> str:
    """The name of a caller: that of its API key, else one that it gives itself; "" = none."""
    return Headers(scope=scope).get(CLIENT_NAME, "")


def _check_holder(holder: ApiKey | None, path: str, *, is_given: bool) -> None:
    if holder is None:
        raise InvalidKey(
            "this API key does not count here: it is mistyped or was removed; the owner sees the "
            "names of all keys with kakeya key list"
            if is_given
            else "an API key is needed: send it as Authorization: Bearer KEY or as x-api-key; the "
            "owner of the node makes one there with kakeya key add NAME"
        )
    is_of_node = path.startswith("/api/v1/") and not f"{path}/".startswith(_OF_CLIENTS)
    needs_admin = path == "/metrics" or is_of_node
    if needs_admin and holder.role is not KeyRole.ADMIN:
        raise Denied(
            f"{path} needs a key of role admin, and that of {holder.name} has the role "
            f"{holder.role}; the owner makes one with kakeya key add NAME --role admin"
        )


def _keys_of(headers: Headers) -> list[str]:
    """The keys that a request shows; a client may send a stale one in one of the two places."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    shown = (token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return [key for key in shown if key]


def _is_local(scope: Scope) -> bool:
    """Whether the caller is a program of this machine; false without an address."""
    host = (scope.get("client") or ("",))[0].lower()
    return host != "localhost" and is_loopback_host(host)


def _name_client(scope: Scope, name: str) -> None:
    """Have the client known by the name of its key, and not by one that it gives itself."""
    key = CLIENT_NAME.encode()
    others = [field for field in scope["headers"] if field[0] != key]
    scope["headers"] = [*others, (key, name.encode())]
