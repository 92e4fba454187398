"""Calls of peers, which end with an answer or with a KakeyaError."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerUnavailable
from kakeya.core.tasks import is_cancelled
from kakeya.wire.status import error_from_rpc

_GRACE_S = 0.5
"""Time after the RPC's own deadline; it runs out only if gRPC itself does not return."""


async def call_bytes(
    channel: grpc.aio.Channel, address: str, path: str, request: bytes, *, timeout_s: float
) -> bytes:
    """Call `/package.Service/Method`; errors name the peer by `address`.

    Raises DeadlineExceeded, UnknownMethod, PeerUnavailable (also for a closed channel) and the
    other errors that `error_from_rpc` makes of the peer's status.
    """
    with calling(address):
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                answer: bytes = await method(request, timeout=timeout_s)
        except TimeoutError as failure:
            raise DeadlineExceeded(f"{address}: no answer in {timeout_s:g} s") from failure
    return answer


@contextmanager
def calling(peer: str, *kinds: type[KakeyaError]) -> Iterator[None]:
    """Raise the error for a call within that failed, as `error_from_rpc`; a closed channel is a
    peer that is not available. The caller's own cancellation passes."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from_rpc(failure, peer, *kinds) from failure
    except grpc.aio.UsageError as failure:
        raise PeerUnavailable(f"{peer}: the channel was closed before the call") from failure
    except asyncio.CancelledError as failure:
        if is_cancelled():
            raise
        raise PeerUnavailable(f"{peer}: the channel was closed during the call") from failure
