"""One exchange of 100 cards with another process: idle, and while an engine computes flat out.

Ours reuses one channel and moves bytes; the baseline opens a channel per call and uses the typed
stub. The load is a child process with one mlx thread, as an engine is.

    .venv/bin/python -m benchmarks.exchange_latency
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio

from benchmarks.fleet_cards import fleet_cards, registry
from benchmarks.report import emit, percentile
from kakeya.core.clock import SystemClock
from kakeya.fleet.exchange import exchange_once
from kakeya.fleet.service import add_capability_service
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import CapabilityServiceStub
from kakeya.wire.channels import Channels, Keepalive

CARDS = 100
CALLS = 200
PAUSE_S = 0.005
LOAD = """
import mlx.core as mx
a = mx.random.normal((512, 512))
while True:
    mx.eval(a @ a)
"""


async def serve() -> None:
    clock = SystemClock()
    server = grpc.aio.server(options=Keepalive().server_options())
    known = registry("peer", clock.wall())
    add_capability_service(server, known, clock=clock, rng=random.Random(1))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def _child(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def _ours_ms(address: str, channels: Channels) -> list[float]:
    clock, rng = SystemClock(), random.Random(2)
    known = registry("bench", clock.wall())
    known.merge(fleet_cards(CARDS, clock.wall() - 10), now=clock.wall(), mono=clock.mono())
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        done = await exchange_once(known, (address,), channels=channels, clock=clock, rng=rng)
        taken.append((time.perf_counter() - started) * 1e3)
        if done.errors:
            raise SystemExit(f"exchange_latency: {done.errors}")
        await asyncio.sleep(PAUSE_S)
    return taken


async def _baseline_ms(address: str) -> list[float]:
    wires = fleet_cards(CARDS, time.time() - 10)
    cards = [pb.NodeCapability.FromString(wire) for wire in wires]
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        async with grpc.aio.insecure_channel(address) as channel:
            request = pb.ExchangeCapabilitiesRequest(known_nodes=cards)
            await CapabilityServiceStub(channel).ExchangeCapabilities(request, timeout=5)
        taken.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(PAUSE_S)
    return taken


@asynccontextmanager
async def _channels() -> AsyncIterator[Channels]:
    channels = Channels()
    try:
        yield channels
    finally:
        await channels.aclose()


async def _measure(name: str, address: str, goal_ms: float) -> None:
    ours: list[float] = []
    baseline: list[float] = []
    async with _channels() as channels:
        for _ in range(5):
            ours += await _ours_ms(address, channels)
            baseline += await _baseline_ms(address)
    p99 = percentile(ours, 0.99)
    emit(
        f"exchange of {CARDS} cards, {name}, p99 ms",
        ours=p99,
        baseline=percentile(baseline, 0.99),
        ratio=p99 / percentile(baseline, 0.99),
        goal=f"<= {goal_ms:g} ms",
        met=p99 <= goal_ms,
        p50=round(percentile(ours, 0.5), 2),
    )


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
        return
    with _child(sys.executable, "-m", "benchmarks.exchange_latency", "serve") as peer:
        assert peer.stdout is not None
        address = f"127.0.0.1:{int(peer.stdout.readline())}"
        asyncio.run(_measure("idle", address, 5.0))
        with _child(sys.executable, "-c", LOAD):
            time.sleep(2.0)
            asyncio.run(_measure("engine busy", address, 25.0))


if __name__ == "__main__":
    main()
