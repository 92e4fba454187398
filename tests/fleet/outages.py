"""Peers that die, hang, fall silent and return, for tests and for `benchmarks.detection`.

Real processes and real sockets; seconds are those of a wall.
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
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio

from kakeya.fleet.liveness.probing import ProbeConfig
from kakeya.wire.channels import Keepalive, Option
from tests.fleet.nodes import running_node, verifier
from tests.fleet.probers import Probing, probing_node
from tests.fleet.proxy import running_proxy
from tests.waiting import until

HOLD = "/test.Stream/Hold"


@contextlib.asynccontextmanager
async def child_node(node_id: str = "child") -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fleet.child_node", node_id, "2", "1", stdout=PIPE
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Child(process, line.decode().strip())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


class Child:
    def __init__(self, process: Process, address: str) -> None:
        self.process, self.address = process, address

    def send(self, number: signal.Signals) -> float:
        os.kill(self.process.pid, number)
        return time.monotonic()


async def hold(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    call = channel.unary_stream(HOLD)(b"", timeout=120)
    assert await call.read() == b"first"
    return call


async def end_of(call: grpc.aio.UnaryStreamCall, since_mono: float) -> tuple[float, object]:
    """Seconds until the stream broke, and its status."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as failure:
        return time.monotonic() - since_mono, failure.code()
    raise AssertionError("the stream went on")


@contextlib.asynccontextmanager
async def fleet_of(
    count: int, child: Child, *, config: ProbeConfig | None = None, **options: object
) -> AsyncIterator[list[Probing]]:
    """Nodes at the default pace that know each other and the child; all gossip."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                probing_node(
                    f"n{i:02}",
                    models=[verifier("m")],
                    config=config or ProbeConfig(),
                    **options,  # type: ignore[arg-type]
                )
            )
            for i in range(count)
        ]
        await nodes[0].node.exchange(child.address)
        wire = nodes[0].node.card_of("child").wire
        for one in nodes:
            one.learn(*(other.node for other in nodes if other is not one))
            one.node.merge(wire)
            one.gossip.start(one.supervisor)
        await until(lambda: all(one.gossip.stats.rounds for one in nodes))
        yield nodes


def suspecting(nodes: list[Probing]) -> int:
    return sum("child" in one.suspects for one in nodes)


def without(options: tuple[Option, ...], name: str) -> tuple[Option, ...]:
    return tuple(option for option in options if option[0] != name)


@dataclass
class Cut:
    """Seconds until either end of a stream noticed that its wire swallows everything."""

    client_s: float
    server_s: float
    code: object


async def cut_stream(keepalive: Keepalive) -> Cut:
    ended = asyncio.Event()

    async def silent(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = grpc.method_handlers_generic_handler(
        "test.Stream", {"Hold": grpc.unary_stream_rpc_method_handler(silent)}
    )
    async with running_node("b", keepalive=keepalive, handlers=(handler,)) as b:
        async with running_proxy(b.address) as proxy, running_node("a", keepalive=keepalive) as a:
            call = await hold(a.channels.get(proxy.address))
            proxy.is_blackhole = True
            cut_mono = time.monotonic()
            client_s, code = await end_of(call, cut_mono)
            await asyncio.wait_for(ended.wait(), keepalive.interval_s + keepalive.timeout_s + 10)
            return Cut(client_s, time.monotonic() - cut_mono, code)


async def seconds_to_return(outage_s: float, options: tuple[Option, ...] | None = None) -> float:
    """Seconds until a reused channel works again after its peer was away for a while.

    The peer returns at the worst moment: after an attempt to connect, with the whole pause before
    the next one to go.
    """
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
        tried = asyncio.Event()
        async with await asyncio.start_server(partial(_refuse, tried), "127.0.0.1", port):
            while not tried.is_set():
                assert (await a.exchange(address, timeout_s=1.0)).errors
                await asyncio.sleep(0.05)
        async with running_node("b", port=port, incarnation=2):
            back_mono = time.monotonic()
            while (await a.exchange(address, timeout_s=1.0)).errors:
                await asyncio.sleep(0.05)
            seconds = time.monotonic() - back_mono
            assert not a.registry.is_suspect("b")
            return seconds


def _refuse(
    told: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    told.set()
    writer.close()
