"""A node's listeners with every service of the fleet, all answered by stand-ins that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2

from kakeya.core.clock import Clock, SystemClock
from kakeya.v1 import (
    adapters_pb2,
    distributed_pb2,
    drafts_pb2,
    engine_pb2,
    fleet_pb2,
    precache_pb2,
    relay_pb2,
    ring_pb2,
    runtime_pb2,
    serving_pb2,
    sessions_pb2,
    weights_pb2,
)
from kakeya.wire.channels import Keepalive
from kakeya.wire.security import Caller, CertRole, TlsMaterial
from kakeya.wire.server.authorization import current_caller
from kakeya.wire.server.caller_limits import CallerLimits
from kakeya.wire.server.listeners import Listeners, NetworkLimits
from tests.wire.certificates import Fleet

FILES = (
    adapters_pb2,
    distributed_pb2,
    drafts_pb2,
    engine_pb2,
    fleet_pb2,
    precache_pb2,
    relay_pb2,
    ring_pb2,
    runtime_pb2,
    serving_pb2,
    sessions_pb2,
    weights_pb2,
    health_pb2,
)
ANY_PORT = "127.0.0.1:0"


def services() -> list[ServiceDescriptor]:
    return [one for file in FILES for one in file.DESCRIPTOR.services_by_name.values()]


def methods() -> list[MethodDescriptor]:
    return [method for service in services() for method in service.methods]


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass
class StandIns:
    """Answers every method with no bytes; counts who called what."""

    calls: Counter[str] = field(default_factory=Counter)
    callers: list[Caller] = field(default_factory=list)

    def register(self, server: grpc.aio.Server) -> None:
        for service in services():
            handlers = {method.name: self._handler(method) for method in service.methods}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.full_name, handlers),)
            )

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        def seen() -> bytes:
            self.calls[path(method)] += 1
            self.callers.append(current_caller())
            return b""

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return seen()

        async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            yield seen()

        async def collect(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> bytes:
            async for _ in requests:
                pass
            return seen()

        async def converse(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> None:
            async for _ in requests:
                pass
            await context.write(seen())

        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(converse)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(collect)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)


async def call(
    channel: grpc.aio.Channel, method: MethodDescriptor, *, tries: int = 3
) -> grpc.StatusCode:
    """Call a method with an empty request; return how it ended."""
    try:
        if method.client_streaming and method.server_streaming:
            async for _ in channel.stream_stream(path(method))(iter([b""]), timeout=10):
                pass
        elif method.client_streaming:
            await channel.stream_unary(path(method))(iter([b""]), timeout=10)
        elif method.server_streaming:
            async for _ in channel.unary_stream(path(method))(b"", timeout=10):
                pass
        else:
            await channel.unary_unary(path(method))(b"", timeout=10)
    except grpc.aio.AioRpcError as error:
        # grpc.aio may lose the status of a stream that is refused while it writes to it.
        if tries > 1 and method.client_streaming and error.details() == "Internal error from Core":
            return await call(channel, method, tries=tries - 1)
        return error.code()
    return grpc.StatusCode.OK


@dataclass
class Served:
    listeners: Listeners
    stand_ins: StandIns
    plain: str
    tls: str
    node_id: str


@asynccontextmanager
async def listening(
    fleet: Fleet,
    *,
    network: NetworkLimits | None = None,
    callers: CallerLimits | None = None,
    keepalive: Keepalive | None = None,
    role: CertRole = CertRole.MEMBER,
    clock: Clock | None = None,
) -> AsyncIterator[Served]:
    stand_ins = StandIns()
    node_id, material = fleet.issue(role)
    listeners = Listeners(
        stand_ins.register,
        clock=clock or SystemClock(),
        material=lambda: material,
        trust=fleet.trust,
        network=network,
        callers=callers,
        keepalive=keepalive,
    )
    try:
        plain = await listeners.open_plain(ANY_PORT, flag="--bind")
        tls = await listeners.open_tls(ANY_PORT, flag="--bind")
        await listeners.start()
        yield Served(listeners, stand_ins, plain, tls, node_id)
    finally:
        await listeners.stop(None)


def dial(
    address: str, material: TlsMaterial | None, name: str, *, root: bytes = b""
) -> grpc.aio.Channel:
    """A channel with its own connection: with a certificate, or with an authority alone."""
    options: Iterable[tuple[str, object]] = (
        ("grpc.ssl_target_name_override", name),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if material is None:
        credentials = grpc.ssl_channel_credentials(root)
    else:
        credentials = grpc.ssl_channel_credentials(
            root or material.authority, material.key, material.certificate
        )
    return grpc.aio.secure_channel(address, credentials, options=tuple(options))
