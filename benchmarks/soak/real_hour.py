"""An hour of faults on three real nodes under traffic: three network namespaces, one fleet with
identities, and clients at the first machine whose answers are all compared.

mini-1   engine killed or stopped, hostile connections, damaged files of its cache; its agent lasts
mini-2   everything: agent and engine killed and stopped, links cut and silent, drained
mini-3   its agent and engine last: both are stopped, its links are cut
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchmarks.shelf_drill.__main__ import found, offered
from benchmarks.shelf_drill.clients import (
    HUNG_S,
    Known,
    Tally,
    client_of,
    openai_loop,
    undisturbed,
)
from benchmarks.shelf_drill.faults import ENGINES, FLAGS, Faults
from benchmarks.soak.samples import Samples, status_of
from benchmarks.soak.slopes import Verdict, none_of
from tests import netns
from tests.node.soak_sight import spoil
from tests.node.test_routed_namespaces import get
from tests.node.test_three_namespaces import HTTP, Mini

CLIENTS, REST_S = 2, 4.0
FILL, FILL_AT_ONCE, FILL_S = 3000, 8, 600.0
"""Requests, and the longest time for them, after which what a node keeps of requests has reached
its bounds: in an hour of few requests it would pass for growth."""
RESTS_X = 4.0
TABLE_S = 60.0
QUIET_S = 90.0
"""In which all must be as before the faults, once they have ended."""
LASTING = ("engine stopped", "agent stopped", "cable pulled", "link silent")
Tell = Callable[[str], None]
Keep = Callable[[Sequence[Verdict]], None]


class Hostilities(Faults):
    """The faults of the drill, and what strangers and disks do."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, FLAGS)
        self._chance = rng
        self.kinds |= {
            "garbage sent": self._garbage,
            "silent connections": self._silent,
            "cache damaged": self._damage,
        }

    async def _garbage(self, mini: Mini) -> None:
        for port in (mini.address, HTTP):
            async with _connection(port) as writer:
                writer.write(self._chance.randbytes(200_000))

    async def _silent(self, mini: Mini) -> None:
        held = [_connection(mini.address) for _ in range(50)]
        with suppress(OSError):
            for one in held:
                await one.__aenter__()
            await asyncio.sleep(self._chance.uniform(1.0, 20.0))
        for one in held:
            with suppress(OSError, RuntimeError, AttributeError):
                await one.__aexit__(None, None, None)

    async def _damage(self, mini: Mini) -> None:
        await asyncio.to_thread(spoil, mini.data, self._chance)


