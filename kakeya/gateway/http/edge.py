"""The HTTP edge: how an error leaves. One of the two borders that translate our errors; the other
is `wire/status.py`.

The path decides the body of an error, because each client reads only its own API's:

    /v1/messages...           Anthropic's  {"type": "error", "error": {"type", "message"}}
    /api/... but /api/v1/...  Ollama's     {"error": "text"}
    all others                OpenAI's     {"error": {"message", "type", "param", "code"}}

An unexpected fault is logged here and answered with 500.

An answer that comes before the end of its request's body is sent at once, and the rest of the body
is read and dropped before the answer ends: a connection that is closed with bytes unread is reset
by the system, and a client that sends all before it reads would lose the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Literal

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.callers import CallerCheck, Forbidden
from kakeya.gateway.http.cors import cors_headers, is_preflight, preflight_headers
from kakeya.gateway.http.receipt import generation_line, receipt_headers
from kakeya.gateway.http.request_ids import (
    client_request_id,
    id_headers,
    name_request,
    request_id,
)
from kakeya.wire import traces
from kakeya.wire.request_log import log_answered

_log = logging.getLogger(__name__)
_SHOWN_PATH = 200
"""Characters of a path in the log."""
REST_S = 30.0
"""How long the rest of a body is read behind an answer."""
REST_QUIET_S = 5.0
"""The same for a client that sends nothing."""


class BodyTooLarge(errors.InvalidArgument):
    """The request body is over the limit."""

    code = "request_too_large"


class UnsupportedEncoding(errors.Unsupported):
    """The body is packed in a way that no node reads."""

    code = "unsupported_encoding"


class BodyTimeout(errors.KakeyaError):
    """The caller announced a body and did not send it."""

    code = "request_timeout"
    retryable = True


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    **dict.fromkeys((500, 502, 503, 504), "server_error"),
}
"""`type` of an error by its status; "invalid_request_error" for all others."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STATUS_BY_ERROR: dict[type[errors.KakeyaError], int] = {
    errors.InvalidArgument: 400,
    BodyTooLarge: 413,
    UnsupportedEncoding: 415,
    BodyTimeout: 408,
    errors.Unauthenticated: 401,
    Forbidden: 403,
    errors.Denied: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Refused: 429,
    errors.QueueFull: 503,
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


ErrorFormat = Literal["openai", "anthropic", "ollama"]


def error_format(path: str) -> ErrorFormat:
    """The API whose errors the clients of a path read."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/api/") and not path.startswith("/api/v1/"):
        return "ollama"
    return "openai"


def error_body(
    message: str, status: int, *, code: str, param: str | None = None, path: str = ""
) -> bytes:
    """The body of an error to the clients of a path. ASCII, because a message may quote what UTF-8
    cannot carry."""
    body: dict[str, object]
    match error_format(path):
        case "anthropic":
            kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
            body = {"type": "error", "error": {"type": kind, "message": message}}
        case "ollama":
            body = {"error": message}
        case "openai":
            kind = _OPENAI_TYPES.get(status, "invalid_request_error")
            body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return json.dumps(body).encode()


def envelope(error: errors.KakeyaError, path: str = "") -> bytes:
    """The body of one of our errors to the clients of a path, also for an event of a stream."""
    param = error.param if isinstance(error, errors.InvalidArgument) else None
    return error_body(error.message, status_of(error), code=error.code, param=param, path=path)


async def send_json(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole JSON response."""
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    await _send_whole(send, status, fields, body)


