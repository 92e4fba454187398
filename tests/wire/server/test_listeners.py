"""The listeners of a node: addresses that come and go, renewal, revocation, limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError, Conflict
from kakeya.v1 import runtime_pb2
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceServicer, add_RuntimeServiceServicer_to_server
from kakeya.wire.security import CertRole
from kakeya.wire.server.caller_limits import CallerLimits
from kakeya.wire.server.listeners import Listeners, NetworkLimits
from tests.fakes import SettableClock
from tests.wire.certificates import Fleet
from tests.wire.servers import ANY_PORT, StandIns, call, dial, listening, methods, path

OK = grpc.StatusCode.OK
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNREACHED = grpc.StatusCode.UNAVAILABLE
BY_PATH = {path(method): method for method in methods()}
DESCRIBE = BY_PATH["/kakeya.v1.CapabilityService/GetNodeCapability"]
SYNC = BY_PATH["/kakeya.v1.GossipService/Sync"]
INVITE = BY_PATH["/kakeya.v1.ControlService/Invite"]


def open_files() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - names, not paths


def plain_listeners(stand_ins: StandIns) -> Listeners:
    return Listeners(stand_ins.register, clock=SystemClock())


async def test_addresses_come_and_go_while_the_node_runs() -> None:
    fleet = Fleet()
    _, own = fleet.issue()
    name = fleet.any_member
    async with listening(fleet) as node:
        cable = await node.listeners.open_tls(ANY_PORT, flag="--bind")
        assert node.listeners.addresses == (node.plain, node.tls, cable)
        async with dial(cable, own, name) as channel:
            assert await call(channel, DESCRIBE) is OK
            await node.listeners.close(cable)
            assert await call(channel, DESCRIBE) is UNREACHED
        assert node.listeners.addresses == (node.plain, node.tls)
        async with dial(node.tls, own, name) as channel:
            assert await call(channel, DESCRIBE) is OK
        await node.listeners.close("192.0.2.1:1")


async def test_bound_before_the_start_and_answered_from_then_on() -> None:
    stand_ins = StandIns()
    listeners = plain_listeners(stand_ins)
    address = await listeners.open_plain(ANY_PORT, flag="--bind")
    with pytest.raises(ConfigError, match=f"--bind {address} cannot be used: Address already"):
        await plain_listeners(stand_ins).open_plain(address, flag="--bind")
    await listeners.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert await call(channel, DESCRIBE) is OK
        await listeners.stop(None)
        assert await call(channel, DESCRIBE) is UNREACHED


@pytest.mark.parametrize("taken_by", ["a node", "another program"])
async def test_two_nodes_never_share_a_port(taken_by: str) -> None:
    """Row 14: without our option both would listen, and each would get half of the calls."""
    fleet = Fleet()
    async with listening(fleet) as node:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            program = f"127.0.0.1:{other.getsockname()[1]}"
            for open_one in (node.listeners.open_plain, node.listeners.open_tls):
                with pytest.raises(ConfigError, match=r"--bind .* cannot be used"):
                    await open_one(node.tls if taken_by == "a node" else program, flag="--bind")


async def test_two_servers_share_a_port_without_our_option() -> None:
    """The control of the test above."""
    first, second = grpc.aio.server(), grpc.aio.server()
    port = first.add_insecure_port(ANY_PORT)
    assert second.add_insecure_port(f"127.0.0.1:{port}") == port
    await first.stop(None)
    await second.stop(None)


async def test_a_node_without_an_identity_encrypts_nothing() -> None:
    with pytest.raises(Conflict, match="has no identity"):
        await plain_listeners(StandIns()).open_tls(ANY_PORT, flag="--bind")


async def test_the_nodes_own_socket_may_call_everything(short_path: Path) -> None:
    stand_ins = StandIns()
    listeners = plain_listeners(stand_ins)
    address = await listeners.open_plain(f"unix:{short_path}/s", flag="--bind")
    await listeners.start()
    async with grpc.aio.insecure_channel(address) as channel:
        for method in methods():
            assert await call(channel, method) is OK
    await listeners.stop(None)


async def test_a_renewed_certificate_is_shown_without_a_restart() -> None:
    fleet = Fleet()
    _, own = fleet.issue()
    old_id, shown = fleet.issue()
    listeners = Listeners(
        StandIns().register, clock=SystemClock(), material=lambda: shown, trust=fleet.trust
    )
    address = await listeners.open_tls(ANY_PORT, flag="--bind")
    await listeners.start()
    async with dial(address, own, old_id) as before:
        assert await call(before, DESCRIBE) is OK
        new_id, shown = fleet.issue()
        async with dial(address, own, new_id) as after:
            assert await call(after, DESCRIBE) is OK
        async with dial(address, own, old_id) as stale:
            assert await call(stale, DESCRIBE) is UNREACHED
        assert await call(before, DESCRIBE) is OK, "open connections go on"
    await listeners.stop(None)


async def ended(stream: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Read a stream to its end; return how that was."""
    async with asyncio.timeout(60):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        return await stream.code()


