"""The HTTP edge: which callers may enter, and how an error leaves. One of the two borders that
translate our errors; the other is `wire/status.py`.

Every error leaves as {"error": {"message", "type", "param", "code"}}. An unexpected fault is logged
here and answered with 500.

A page in a browser must not reach a node by a name that an attacker resolves (DNS rebinding), nor
from another origin. So the Host header must be a loopback name, one of the node's own names, or the
IP address that the connection came in by, which no resolved name can equal; and an Origin header
must name the same host and port as Host. There are no CORS headers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.gateway.figures import HttpMetrics

_log = logging.getLogger(__name__)
_HOST = re.compile(
    r"(?:\[([0-9a-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+))(?::\d{0,5})?", re.ASCII | re.IGNORECASE
)
"""HOST or HOST:PORT; nothing that names a user, a path or a second host."""


class Forbidden(errors.KakeyaError):
    """This caller may not ask this node."""

    code = "forbidden"


class BodyTooLarge(errors.InvalidArgument):
    """The request body is over the limit."""

    code = "request_too_large"


class BodyTimeout(errors.KakeyaError):
    """The caller announced a body and did not send it."""

    code = "request_timeout"
    retryable = True


_KIND_BY_STATUS = {
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
}
STATUS_BY_ERROR: dict[type[errors.KakeyaError], int] = {
    errors.InvalidArgument: 400,
    BodyTooLarge: 413,
    BodyTimeout: 408,
    Forbidden: 403,
    errors.Denied: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Refused: 429,
    errors.MemoryRefused: 503,
    errors.LoadFailed: 503,
    errors.ModelLoading: 503,
    errors.DeadlineExceeded: 504,
    errors.Cancelled: 499,
    errors.PeerError: 502,
    errors.PeerUnavailable: 503,
    errors.StoreFailed: 503,
    errors.KakeyaError: 500,
}
RETRY_AFTER_S = 1.0
"""Retry-After of a 429 or 503 when the error has no time of its own."""


def status_of(error: errors.KakeyaError) -> int:
    """The status of the nearest ancestor that the table names."""
    return next(STATUS_BY_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_BY_ERROR)


def error_body(message: str, status: int, *, code: str, param: str | None = None) -> bytes:
    """The error envelope. ASCII, because a message may quote what UTF-8 cannot carry."""
    kind = _KIND_BY_STATUS.get(status, "invalid_request_error")
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    ).encode()


def envelope(error: errors.KakeyaError) -> bytes:
    """The error envelope of one of our errors."""
    param = error.param if isinstance(error, errors.InvalidArgument) else None
    return error_body(error.message, status_of(error), code=error.code, param=param)


async def send_json(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole JSON response."""
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerCheck:
    """Decides which callers enter. `hosts` are the node's names and addresses beside loopback."""

    hosts: frozenset[str] = frozenset()

    def check(self, headers: Headers, own_address: str = "") -> None:
        """Raise Forbidden or InvalidArgument. Bearer tokens, when there are any, belong here.

        `own_address` is the address of this end of the connection, without its port.
        """
        given = headers.getlist("host")
        if len(given) != 1:
            raise errors.InvalidArgument(f"one Host header is needed, {len(given)} came")
        host = _hostname(given[0])
        own = host in self.hosts or _is_loopback(host) or _is_same_address(host, own_address)
        if not host or not own:
            raise Forbidden(f"Host {given[0][:300]!r} is no name of this node; use localhost")
        origin = headers.get("origin")
        if origin is not None and not _is_same_origin(origin, given[0]):
            raise Forbidden(f"Origin {origin!r} is not this node; browsers may not call across")


class Edge:
    """The outermost layer of the application: admission, counting, translation of errors."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: CallerCheck,
        metrics: HttpMetrics,
        mono: Callable[[], float],
    ) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics
        self._mono = mono

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = _WatchedSend(send)
        began_mono = self._mono()
        try:
            await self._serve(scope, receive, watched)
        finally:
            self._metrics.answered(scope, watched.status, self._mono() - began_mono)

    async def _serve(self, scope: Scope, receive: Receive, send: _WatchedSend) -> None:
        try:
            self._admission.check(Headers(scope=scope), (scope.get("server") or ("",))[0])
            await self._app(scope, receive, send)
        except errors.Cancelled:
            return
        except asyncio.CancelledError:  # the server stops and the grace is over
            if not send.is_started:
                await send_error(send, stopping())
            raise
        except errors.KakeyaError as error:
            if send.is_started:
                raise
            await send_error(send, error)
        except Exception as fault:  # the HTTP edge: no fault may end the server
            path = scope["path"]
            event(_log, "request failed", level=logging.ERROR, path=path, error=repr(fault))
            _log.debug("traceback", exc_info=fault)
            if send.is_started:
                raise
            message = "internal error; the node's log tells more"
            await send_json(send, 500, error_body(message, 500, code="internal"))


class _WatchedSend:
    """A send that knows whether an answer began, and with which status."""

    __slots__ = ("_send", "is_started", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False
        self.status = 499  # counted when the client left before an answer began

    async def __call__(self, message: Message) -> None:
        if not self.is_started:
            self.is_started = True
            self.status = message["status"]
        await self._send(message)


def stopping() -> errors.PeerUnavailable:
    """The error of a request that the end of this node cuts off."""
    return errors.PeerUnavailable("this node is stopping")


async def send_error(send: Send, error: errors.KakeyaError) -> None:
    """Answer with one of our errors."""
    status = status_of(error)
    headers = {}
    is_hopeless = isinstance(error, errors.MemoryRefused) and error.retry_after_s is None
    if status in (429, 503) and not is_hopeless:
        seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, round(seconds)))
    if status == 408:
        headers["connection"] = "close"
    await send_json(send, status, envelope(error), headers)


async def refuse_route(request: Request, error: Exception) -> Response:
    """Answer the router's own errors: no such route, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    asked = f"{request.method} {request.url.path}"
    allowed = (error.headers or {}).get("Allow", "")
    message, code = {
        404: (f"there is no {asked}", "unknown_route"),
        405: (f"{asked} is not allowed; allowed is {allowed}", "method_not_allowed"),
    }.get(error.status_code, (error.detail, "http_error"))
    return Response(
        error_body(message, error.status_code, code=code),
        error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def _hostname(host: str) -> str:
    """The host of a Host header, in lower case; "" for anything but HOST or HOST:PORT."""
    match = _HOST.fullmatch(host)
    return "" if match is None else (match[1] or match[2]).lower().removesuffix(".")


def _is_same_address(host: str, own_address: str) -> bool:
    """Whether both are one IP address. A zone only says by which of our interfaces."""
    try:
        return _address(host) == _address(own_address)
    except ValueError:
        return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Without its zone; IPv4 as itself, also where a socket for both shows it as IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
