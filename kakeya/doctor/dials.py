"""One dial in its steps: the network lets it through, a node answers, both nodes trust each other.

gRPC reports UNAVAILABLE for a failure of any step. So a dial is made twice: with a plain socket,
which yields the system's errno, and through a new channel with the options of gossip; a connection
that is already open could hide the fault. If only the channel fails, a bare TLS handshake tells
whether the other side is encrypted, and shows its certificate.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

import grpc
import grpc.aio
from cryptography import x509

from kakeya.core.clock import Clock
from kakeya.core.settings import Illegal, split_address
from kakeya.v1.distributed_pb2 import GetNodeCapabilityRequest
from kakeya.v1.distributed_pb2_grpc import CapabilityServiceStub
from kakeya.wire.channels import Channels, Keepalive
from kakeya.wire.status import plain_details

DIAL_S = 2.0
"""The limit of one dial; a node in the same room answers within milliseconds."""
_KEEPALIVE = Keepalive(interval_s=11.0)
"""Not gossip's value: in gRPC, channels of equal options share a connection and its backoff."""


class DialOutcome(StrEnum):
    """The result of a dial; in the first five cases the connection was made."""

    ANSWERED = "answered"
    SILENT = "silent"
    UNTRUSTED = "untrusted"
    DENIED = "denied"
    NO_NODE = "no_node"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    HOST_UNREACHABLE = "host_unreachable"
    NO_ROUTE = "no_route"
    FORBIDDEN = "forbidden"
    FAILED = "failed"