async def _send_whole(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Edge:
    """The outermost layer of the application: admission, counting, translation of errors."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: CallerCheck,
        metrics: HttpMetrics,
        mono: Callable[[], float],
        rng: random.Random,
        keys: KeyCheck | None = None,
        rest_s: float = REST_S,
    ) -> None:
        """`keys` None = no caller needs an API key."""
        self._app = app
        self._rest_s = rest_s
        self._admission = admission
        self._metrics = metrics
        self._mono = mono
        self._rng = rng
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name_request(scope, self._rng)
        exchange = _Exchange(receive, send, self._rest_s, lambda: self._headers(scope))
        began_mono = self._mono()
        try:
            if scope["method"] == "POST":
                with traces.request(f"POST {scope['path'][:80]}", Headers(scope=scope)):
                    await self._serve(scope, exchange)
            else:
                await self._serve(scope, exchange)
        finally:
            seconds = self._mono() - began_mono
            self._metrics.answered(scope, exchange.status, seconds)
            _log_answer(scope, exchange.status, seconds)

    def _headers(self, scope: Scope) -> dict[str, str]:
        """The headers of every answer to a request, which an answer's own ones replace."""
        headers = id_headers(scope) | receipt_headers(scope)
        if scope["method"] == "POST":
            headers |= self._metrics.rate_headers()
        return headers | cors_headers(scope) if self._is_listed(scope) else headers

    def _is_listed(self, scope: Scope) -> bool:
        origin = Headers(scope=scope).get("origin")
        return origin is not None and self._admission.is_listed(origin)

    async def _serve(self, scope: Scope, send: _Exchange) -> None:
        try:
            self._admission.check(Headers(scope=scope), (scope.get("server") or ("",))[0])
            if self._is_listed(scope) and is_preflight(scope):
                await _send_whole(send, 204, preflight_headers(scope), b"")
                return
            if self._keys is not None:
                await self._keys.check(scope)
            await self._app(scope, send.receive, send)
        except errors.Cancelled:
            return
        except asyncio.CancelledError:  # the server stops and the grace is over
            if not send.is_started:
                await send_error(send, stopping(), scope["path"])
            raise
        except errors.KakeyaError as error:
            if send.is_started:
                raise
            await send_error(send, error, scope["path"])
        except Exception as fault:  # the HTTP edge: no fault may end the server
            path, asked = scope["path"], request_id(scope)
            event(
                _log,
                "request failed",
                level=logging.ERROR,
                path=path,
                request_id=asked,
                error=repr(fault),
            )
            _log.debug("traceback", exc_info=fault)
            if send.is_started:
                raise
            message = f"internal error; the node's log tells more of {asked}"
            await send_json(send, 500, error_body(message, 500, code="internal", path=path))


class _Exchange:
    """The send and the receive of one request; knows how far its answer and its body are."""

    __slots__ = ("_headers", "_is_read", "_receive", "_rest_s", "_send", "is_started", "status")

    def __init__(
        self,
        receive: Receive,
        send: Send,
        rest_s: float,
        headers: Callable[[], Mapping[str, str]],
    ) -> None:
        """`headers` are those that every answer has; an answer's own of the same name win."""
        self._headers = headers
        self._receive = receive
        self._send = send
        self._rest_s = rest_s
        self._is_read = False
        self.is_started = False
        self.status = 499  # counted when the client left before an answer began

    async def receive(self) -> Message:
        """Receive a piece of the body, or the end of the connection."""
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def __call__(self, message: Message) -> None:
        """Send a piece of the answer; the last one goes out when the body has been read."""
        if not self.is_started:
            self.is_started = True
            self.status = message["status"]
            own = list(message.get("headers", ()))
            names = {name.lower() for name, _ in own}
            more = (
                (name.encode(), value.encode("latin-1")) for name, value in self._headers().items()
            )
            own += [field for field in more if field[0] not in names]
            message = {**message, "headers": own}
        elif not self._is_read and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            if not await self._read_rest():
                return  # without an end of the answer, the server closes the connection
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _read_rest(self) -> bool:
        """Drop the rest of the body; returns whether it has ended."""
        try:
            async with asyncio.timeout(self._rest_s):
                while not self._is_read:
                    await asyncio.wait_for(self.receive(), REST_QUIET_S)
        except TimeoutError:
            return False
        return True


def _log_answer(scope: Scope, status: int, seconds: float) -> None:
    """Write a line for a request: told at the usual level for what makes the node work."""
    given = client_request_id(scope)
    log_answered(
        level=logging.INFO if scope["method"] == "POST" else logging.DEBUG,
        method=scope["method"],
        path=scope["path"][:_SHOWN_PATH],
        status=status,
        seconds=seconds,
        request_id=request_id(scope),
        made=generation_line(scope),
        is_refused=status >= 400,
        more={"client_request_id": given} if given else None,
    )


def stopping() -> errors.PeerUnavailable:
    """The error of a request that the end of this node cuts off."""
    return errors.PeerUnavailable("this node is stopping")


async def send_error(send: Send, error: errors.KakeyaError, path: str) -> None:
    """Answer a request for a path with one of our errors."""
    status = status_of(error)
    headers = {}
    is_hopeless = isinstance(error, errors.MemoryRefused) and error.retry_after_s is None
    if status in (429, 503) and not is_hopeless:
        seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
        headers["retry-after-ms"] = str(max(1, round(seconds * 1000)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 408:
        headers["connection"] = "close"
    await send_json(send, status, envelope(error, path), headers)


def _near_path(request: Request) -> str:
    """The served path that was likely meant: with /v1 once, and no slash twice or at the end."""
    app = request.scope.get("app")
    served = {route.path for route in app.routes if isinstance(route, Route)} if app else set()
    words = [word for word in request.url.path.split("/") if word]
    plain = [word for word in words if word != "v1"]
    tried = ("/" + "/".join(found) for found in (words, plain, ["v1", *plain]))
    return next((path for path in tried if path in served and path != request.url.path), "")


async def refuse_route(request: Request, error: Exception) -> Response:
    """Answer the router's own errors: no such route, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    asked = f"{request.method} {request.url.path}"
    allowed = (error.headers or {}).get("Allow", "")
    near = _near_path(request)
    message, code = {
        404: (f"there is no {asked}" + f"; did you mean {near}?" * bool(near), "unknown_route"),
        405: (f"{asked} is not allowed; allowed is {allowed}", "method_not_allowed"),
    }.get(error.status_code, (error.detail, "http_error"))
    return Response(
        error_body(message, error.status_code, code=code, path=request.url.path),
        error.status_code,
        headers=error.headers,
        media_type="application/json",
    )
