"""A node's listeners, registry and gossip services in a process of its own, which can be weighed.

Run with a data directory that holds an identity, and the idle time of a connection; says its plain
and its encrypted address on one line. For each line on standard input it answers one line of JSON:
what it holds, and what that costs. The line `mark` forgets the worst stall so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

from kakeya.core.clock import SystemClock
from kakeya.core.garbage import spare_what_is_there
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.identity import load_identity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.server.caller_limits import CallerLimits
from kakeya.wire.server.listeners import Listeners, NetworkLimits
from tests.fleet.nodes import make_registry

TICK_S = 0.002


class LoopMeter:
    """How long the loop computed without looking up: its thread's own CPU time between two ticks.

    Not wall time, so that a busy machine does not count as a blocked loop.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, time.thread_time() - began)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Of this program: `ru_maxrss` would be that of the process that started it, if larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def weigh(registry: CapabilityRegistry, service: CapabilityService, meter: LoopMeter) -> str:
    return json.dumps(
        {
            "rss": resident_bytes(),
            "peak": peak_bytes(),
            "worst_stall_s": meter.worst_s,
            "nodes": len(registry.snapshot(mono=time.monotonic())),
            "exchanges": service.stats.exchanges,
            "refused": service.stats.refused,
        }
    )


async def main(folder: Path, idle_s: float) -> None:
    spare_what_is_there()  # as a node does
    clock = SystemClock()
    registry = make_registry("me", now=clock.wall(), mono=clock.mono(), address="127.0.0.1:1")
    service = CapabilityService(registry, Sync(registry, rng=random.Random(1)), clock=clock)
    identity = load_identity(folder)
    assert identity is not None
    trust = FleetTrust(identity)
    listeners = Listeners(
        lambda server: register(server, service),
        clock=clock,
        material=trust.material,
        trust=trust,
        network=NetworkLimits(handshake_s=3.0, idle_s=idle_s),
        # Tests time an honest caller by asking much faster than a node does.
        callers=CallerLimits(gossip_per_s=1000.0, gossip_burst=1000.0),
    )
    plain = await listeners.open_plain("127.0.0.1:0", flag="--bind")
    tls = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    await listeners.start()
    meter = LoopMeter()
    metering = asyncio.create_task(meter.run())
    print(plain, tls, flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line == "mark":
            meter.worst_s = 0.0
        print(weigh(registry, service, meter), flush=True)
    metering.cancel()
    await listeners.stop(None)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
