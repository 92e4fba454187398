"""Peers that die, hang, fall silent and return, with the times of RELIABILITY rows 1 to 5 and 30.

Real processes and real sockets. Keepalive runs at 2 s + 1 s where the default is 10 s + 5 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from kakeya.core.errors import PlacementError
from kakeya.fleet.placement import plan_spec_decode_placement
from kakeya.wire.channels import Keepalive, Option, message_options
from tests.fleet.nodes import Node, running_node, until, verifier
from tests.fleet.proxy import running_proxy

FAST = Keepalive(interval_s=2.0, timeout_s=1.0)
HOLD = "/test.Stream/Hold"


@contextlib.asynccontextmanager
async def child_node(node_id: str = "child", block_s: float = 0.0) -> AsyncIterator[_Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fleet.child_node", node_id, str(block_s), "2", "1", stdout=PIPE
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield _Child(process, line.decode().strip())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


class _Child:
    def __init__(self, process: Process, address: str) -> None:
        self.process, self.address = process, address

    def send(self, number: signal.Signals) -> float:
        os.kill(self.process.pid, number)
        return time.monotonic()


async def _hold(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    call = channel.unary_stream(HOLD)(b"", timeout=120)
    assert await call.read() == b"first"
    return call


async def _end_of(call: grpc.aio.UnaryStreamCall, since_mono: float) -> tuple[float, object]:
    """Seconds until the stream broke, and its status."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    return time.monotonic() - since_mono, failure.value.code()


def _can_place(node: Node) -> bool:
    now = node.clock.wall()
    with contextlib.suppress(PlacementError):
        plan_spec_decode_placement(
            node.registry.snapshot(now), now=now, suspects=node.registry.suspects()
        )
        return True
    return False


async def test_a_killed_peer_breaks_its_streams_at_once_and_gets_no_new_work() -> None:
    """Row 1."""
    async with child_node() as child, running_node("a", models=[verifier("m")]) as a:
        await a.exchange(child.address)
        assert _can_place(a)
        call = await _hold(a.channels.get(child.address))
        seconds, code = await _end_of(call, child.send(signal.SIGKILL))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert seconds < 1.0  # 0.1 s on a quiet machine
        a.registry.mark_failed("child", a.clock.wall())
        assert not _can_place(a)
        done = await a.exchange(child.address)
        assert done.outcomes[0].error_code == "unavailable"
        assert a.registry.is_suspect("child")
        assert "child" in a.known()
        assert "child" not in [
            card.node_id for card in a.registry.snapshot(a.clock.wall() + 120 + 30)
        ]


async def test_a_stopped_peer_is_noticed_by_pings() -> None:
    """Row 2."""
    async with child_node() as child, running_node("a", keepalive=FAST) as a:
        call = await _hold(a.channels.get(child.address))
        seconds, code = await _end_of(call, child.send(signal.SIGSTOP))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert seconds <= 4.0


@pytest.mark.slow
async def test_without_the_ping_timeout_a_stopped_peer_goes_unnoticed_for_a_minute() -> None:
    """The control of row 2: fails if grpcio learns to bound it by the other options."""
    options = _without(FAST.client_options(), "grpc.http2.ping_timeout_ms")
    async with child_node() as child:
        async with grpc.aio.insecure_channel(child.address, options=options) as channel:
            call = await _hold(channel)
            seconds, _ = await _end_of(call, child.send(signal.SIGSTOP))
            assert seconds > 20.0


async def test_a_blocked_loop_costs_the_caller_its_deadline_and_two_misses_make_it_suspect() -> (
    None
):
    """Row 3, scaled: blocked for 4 s, exchanges with 0.5 s of patience."""
    async with child_node(block_s=4.0) as child, running_node("a", keepalive=FAST) as a:
        await a.exchange(child.address)
        blocked_mono = child.send(signal.SIGUSR1)
        for misses in (1, 2):
            started = time.monotonic()
            done = await a.exchange(child.address, timeout_s=0.5)
            assert done.outcomes[0].error_code == "deadline_exceeded"
            assert time.monotonic() - started <= 1.5
            assert a.registry.is_suspect("child") is (misses == 2)
        assert "child" in a.known()
        done = await a.exchange(child.address, timeout_s=10.0)
        assert done.errors == {}
        assert time.monotonic() - blocked_mono >= 3.5  # keepalive did not cut the connection
        assert not a.registry.is_suspect("child")


