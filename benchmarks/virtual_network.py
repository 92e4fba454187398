"""A network of servers in one process, whose messages can be late, lost or cut off.

It takes the places of `grpc.aio` on both sides, no more: services register their real handlers
and are called with bytes through the real `Channels` interface. A lost message is noticed by the
caller's deadline, a dead process at once, as with TCP to a machine that is up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn, cast

import grpc
import grpc.aio

from kakeya.wire.channels import Channels

Method = Callable[[bytes, object], object]


class VirtualServer:
    """Holds what the services of one node registered."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, Method | None] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Register handlers, as `grpc.aio.Server` does."""
        self._handlers.extend(handlers)

    def find(self, path: str) -> Method | None:
        """The unary handler of `/SERVICE/METHOD`, if there is one."""
        if path not in self._found:
            details = _Details(path)
            found = (handler.service(details) for handler in self._handlers)
            rpc = next((rpc for rpc in found if rpc is not None), None)
            self._found[path] = None if rpc is None else cast(Method, rpc.unary_unary)
        return self._found[path]


class _Details(grpc.HandlerCallDetails):
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class _Context:
    """What a handler sees of its caller."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()
    ) -> NoReturn:
        raise _Aborted(code, details)


class VirtualNetwork:
    """Servers by address and the fate of each message between them.

    `loss` is the share of messages that vanish, requests and answers each for themselves.
    `is_cut(source, target)` says which calls are lost at all, `lag_s(source, target)` by how many
    seconds each message of a call is late. `sent_bytes` counts payload by (sender, path).
    """

    def __init__(self, rng: random.Random, *, loss: float = 0.0, latency_s: float = 0.001) -> None:
        self.loss = loss
        self.is_cut: Callable[[str, str], bool] | None = None
        self.lag_s: Callable[[str, str], float] = lambda source, target: 0.0
        self.servers: dict[str, VirtualServer] = {}
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        self._latency_s = latency_s
        self._rng = rng

    def channels(self, source: str) -> Channels:
        """The channels of the node at an address."""
        return _VirtualChannels(self, source)

    async def call(
        self, source: str, target: str, path: str, request: bytes, timeout_s: float
    ) -> bytes:
        """Carry a request there and its answer back. Raises AioRpcError as a channel would."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        self.calls += 1
        self.sent_bytes[source, path] += len(request)
        is_cut = self.is_cut is not None and self.is_cut(source, target)
        lag_s = self.lag_s(source, target)
        await self._carry(deadline, is_cut=is_cut, lag_s=lag_s)
        server = self.servers.get(target)
        if server is None:
            raise _failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        handler = server.find(path)
        if handler is None:
            raise _failure(grpc.StatusCode.UNIMPLEMENTED, f"no method {path}")
        try:
            answer = await cast("asyncio.Future[bytes]", handler(request, _Context(source)))
        except _Aborted as aborted:
            raise _failure(aborted.code, aborted.details) from aborted
        self.sent_bytes[target, path] += len(answer)
        await self._carry(deadline, is_cut=is_cut, lag_s=lag_s)
        return answer

    async def _carry(self, deadline: float, *, is_cut: bool, lag_s: float) -> None:
        left_s = deadline - asyncio.get_running_loop().time()
        if is_cut or self._rng.random() < self.loss or lag_s >= left_s:
            await asyncio.sleep(left_s)
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
        await asyncio.sleep(lag_s + self._latency_s * (0.5 + self._rng.random()))


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _VirtualChannel:
    def __init__(self, network: VirtualNetwork, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    def unary_unary(self, path: str, *codecs: object) -> Callable[..., object]:
        async def call(
            request: bytes, timeout: float = 60.0, wait_for_ready: bool | None = None
        ) -> bytes:
            return await self._network.call(self._source, self._target, path, request, timeout)

        return call


class _VirtualChannels(Channels):
    """Channels over the virtual network; nothing is connected, so nothing is kept."""

    def __init__(self, network: VirtualNetwork, source: str) -> None:
        super().__init__()
        self._network, self._source = network, source

    def get(self, address: str, node_id: str = "") -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _VirtualChannel(self._network, self._source, address))

    async def discard(self, address: str, node_id: str = "") -> None:
        pass
