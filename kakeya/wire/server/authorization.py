"""Find the caller of each call and decide, before its handler runs, whether it may; default: no.

    unix socket   a process that may open the file                            Caller.role None
    loopback      a process on this machine                                   Caller.role None
    mutual TLS    the holder of a certificate of this fleet, its role         Caller.role
    open          any caller, in a fleet without identities (--insecure-lan)  Caller.role None

A listener has one `CallGuard`, which knows the origin of its calls. A request is parsed only after
its caller was admitted, and bytes that are not a message end as INVALID_ARGUMENT, not as a Python
error.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import Denied, KakeyaError, Unauthenticated
from kakeya.wire.security import Caller, Certified, CertRole
from kakeya.wire.server.caller_limits import Budget, CallerAccounts
from kakeya.wire.server.connections import Connections
from kakeya.wire.server.handlers import Context, Handler, guarded
from kakeya.wire.server.sockets import Peer, peer_of
from kakeya.wire.status import abort

_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


class Origin(StrEnum):
    """The origin of the calls of a listener; each value completes "from ..."."""

    SOCKET = "a socket of this node"
    LOOPBACK = "this machine"
    TLS = "another machine"
    OPEN = "anywhere"


class CallerTrust(Protocol):
    """A fleet's knowledge of the holders of its certificates."""

    def caller_of(self, certificate: bytes) -> Certified | None:
        """Return the holder of a certificate (PEM) that the handshake has verified."""
        ...

    def is_revoked(self, node_id: str) -> bool:
        """Whether the fleet has revoked this node."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """The callers that may call a method, and the budget that pays for their calls.

    `loopback`: processes of this machine; `open`: any caller, in a fleet without identities.
    Callers on the node's own socket may call all methods.
    """

    roles: frozenset[CertRole]
    loopback: bool = True
    open: bool = True
    budget: Budget = Budget.WORK


NOBODY = Permission(roles=frozenset(), loopback=False, open=False)
"""The permission of methods outside the table."""


def current_caller() -> Caller:
    """Return the caller of the running call. Raises Unauthenticated outside of a call."""
    caller = _caller.get()
    if caller is None:
        raise Unauthenticated("no call is being handled, so there is no caller")
    return caller


def calling_node() -> str:
    """Return the id in the caller's certificate; "" without one, and outside of a call."""
    caller = _caller.get()
    return caller.node_id if caller is not None else ""


def check(method: str, permission: Permission, origin: Origin, role: CertRole | None) -> None:
    """Raise Denied unless a caller of this role and origin may call the method."""
    match origin:
        case Origin.SOCKET:
            is_allowed = True
        case Origin.LOOPBACK:
            is_allowed = permission.loopback
        case Origin.OPEN:
            is_allowed = permission.open
        case Origin.TLS:
            is_allowed = role in permission.roles
    if is_allowed:
        return
    roles = " or ".join(sorted(permission.roles)) or "none"
    caller = f"a caller from {origin}" + (f" with role {role}" if role is not None else "")
    raise Denied(f"{method} is not for {caller}; the roles that may call it: {roles}")


class CallGuard(grpc.aio.ServerInterceptor):
    """The interceptor that wraps every handler of one listener."""

    def __init__(
        self,
        origin: Origin,
        permissions: Mapping[str, Permission],
        *,
        admission: CallerAccounts,
        connections: Connections,
        clock: Clock,
        trust: CallerTrust | None = None,
    ) -> None:
        self._origin = origin
        self._permissions = permissions
        self._admission = admission
        self._connections = connections
        self._clock = clock
        self._trust = trust
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Find the handler of a call; gRPC calls this before it reads the request."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        async def enter(context: Context) -> AbstractContextManager[object]:
            return await self._enter(method, context)

        return guarded(handler, enter)

    async def _enter(self, method: str, context: Context) -> AbstractContextManager[object]:
        """Admit a call or end it; an admitted call lasts as long as the returned context."""
        turn = ExitStack()
        try:
            account, ends_at = self._authorize(method, context)
            peer = peer_of(context.peer())
            if account and peer is not None:
                await self._connections.admit(account, peer, ends_at=ends_at)
                budget = self._permissions[method].budget
                turn.enter_context(self._connections.call(account, peer))
                turn.enter_context(self._admission.turn(account, budget))
        except KakeyaError as refusal:
            turn.close()
            await abort(context, refusal)
        return turn

    def _authorize(self, method: str, context: Context) -> tuple[str, float]:
        """Admit a caller; return its account, and until when its connection is good (wall seconds).

        The account is "" for callers on this machine, which pay nothing. Raises Unauthenticated,
        Denied.
        """
        permission = self._permissions.get(method, NOBODY)
        address = context.peer()
        peer = peer_of(address)
        origin = self._origin_of(peer)
        holder = self._holder(context) if origin is Origin.TLS else None
        node_id, role, ends_at = holder or ("", None, math.inf)
        check(method, permission, origin, role)
        # No need to reset it: gRPC runs each call in a task, and so in a context, of its own.
        _caller.set(Caller(node_id=node_id, role=role, address=address))
        if origin in (Origin.SOCKET, Origin.LOOPBACK):
            return "", ends_at
        return node_id or (peer or "").rpartition(":")[0], ends_at

    def _origin_of(self, peer: Peer | None) -> Origin:
        """Find the origin of a call; on a plain listener only loopback is this machine."""
        if self._origin in (Origin.SOCKET, Origin.TLS):
            return self._origin
        if peer is not None and peer.startswith(("127.", "[::1]:")):
            return Origin.LOOPBACK
        if self._origin is Origin.LOOPBACK:
            raise Unauthenticated(f"{peer} is not this machine, and shows no certificate")
        return Origin.OPEN

    def _holder(self, context: Context) -> Certified:
        certificates = tuple(context.auth_context().get("x509_pem_cert", ()))
        if self._trust is None or not certificates:
            raise Unauthenticated("this call shows no certificate; join the fleet to get one")
        known = self._trust.caller_of(certificates[0])
        if known is None:
            raise Unauthenticated("the certificate of this call is not from this fleet")
        if self._trust.is_revoked(known.node_id):
            raise Denied(
                f"node {known.node_id} was removed from this fleet; to come back, join it again"
            )
        if self._clock.wall() > known.ends_at:
            raise Unauthenticated(
                f"the certificate of node {known.node_id} ran out while this connection was open; "
                "connect with a renewed one"
            )
        return known