class Endless(RuntimeServiceServicer):
    """A runtime that yields tokens until its caller is gone."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Generate(self, request, context):
        try:
            while True:
                yield runtime_pb2.GenerateResponse(token_id=1)
                await asyncio.sleep(0.02)
        finally:
            self.ended.set()


async def test_a_revoked_caller_loses_what_it_has_open() -> None:
    fleet = Fleet()
    node_id, own = fleet.issue(CertRole.CLIENT)
    _, others = fleet.issue(CertRole.CLIENT)
    _, shown = fleet.issue()
    runtime = Endless()
    listeners = Listeners(
        lambda server: add_RuntimeServiceServicer_to_server(runtime, server),
        clock=SystemClock(),
        material=lambda: shown,
        trust=fleet.trust,
    )
    address = await listeners.open_tls(ANY_PORT, flag="--bind")
    await listeners.start()
    name = fleet.any_member
    generate = "/kakeya.v1.RuntimeService/Generate"
    async with dial(address, own, name) as channel, dial(address, others, name) as other:
        stream = channel.unary_stream(generate)(b"", timeout=300)
        bystander = other.unary_stream(generate)(b"", timeout=300)
        await stream.read()
        await bystander.read()
        assert listeners.drop_revoked() == 0
        fleet.revoke(node_id)
        assert listeners.drop_revoked() == 1
        assert await ended(stream) is UNREACHED
        async with asyncio.timeout(60):
            await runtime.ended.wait()
        refused = channel.unary_stream(generate)(b"", timeout=10)
        async with asyncio.timeout(60):
            while await ended(refused) is UNREACHED:  # a channel hears of a cut after its calls
                refused = channel.unary_stream(generate)(b"", timeout=10)
        assert await refused.code() is DENIED
        assert "removed from this fleet" in await refused.details()
        await bystander.read()
        bystander.cancel()
    await listeners.stop(None)


@pytest.mark.parametrize("is_watched", [False, True])
async def test_a_connection_ends_with_the_certificate_that_it_was_opened_with(
    is_watched: bool,
) -> None:
    """TLS looks at dates once, and a connection of the fleet stays open for weeks."""
    fleet, clock = Fleet(), SettableClock()
    _, own = fleet.issue(CertRole.CLIENT, age=timedelta(days=360))
    _, others = fleet.issue(CertRole.CLIENT)
    _, shown = fleet.issue()
    runtime = Endless()
    listeners = Listeners(
        lambda server: add_RuntimeServiceServicer_to_server(runtime, server),
        clock=clock,
        material=lambda: shown,
        trust=fleet.trust,
    )
    address = await listeners.open_tls(ANY_PORT, flag="--bind")
    await listeners.start()
    name = fleet.any_member
    generate = "/kakeya.v1.RuntimeService/Generate"
    async with dial(address, own, name) as channel, dial(address, others, name) as other:
        stream = channel.unary_stream(generate)(b"", timeout=300)
        bystander = other.unary_stream(generate)(b"", timeout=300)
        await stream.read()
        await bystander.read()
        assert listeners.drop_expired() == 0
        clock.advance(6 * 86_400.0)
        refused = channel.unary_stream(generate)(b"", timeout=10)
        assert await ended(refused) is grpc.StatusCode.UNAUTHENTICATED
        assert "ran out while this connection was open" in await refused.details()
        watching = asyncio.ensure_future(listeners.watch() if is_watched else asyncio.sleep(0))
        if is_watched:
            clock.advance(2.0)
        else:
            assert listeners.drop_expired() == 1
        assert await ended(stream) is UNREACHED
        await bystander.read()
        bystander.cancel()
        watching.cancel()
    await listeners.stop(None)


async def test_a_member_that_floods_exchanges_is_told_so_and_others_are_served() -> None:
    fleet = Fleet()
    name = fleet.any_member
    async with listening(fleet) as node:
        async with (
            dial(node.tls, fleet.issue()[1], name) as flood,
            dial(node.tls, fleet.issue()[1], name) as honest,
        ):
            statuses = [await call(flood, SYNC) for _ in range(100)]
            assert 10 <= statuses.count(OK) <= 20
            assert set(statuses) == {OK, EXHAUSTED}
            assert [await call(honest, SYNC) for _ in range(5)] == [OK] * 5
            assert await call(flood, DESCRIBE) is OK


async def test_processes_of_this_machine_are_not_counted() -> None:
    async with listening(Fleet(), callers=CallerLimits(exchange_burst=1)) as node:
        async with grpc.aio.insecure_channel(node.plain) as channel:
            assert {await call(channel, SYNC) for _ in range(50)} == {OK}


async def test_a_caller_has_four_connections_and_a_new_one_takes_the_idlest() -> None:
    fleet = Fleet()
    _, own = fleet.issue()
    name = fleet.any_member
    before = open_files()
    async with listening(fleet) as node:
        channels = [dial(node.tls, own, name) for _ in range(12)]
        for channel in channels:
            assert await call(channel, DESCRIBE) is OK
        async with asyncio.timeout(60):
            while open_files() > before + 2 + 2 * 4 + 4:
                await asyncio.sleep(0.05)
        for channel in channels:
            await channel.close()


async def test_a_host_that_only_connects_does_not_take_all_files_of_the_process() -> None:
    """Its silent connections are closed above its share, long before their handshakes time out."""
    fleet = Fleet()
    limits = CallerLimits(connections_per_host=16)
    slow = NetworkLimits(handshake_s=60)
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(listening(fleet, callers=limits, network=slow))
        honest = await stack.enter_async_context(dial(node.tls, fleet.issue()[1], fleet.any_member))
        assert await call(honest, DESCRIBE) is OK
        before = open_files()
        host, _, port = node.tls.rpartition(":")
        crowd = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        watching = asyncio.create_task(node.listeners.watch())
        async with asyncio.timeout(60):
            while sum(reader.at_eof() for reader, _ in crowd) < 100 - 16:
                await asyncio.sleep(0.05)
            while open_files() > before + 100 + 20:  # gRPC closes its ends a moment later
                await asyncio.sleep(0.05)
        assert await call(honest, DESCRIBE) is OK
        watching.cancel()
        for _, writer in crowd:
            writer.transport.abort()


async def test_connections_without_a_call_are_counted_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, other = Fleet(), Fleet()
    clock = SettableClock()
    caplog.set_level(logging.INFO)

    def counted() -> float:
        (found,) = node.listeners.figures()
        return found.values[()]

    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(listening(fleet, clock=clock))
        watching = asyncio.create_task(node.listeners.watch())
        honest = await stack.enter_async_context(dial(node.tls, fleet.issue()[1], fleet.any_member))
        assert await call(honest, DESCRIBE) is OK
        host, _, port = node.tls.rpartition(":")
        for _ in range(3):
            _, garbage = await asyncio.open_connection(host, int(port))
            garbage.write(b"GET / HTTP/1.1\r\n\r\n")
            await garbage.drain()
            garbage.close()
        stranger = await stack.enter_async_context(
            dial(node.tls, other.issue()[1], other.any_member)
        )
        assert await call(stranger, DESCRIBE) is UNREACHED
        assert counted() == 0
        async with asyncio.timeout(60):
            while counted() < 4:
                clock.advance(2.0)
                await asyncio.sleep(0.05)
            clock.advance(100.0)
            while sum(one.kakeya_fields.get("count", 0) for one in caplog.records) < counted():
                clock.advance(2.0)
                await asyncio.sleep(0.05)
        assert await call(honest, DESCRIBE) is OK
        watching.cancel()


async def test_bytes_that_are_no_message_are_the_callers_mistake() -> None:
    listeners = Listeners(
        lambda server: add_RuntimeServiceServicer_to_server(Endless(), server),
        clock=SystemClock(),
    )
    address = await listeners.open_plain(ANY_PORT, flag="--bind")
    await listeners.start()
    async with grpc.aio.insecure_channel(address) as channel:
        for method in ("CreateSession", "Generate"):
            stream = channel.unary_stream(f"/kakeya.v1.RuntimeService/{method}")
            wrong = stream(b"\xff\xff\xff", timeout=10)
            assert await ended(wrong) is grpc.StatusCode.INVALID_ARGUMENT
            assert await wrong.details() == "the 3 bytes of the request are not a message"
    await listeners.stop(None)


async def test_long_metadata_is_refused_from_the_network() -> None:
    fleet = Fleet()
    async with listening(fleet) as node:
        async with dial(node.tls, fleet.issue()[1], fleet.any_member) as channel:
            described = channel.unary_unary(path(DESCRIBE))
            await described(b"", timeout=10, metadata=(("x", "y" * 4096),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await described(b"", timeout=10, metadata=(("x", "y" * 9000),))
            assert refused.value.code() is EXHAUSTED
            assert await call(channel, DESCRIBE) is OK