@asynccontextmanager
async def _connection(address: str) -> AsyncIterator[asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        yield writer
    finally:
        writer.close()


async def run_hour(
    minis: Sequence[Mini], folder: Path, minutes: float, seed: int, tell: Tell, keep: Keep
) -> list[Verdict]:
    """Run the fleet, its clients and its faults; the rows of the table, which `keep` gets each
    minute."""
    front, mortal, lasting = minis
    await found(minis, FLAGS)
    await offered(front, len(minis))
    async with client_of(HTTP) as openai:
        known = await undisturbed(openai)
    tell(f"the undisturbed answers: {', '.join(known)}")
    faults, rng = Hostilities(random.Random(seed)), random.Random(seed + 1)
    tally = Tally()
    await _fill(known, tally, rng)
    tell(f"{tally.count()} requests before the first fault")
    samples = Samples(folder / "samples.jsonl")
    until = time.monotonic() + minutes * 60

    def goes_on() -> bool:
        return time.monotonic() < until

    at_front = (*ENGINES, "garbage sent", "silent connections", "cache damaged")
    clients = [
        openai_loop(HTTP, known, tally, goes_on, random.Random(rng.random()), rest_s=REST_S)
        for _ in range(CLIENTS)
    ]
    trouble = [
        faults.trouble(front, goes_on, kinds=at_front, rests_x=RESTS_X),
        faults.trouble(mortal, goes_on, rests_x=RESTS_X),
        faults.trouble(lasting, goes_on, kinds=LASTING, rests_x=RESTS_X),
    ]
    crashed: list[str] = []
    watches = [asyncio.create_task(samples.watch(mini)) for mini in minis]

    def rows() -> list[Verdict]:
        return [
            *_outcome(tally),
            none_of("real: status adds up", samples.problems),
            *samples.verdicts(),
            none_of("real: the soak itself", crashed),
        ]

    async def keep_table() -> None:
        while True:
            await asyncio.sleep(TABLE_S)
            await asyncio.to_thread(keep, rows())

    watches.append(asyncio.create_task(keep_table()))
    try:
        async with asyncio.timeout(minutes * 60 + 2 * HUNG_S):
            await asyncio.gather(*clients, *trouble)
        ill = await _illness(minis)
    except Exception:  # noqa: BLE001 - what was seen until then is told all the same
        crashed.append(" ".join(traceback.format_exc().split())[-600:])
        ill = []
    for watch in watches:
        watch.cancel()
    done = await asyncio.gather(*watches, return_exceptions=True)
    crashed += [repr(one) for one in done if isinstance(one, Exception)]
    tell(f"{faults.done.total()} faults: {dict(faults.done)}; refusals {dict(tally.refusals)}")
    tell(f"{samples.unanswered} samples without a status: the agent was down or stopped")
    logs = [mini.label for mini in minis if "Traceback" in (mini.folder / "node.log").read_text()]
    return [
        *rows(),
        none_of("real: well again after the faults", ill),
        none_of("real: tracebacks in logs", logs),
    ]


async def _fill(known: Known, tally: Tally, rng: random.Random) -> None:
    until = time.monotonic() + FILL_S

    def goes_on() -> bool:
        return tally.count() < FILL and time.monotonic() < until

    many = [random.Random(rng.random()) for _ in range(FILL_AT_ONCE)]
    await asyncio.gather(*(openai_loop(HTTP, known, tally, goes_on, one, rest_s=0) for one in many))


def _outcome(tally: Tally) -> list[Verdict]:
    good, total = tally.count("same", "refused"), tally.count()
    ends: Counter[str] = sum(tally.ends.values(), Counter())
    return [
        Verdict(
            what="real: the undisturbed answer, or another try",
            seen=f"{good} of {total}: {dict(ends)}",
            goal="all, some the same",
            is_met=good == total and ends["same"] > 0,
        ),
        none_of("real: other ends", tally.problems),
    ]


async def _illness(minis: Sequence[Mini]) -> list[str]:
    """What is not as before the faults, once there was time to mend."""
    until = time.monotonic() + QUIET_S
    while True:
        ill = [one for mini in minis for one in await asyncio.to_thread(_ill, mini, len(minis))]
        if not ill or time.monotonic() > until:
            return ill
        await asyncio.sleep(2.0)


def _ill(mini: Mini, count: int) -> list[str]:
    status = status_of(mini)
    if not status:
        return [f"{mini.label} does not answer"]
    waits = sum(one["running"] + one["waiting"] for one in status["clients"])
    leases = sum(one["leases"] for one in status["memory"]["residents"])
    states = [one["state"] for one in status["models"]]
    pinned = status["adapters"]["pages"]["pinned"]
    nodes = get(mini, "/api/v1/fleet")["nodes"]
    trusted = sum(not node["is_suspect"] for node in nodes)
    checks = {
        f"{waits} requests are left": waits == 0,
        f"{leases} leases are left": leases == 0,
        f"models are {states}": set(states) <= {"ready", "idle"},
        f"{pinned} pages are pinned": pinned == 0,
        f"{len(nodes)} nodes are seen, {trusted} trusted": len(nodes) == trusted == count,
    }
    return [f"{mini.label}: {what}" for what, is_so in checks.items() if not is_so]


def real_hour(folder: Path, minutes: float, seed: int, tell: Tell, keep: Keep) -> list[Verdict]:
    """Run it in namespaces of its own. Needs Linux and root."""
    if reason := netns.why_not():
        raise SystemExit(f"soak: {reason}; --minutes 0 runs the virtual day alone")
    with netns.network(3) as machines:
        minis = [
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        ]
        with machines[0].entered():
            return asyncio.run(run_hour(minis, folder, minutes, seed, tell, keep))
