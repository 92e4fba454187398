"""The two tables between our errors and gRPC status codes, and the border that applies them."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from kakeya.core import errors

STATUS_BY_ERROR: dict[type[errors.KakeyaError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Refused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.PeerError: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerProtocol: grpc.StatusCode.INTERNAL,
    errors.InvariantBroken: grpc.StatusCode.FAILED_PRECONDITION,
}

ERROR_BY_STATUS: dict[grpc.StatusCode, type[errors.KakeyaError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Refused,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.PeerProtocol,
    grpc.StatusCode.INTERNAL: errors.PeerProtocol,
    grpc.StatusCode.UNKNOWN: errors.PeerProtocol,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PeerProtocol,
}


def status_of(error: errors.KakeyaError) -> grpc.StatusCode:
    """The status of the nearest ancestor that the table names; INTERNAL without one."""
    for kind in type(error).__mro__:
        if kind in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[kind]
    return grpc.StatusCode.INTERNAL


def error_from_rpc(error: grpc.RpcError, peer: str) -> errors.KakeyaError:
    """Our error for a failed call to `peer`, with the peer's own words in it."""
    code = error.code() if callable(getattr(error, "code", None)) else None
    details = error.details() if callable(getattr(error, "details", None)) else str(error)
    kind = ERROR_BY_STATUS.get(code, errors.PeerError) if code else errors.PeerError
    return kind(f"{peer}: {details or code}")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.KakeyaError) -> None:
    """End a server call with our error's status and sentence. Never returns."""
    metadata: tuple[tuple[str, str], ...] = (("kakeya-error", error.code),)
    if error.retry_after_s is not None:
        metadata += (("retry-after", f"{error.retry_after_s:.0f}"),)
    await context.abort(status_of(error), error.message, trailing_metadata=metadata)