# Numbers by system: a peer's errno has the meaning of the peer's system.
_BY_ERRNO: Mapping[str, Mapping[int, DialOutcome]] = {
    "darwin": {
        61: DialOutcome.REFUSED,
        60: DialOutcome.TIMEOUT,
        65: DialOutcome.HOST_UNREACHABLE,
        64: DialOutcome.HOST_UNREACHABLE,
        51: DialOutcome.NO_ROUTE,
        50: DialOutcome.NO_ROUTE,
        49: DialOutcome.NO_ROUTE,
        1: DialOutcome.FORBIDDEN,
        13: DialOutcome.FORBIDDEN,
    },
    "linux": {
        111: DialOutcome.REFUSED,
        110: DialOutcome.TIMEOUT,
        113: DialOutcome.HOST_UNREACHABLE,
        112: DialOutcome.HOST_UNREACHABLE,
        101: DialOutcome.NO_ROUTE,
        100: DialOutcome.NO_ROUTE,
        99: DialOutcome.NO_ROUTE,
        1: DialOutcome.FORBIDDEN,
        13: DialOutcome.FORBIDDEN,
    },
}
_TIMEOUT_ERRNO = {"darwin": 60, "linux": 110}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Dates of the certificate that the other side showed; wall seconds."""

    not_before_at: float
    not_after_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DialAttempt:
    """One attempt. `errno` 0 = the system gave none; `node_id` is the id of the node that answered.

    `shown` is read only where trust failed; None = no certificate was shown.
    """

    address: str
    outcome: DialOutcome
    rtt_ms: float = 0.0
    errno: int = 0
    error: str = ""
    node_id: str = ""
    shown: Shown | None = None


def system_of(platform: str) -> str:
    """Return the system of a platform like `darwin-arm64` if its errnos are known; else ""."""
    name = platform.partition("-")[0]
    return name if name in _BY_ERRNO else ""


def outcome_of(number: int, platform: str) -> DialOutcome:
    """Return the outcome that an errno of a failed connect means on a system."""
    return _BY_ERRNO.get(system_of(platform), {}).get(number, DialOutcome.FAILED)


class Dialler:
    """Dials addresses as a node does, each time with a new connection."""

    def __init__(
        self,
        clock: Clock,
        *,
        open_channels: Callable[[Keepalive], Channels] = Channels,
        limit_s: float = DIAL_S,
        platform: str = sys.platform,
    ) -> None:
        """`open_channels` makes channels with the same security as the node's own."""
        self._clock = clock
        self._open_channels = open_channels
        self._limit_s = limit_s
        self._platform = platform

    async def dial(self, address: str) -> DialAttempt:
        """Connect and ask for the node's id; a failure of the network is an outcome."""
        ends_mono = self._clock.mono() + self._limit_s
        reached = await self.connect(address)
        if reached.outcome is not DialOutcome.ANSWERED:
            return reached
        try:
            async with self.channel(address) as channel:
                answer = await CapabilityServiceStub(channel).GetNodeCapability(
                    GetNodeCapabilityRequest(), timeout=max(0.1, ends_mono - self._clock.mono())
                )
        except grpc.aio.AioRpcError as failure:
            return await self._explain(reached, failure)
        return replace(reached, node_id=answer.node.node_id)

    async def connect(self, address: str) -> DialAttempt:
        """Make a plain connection and close it; `ANSWERED` only says that it was made."""
        try:
            host, port = split_address(address)
        except Illegal as problem:
            return DialAttempt(address=address, outcome=DialOutcome.FAILED, error=str(problem))
        started = self._clock.mono()
        try:
            async with asyncio.timeout(self._limit_s):
                await _connect(host, port)
        except TimeoutError:
            number = _TIMEOUT_ERRNO.get(system_of(self._platform), 0)
            words = f"no answer within {self._limit_s:g} s"
            return DialAttempt(
                address=address, outcome=DialOutcome.TIMEOUT, errno=number, error=words
            )
        except OSError as problem:
            return self._failed(address, problem)
        rtt_ms = (self._clock.mono() - started) * 1000
        return DialAttempt(address=address, outcome=DialOutcome.ANSWERED, rtt_ms=rtt_ms)

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a new connection to an address, and close it at the end of the block."""
        channels = self._open_channels(_KEEPALIVE)
        try:
            yield channels.get(address)
        finally:
            await channels.aclose()

    def _failed(self, address: str, problem: OSError) -> DialAttempt:
        number = problem.errno or 0
        outcome = outcome_of(number, self._platform) if number > 0 else DialOutcome.FAILED
        words = os.strerror(number) if number > 0 else problem.strerror or str(problem)
        return DialAttempt(address=address, outcome=outcome, errno=max(0, number), error=words)

    async def _explain(self, reached: DialAttempt, failure: grpc.aio.AioRpcError) -> DialAttempt:
        words = plain_details(failure.details() or "") or failure.code().name
        match failure.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return replace(reached, outcome=DialOutcome.SILENT, error=words)
            case grpc.StatusCode.UNAVAILABLE:
                shown = await self._peek(reached.address)
                return replace(reached, outcome=DialOutcome.UNTRUSTED, error=words, shown=shown)
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return replace(reached, outcome=DialOutcome.DENIED, error=words)
            case _:
                return replace(reached, outcome=DialOutcome.NO_NODE, error=words)

    async def _peek(self, address: str) -> Shown | None:
        """Read the certificate that is shown at an address, without trusting it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        host, port = split_address(address)
        try:
            async with asyncio.timeout(self._limit_s / 2):
                _, writer = await asyncio.open_connection(host, port, ssl=context)
        except (OSError, TimeoutError):  # includes ssl.SSLError
            return None
        handshake: ssl.SSLObject = writer.get_extra_info("ssl_object")
        shown = handshake.getpeercert(binary_form=True)
        writer.transport.abort()
        return _dates(shown) if shown else None


async def _connect(host: str, port: int) -> None:
    """Connect to an address of a host and close. Raises the first OSError, with its errno."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failures: list[OSError] = []
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setblocking(False)
            try:
                await loop.sock_connect(probe, where)
                _check_peer(probe)
            except OSError as failure:
                failures.append(failure)
            else:
                return
    raise failures[0]


def _check_peer(probe: socket.socket) -> None:
    """Raise the error of a connection that looks made but has no peer.

    Linux may report a socket as ready a moment before it reports its error; a look between the two
    finds no error.
    """
    try:
        probe.getpeername()
    except OSError as failure:
        number = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or failure.errno
        raise OSError(number, os.strerror(number or 0)) from None


def _dates(certificate: bytes) -> Shown | None:
    try:
        read = x509.load_der_x509_certificate(certificate)
    except ValueError:
        return None
    return Shown(
        not_before_at=read.not_valid_before_utc.timestamp(),
        not_after_at=read.not_valid_after_utc.timestamp(),
    )
