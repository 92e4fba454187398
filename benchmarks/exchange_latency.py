"""One exchange with another process over mTLS: idle, and while an engine computes flat out.

    .venv/bin/python -m benchmarks.exchange_latency

Ours is what a gossip round does: a reused channel, digests, and in one round of twelve every card
(`full_p99`); a goal is met when both keep it. The baseline opens a plain channel for each call and
sends every card through the typed stub. The load is a child process with two mlx threads, as two
engines are.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.fleet_cards import PaddedTrust, fleet_cards
from benchmarks.report import emit, percentile
from kakeya.core.clock import SystemClock
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.gossip.round import Exchanger
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.identity import load_identity, save_identity
from kakeya.fleet.identity.membership import FleetSecurity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import CapabilityServiceStub
from kakeya.wire.channels import Channels
from kakeya.wire.server.caller_limits import CallerLimits
from kakeya.wire.server.listeners import Listeners

CALLS = 100
TURNS = 5
FULL_EACH = 12
PAUSE_S = 0.005
GOALS_MS = {100: (5.0, 25.0), 1000: (50.0, 50.0)}
"""By cards, of the p99: idle, and beside engines that compute."""
LOAD = """
import threading
import mlx.core as mx
def work():
    a = mx.random.normal((512, 512))
    while True:
        mx.eval(a @ a)
threading.Thread(target=work, daemon=True).start()
work()
"""
_UNBOUNDED = CallerLimits(exchanges_per_s=1e6, exchange_burst=1e6)


def _registry(node_id: str) -> CapabilityRegistry:
    clock = SystemClock()
    offer = Offer(grpc_address="127.0.0.1:1")
    return CapabilityRegistry(
        node_id, offer, now=clock.wall(), mono=clock.mono(), trust=PaddedTrust()
    )


def _identity(folder: Path) -> FleetTrust:
    identity = load_identity(folder)
    if identity is None:
        raise SystemExit(f"exchange_latency: no identity in {folder}")
    return FleetTrust(identity)


async def serve(folder: Path) -> None:
    """Be the peer: print the encrypted address and the plain one, then answer."""
    clock, trust, known = SystemClock(), _identity(folder), _registry("peer")
    service = CapabilityService(known, Sync(known, rng=random.Random(1)), clock=clock)
    listeners = Listeners(
        lambda server: register(server, service),
        clock=clock,
        material=trust.material,
        trust=trust,
        callers=_UNBOUNDED,
    )
    tls = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    print(tls, await listeners.open_plain("127.0.0.1:0", flag="--bind"), flush=True)
    await listeners.start()
    await asyncio.Event().wait()


@contextmanager
def _child(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def _exchanger(cards: int, trust: FleetTrust) -> AsyncIterator[Exchanger]:
    clock, known = SystemClock(), _registry("bench")
    known.merge(fleet_cards(cards, clock.wall() - 10), now=clock.wall(), mono=clock.mono())
    security = FleetSecurity(trust, lambda address: "")
    channels = Channels(security=security, is_plain=lambda address: False)
    sync = Sync(known, rng=random.Random(2))
    try:
        yield Exchanger(known, sync, channels=channels, clock=clock)
    finally:
        await channels.aclose()


async def _ours_ms(exchanger: Exchanger, address: str, *, is_full: bool, calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        done = await exchanger.round((address,), (address,) if is_full else ())
        taken.append((time.perf_counter() - started) * 1e3)
        if done.errors:
            raise SystemExit(f"exchange_latency: {done.errors}")
        await asyncio.sleep(PAUSE_S)
    return taken


async def _baseline_ms(address: str, count: int) -> list[float]:
    cards = [pb.NodeCapability.FromString(wire) for wire in fleet_cards(count, time.time() - 10)]
    request = pb.ExchangeCapabilitiesRequest(known_nodes=cards)
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        async with grpc.aio.insecure_channel(address) as channel:
            await CapabilityServiceStub(channel).ExchangeCapabilities(request, timeout=5)
        taken.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(PAUSE_S)
    return taken


async def _measure(
    name: str, cards: int, goal_ms: float, tls: str, plain: str, trust: FleetTrust
) -> None:
    ours: list[float] = []
    full: list[float] = []
    baseline: list[float] = []
    async with _exchanger(cards, trust) as exchanger:
        await _ours_ms(exchanger, tls, is_full=False, calls=5)  # the peer learns the cards
        for _ in range(TURNS):
            ours += await _ours_ms(exchanger, tls, is_full=False, calls=CALLS)
            full += await _ours_ms(exchanger, tls, is_full=True, calls=CALLS // FULL_EACH)
            baseline += await _baseline_ms(plain, cards)
    p99, full_p99 = percentile(ours, 0.99), percentile(full, 0.99)
    emit(
        f"exchange of {cards} cards over mTLS, {name}, p99 ms",
        ours=p99,
        baseline=percentile(baseline, 0.99),
        ratio=p99 / percentile(baseline, 0.99),
        goal=f"<= {goal_ms:g} ms",
        met=max(p99, full_p99) <= goal_ms,
        p50=round(percentile(ours, 0.5), 2),
        full_p50=round(percentile(full, 0.5), 2),
        full_p99=round(full_p99, 2),
    )


def _run(folder: Path) -> None:
    first = new_fleet("bench", time.time())
    authority = authority_of(first)
    if authority is None:
        raise SystemExit("exchange_latency: a new fleet has no authority")
    save_identity(folder, authority.new_identity("peer", now=time.time()))
    command = (sys.executable, "-m", "benchmarks.exchange_latency", "serve", str(folder))
    with _child(*command) as peer:
        assert peer.stdout is not None
        tls, plain = peer.stdout.readline().split()
        trust = FleetTrust(first)
        for cards, (idle_ms, busy_ms) in GOALS_MS.items():  # the peer keeps what it learns
            asyncio.run(_measure("idle", cards, idle_ms, tls, plain, trust))
            with _child(sys.executable, "-c", LOAD):
                time.sleep(2.0)
                asyncio.run(_measure("engines busy", cards, busy_ms, tls, plain, trust))


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder))


if __name__ == "__main__":
    main()