async def test_both_ends_notice_a_wire_that_swallows_everything() -> None:
    """Row 4."""
    ended = asyncio.Event()

    async def hold(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = grpc.method_handlers_generic_handler(
        "test.Stream", {"Hold": grpc.unary_stream_rpc_method_handler(hold)}
    )
    async with running_node("b", keepalive=FAST, handlers=(handler,)) as b:
        async with running_proxy(b.address) as proxy, running_node("a", keepalive=FAST) as a:
            call = await _hold(a.channels.get(proxy.address))
            proxy.is_blackhole = True
            cut_mono = time.monotonic()
            seconds, code = await _end_of(call, cut_mono)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert seconds <= 4.0
            await asyncio.wait_for(ended.wait(), 5.0)
            assert time.monotonic() - cut_mono <= 5.0


@pytest.mark.slow
async def test_without_keepalive_neither_end_notices() -> None:
    """The control of row 4."""
    async with child_node() as child, running_proxy(child.address) as proxy:
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            call = await _hold(channel)
            proxy.is_blackhole = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call.read(), 11.0)


PINGER = Keepalive(interval_s=0.5, timeout_s=5.0)


async def _quiet_call(
    server_options: tuple[Option, ...], quiet_s: float, client: Keepalive = PINGER
) -> None:
    async def hold(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(quiet_s)
        yield b"second"

    server = grpc.aio.server(options=server_options)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "test.Stream", {"Hold": grpc.unary_stream_rpc_method_handler(hold)}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pings = client.client_options()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=pings) as channel:
            call = await _hold(channel)
            assert await call.read() == b"second"
    finally:
        await server.stop(None)


async def test_a_quiet_call_survives_our_own_pings() -> None:
    """Row 5, scaled: six pings where a call with the default would see six in a minute."""
    await _quiet_call(PINGER.server_options(), 3.0)


async def test_a_server_of_other_policy_kills_the_pinger() -> None:
    """The control of row 5."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await _quiet_call((), 10.0)
    assert "ping" in (failure.value.details() or "").lower()


@pytest.mark.slow
async def test_a_call_that_is_quiet_for_a_minute_survives_at_the_default_pace() -> None:
    await _quiet_call(Keepalive().server_options(), 60.0, Keepalive())


async def _outage(outage_s: float, options: tuple[Option, ...] | None = None) -> float:
    """Seconds until a reused channel works again after its peer was away for a while."""
    keepalive = Keepalive()
    async with running_node("a") as a:
        if options is not None:
            a.channels._options = options
        async with running_node("b", keepalive=keepalive) as b:
            assert (await a.exchange(b.address)).errors == {}
            address = b.address
        away_until = time.monotonic() + outage_s
        while time.monotonic() < away_until:
            assert (await a.exchange(address, timeout_s=1.0)).errors
            await asyncio.sleep(0.05)
        port = int(address.rpartition(":")[2])
        async with running_node("b", port=port, incarnation=2):
            back_mono = time.monotonic()
            while (await a.exchange(address, timeout_s=1.0)).errors:
                await asyncio.sleep(0.05)
            seconds = time.monotonic() - back_mono
            assert not a.registry.is_suspect("b")
            return seconds


async def test_a_peer_that_returns_is_used_again_within_seconds() -> None:
    """Row 30, scaled to an outage of 4 s."""
    assert await _outage(4.0) <= 6.0


@pytest.mark.slow
async def test_a_peer_that_returns_after_a_minute_is_used_again_within_seconds() -> None:
    """Row 30."""
    assert await _outage(60.0) <= 6.0


@pytest.mark.slow
async def test_with_the_default_backoff_the_return_is_noticed_late() -> None:
    """The control of row 30."""
    assert await _outage(60.0, message_options()) > 6.0


def _without(options: tuple[Option, ...], name: str) -> tuple[Option, ...]:
    return tuple(option for option in options if option[0] != name)


async def test_gossip_keeps_going_while_peers_come_and_go() -> None:
    """The loop outlives its peers: a round with a killed peer in it is a round."""
    async with child_node() as child, running_node("a") as a:
        gossip = a.gossip(child.address, interval_s=0.1, timeout_s=0.5)
        task = asyncio.create_task(gossip.run())
        try:
            await until(lambda: "child" in a.known())
            child.send(signal.SIGKILL)
            await until(lambda: a.registry.is_suspect("child"))
            rounds = gossip.stats.rounds
            await until(lambda: gossip.stats.rounds > rounds + 2)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
