"""The two tables between our errors and gRPC status codes, and the border that applies them."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from kakeya.core import errors
from kakeya.wire.tls import handshake_failure

STATUS_BY_ERROR: dict[type[errors.KakeyaError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Refused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ModelLoading: grpc.StatusCode.UNAVAILABLE,
    errors.LoadFailed: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Denied: grpc.StatusCode.PERMISSION_DENIED,
    errors.PeerError: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerProtocol: grpc.StatusCode.INTERNAL,
    errors.UnknownMethod: grpc.StatusCode.UNIMPLEMENTED,
    errors.StoreFailed: grpc.StatusCode.UNAVAILABLE,
    errors.InvariantBroken: grpc.StatusCode.FAILED_PRECONDITION,
}

ERROR_BY_STATUS: dict[grpc.StatusCode, type[errors.KakeyaError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Refused,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Denied,
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnknownMethod,
    grpc.StatusCode.INTERNAL: errors.PeerProtocol,
    grpc.StatusCode.UNKNOWN: errors.PeerProtocol,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvariantBroken,
}
STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
"""Status codes by number, for statuses inside messages."""
_NAMED = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KakeyaError) and "code" in vars(kind)
}
"""The errors that cross as they are; of the others the nearest ancestor by status."""
_UNREACHED = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: (?:ipv[46]:|(?=unix:))(\S+): (.*)",
    re.DOTALL,
)
_REASONS = {
    "Connection refused": "nothing listens there",
    "No route to host": "no route leads to that machine",
    "Network is unreachable": "no route leads to that network",
    "Connection reset": "it was cut",
    "Socket closed": "it was closed at once",
    "handshaker shutdown": "nothing answers there",
    "Timeout occurred": "nothing answers there",
    "timed out": "nothing answers there",
    "No such file": "there is no such socket",
}
"""Why there is no connection, by words of gRPC."""
_LONGEST_WAIT_S = 3600.0
"""The longest wait that a peer's error may ask of its caller."""
_LONGEST_PARAM = 200
_MOVED_TO = "kakeya-moved-to"


def status_of(error: errors.KakeyaError) -> grpc.StatusCode:
    """Return the status of the nearest ancestor in the table; INTERNAL without one."""
    return _status_of_kind(type(error))


def _status_of_kind(kind: type[errors.KakeyaError]) -> grpc.StatusCode:
    for ancestor in kind.__mro__:
        if ancestor in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[ancestor]
    return grpc.StatusCode.INTERNAL


def error_from_rpc(
    error: grpc.RpcError, peer: str, *kinds: type[errors.KakeyaError]
) -> errors.KakeyaError:
    """Make the error for a failed call to `peer`, with the peer's own words.

    A Kakeya node names the exact error, with its fields; the name counts if the status of the call
    agrees with it, and it is in the tree of errors or of one of the `kinds`.
    """
    return error_from_status(*rpc_status(error), peer, *kinds)


def rpc_status(error: grpc.RpcError) -> tuple[grpc.StatusCode | None, str, Mapping[str, str]]:
    """Return the status, details and metadata of a failed call."""
    code = error.code() if callable(getattr(error, "code", None)) else None
    details = error.details() if callable(getattr(error, "details", None)) else str(error)
    return code, details or "", _metadata(error)


def error_from_status(
    code: grpc.StatusCode | None,
    details: str,
    said: Mapping[str, str],
    peer: str,
    *kinds: type[errors.KakeyaError],
) -> errors.KakeyaError:
    """Make the error for a status from `peer`; `said` is the metadata of the same call, `kinds` are
    as of `error_from_rpc`."""
    is_unsaid = code is grpc.StatusCode.UNAVAILABLE and "kakeya-error" not in said
    if is_unsaid and (refused := handshake_failure(details, peer)):
        return refused
    words = f"{peer}: {plain_details(details, peer) or code}"
    kind = ERROR_BY_STATUS.get(code, errors.PeerError) if code else errors.PeerError
    name = said.get("kakeya-error", "")
    named = next((one for one in kinds if one.code == name), _NAMED.get(name, kind))
    if _status_of_kind(named) is code and named is not errors.KakeyaError:
        kind = named
    failure: errors.KakeyaError
    if issubclass(kind, errors.InvariantBroken):
        law, _, values = details.partition(": ")
        failure = errors.InvariantBroken(f"{peer}: {law}", values)
    else:
        failure = kind(words)
    if isinstance(failure, errors.InvalidArgument):
        failure.param = unquote(said.get("kakeya-param", ""))[:_LONGEST_PARAM] or None
    if isinstance(failure, errors.PeerUnavailable) and (moved_to := said.get(_MOVED_TO)):
        failure.moved_to = unquote(moved_to)[:_LONGEST_PARAM]
    failure.retry_after_s = _wait_of(said)
    return failure


def plain_details(details: str, peer: str = "") -> str:
    """What gRPC says of a connection that did not come about, in plain words with its address if
    that is not how `peer` is named; any other text as it is."""
    found = _UNREACHED.fullmatch(details)
    if found is None:
        return details
    reason = next((said for words, said in _REASONS.items() if words in found[2]), found[2])
    address = unquote(found[1])
    return f"no connection{f' to {address}' if address != peer else ''}: {reason}"


def is_answer(failure: errors.KakeyaError) -> bool:
    """Whether a failure of `error_from_rpc` was raised there by a Kakeya node, which then lives."""
    cause = failure.__cause__
    return isinstance(cause, grpc.RpcError) and "kakeya-error" in _metadata(cause)


def _metadata(error: grpc.RpcError) -> dict[str, str]:
    read = getattr(error, "trailing_metadata", None)
    pairs: Iterable[tuple[str, str | bytes]] = (read() if callable(read) else None) or ()
    return {key: text for key, text in pairs if isinstance(text, str)}


def _wait_of(said: Mapping[str, str]) -> float | None:
    """The wait in metadata: in milliseconds, or of a peer that does not say these in seconds."""
    for name, unit_s in (("kakeya-retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = said.get(name, "")
        if text.isdecimal() and text.isascii():
            return min(int(text[:9]) * unit_s, _LONGEST_WAIT_S)
    return None


def metadata_of(error: errors.KakeyaError) -> tuple[tuple[str, str], ...]:
    """Return the metadata that goes with the status of an error: its name, and its fields."""
    pairs = [("kakeya-error", error.code)]
    if error.retry_after_s is not None:
        wait_s = max(0.0, min(error.retry_after_s, _LONGEST_WAIT_S))
        pairs.append(("retry-after", f"{math.ceil(wait_s)}"))
        pairs.append(("kakeya-retry-after-ms", f"{1000 * wait_s:.0f}"))
    if isinstance(error, errors.InvalidArgument) and error.param:
        pairs.append(("kakeya-param", quote(error.param[:_LONGEST_PARAM], safe="[]")))
    if isinstance(error, errors.PeerUnavailable) and error.moved_to:
        pairs.append((_MOVED_TO, quote(error.moved_to[:_LONGEST_PARAM], safe="[]:")))
    return tuple(pairs)


@asynccontextmanager
async def errors_end(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End a server call with the status of an error of ours that is raised within."""
    try:
        yield
    except errors.KakeyaError as error:
        await abort(context, error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.KakeyaError) -> None:
    """End a server call with the status and the sentence of an error. Never returns."""
    await context.abort(status_of(error), error.message, trailing_metadata=metadata_of(error))
