"""A shelf whose parts are lost all the time, and whose clients must not notice.

Three machines (network namespaces, so Linux and root) with a node each, one fleet with identities.
At the address of the first ask openai clients (text, tools, a JSON Schema, the answer behind a
tool), `claude -p` and `codex exec`, where scripts/agents has installed them. Engines of all
machines, and agents and links of the others, are killed, stopped, cut and restored at random, and
nodes are drained and replaced. Each request must end with the answer of the undisturbed shelf, or
be refused with a type and a time to come again.

With --rolling four nodes on loopback serve 20 streaming clients and four gRPC sessions, each with
the addresses of all nodes; each node is drained and replaced in turn, by a node of the checkout
--other, and that of the other by one of this checkout. With --one-address all clients have the
address of the first node alone, and that one is replaced four times.

.venv/bin/python -m benchmarks.shelf_drill [--minutes 10] [--seed N] [--keep FOLDER]
.venv/bin/python -m benchmarks.shelf_drill --rolling [--one-address] [--other CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import emit
from benchmarks.shelf_drill.clients import Tally, agent_loop, client_of, openai_loop, undisturbed
from benchmarks.shelf_drill.faults import Faults, start
from benchmarks.shelf_drill.rolling import roll
from scripts.agents import MODEL, RUNS
from tests import netns
from tests.node.test_routed_namespaces import get
from tests.node.test_three_namespaces import HTTP, Mini

_CLIENTS = 4
_LATE_S = 240.0
"""For the last answers, and the last machines to come back."""


async def found(minis: Sequence[Mini]) -> None:
    """Make one fleet of the machines, and wait until each offers the model to the first."""
    front, *others = minis
    for mini in minis:
        mini.folder.mkdir()
    await asyncio.to_thread(front.kakeya, "init", "--label", front.label)
    await start(front)
    for mini in others:
        await start(mini, "--join", (await asyncio.to_thread(front.kakeya, "invite"))["token"])
    async with asyncio.timeout(60):
        while True:
            nodes = (await asyncio.to_thread(get, front, "/api/v1/fleet"))["nodes"]
            if sum(MODEL in str(node["models"]) for node in nodes) == len(minis):
                return
            await asyncio.sleep(0.5)


async def drill(minis: Sequence[Mini], folder: Path, minutes: float, seed: int) -> Tally:
    """Run the clients and the faults; what became of the requests."""
    front, *others = minis
    await found(minis)
    async with client_of(HTTP) as openai:
        known = await undisturbed(openai)
    for name, (_, whole) in known.items():
        print(f"{name}: {len(whole.moments)} pieces, {whole.ends}", flush=True)
    tally, faults = Tally(), Faults(random.Random(seed))
    until = time.monotonic() + minutes * 60

    def goes_on() -> bool:
        return time.monotonic() < until

    rngs = [random.Random(seed + 1 + number) for number in range(_CLIENTS)]
    work = [openai_loop(HTTP, known, tally, goes_on, rng) for rng in rngs]
    programs = [name for name in ("claude-code", "codex") if RUNS[name].program.exists()]
    work += [agent_loop(name, HTTP, folder, tally, goes_on) for name in programs]
    work.append(faults.trouble(front, goes_on, engines=True))
    work += [faults.trouble(mini, goes_on, engines=False) for mini in others]
    async with asyncio.timeout(minutes * 60 + _LATE_S):
        await asyncio.gather(*work)
    await asyncio.sleep(2)
    status = await asyncio.to_thread(get, front, "/api/v1/status")
    left = sum(one["running"] + one["waiting"] for one in status["clients"])
    if left:
        tally.note("left behind", "hung", f"{left} requests at the front node")
    print(f"faults: {faults.done.total()}, {dict(faults.done)}; routes: {status['routes']}")
    return tally


def chaos(folder: Path, minutes: float, seed: int) -> Tally:
    """The drill of three machines."""
    with netns.network(3) as machines:
        minis = [
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        ]
        with machines[0].entered():
            return asyncio.run(drill(minis, folder, minutes, seed))


def main() -> None:
    """Run a drill, and tell what its clients saw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--keep", type=Path, help="the logs of the nodes, in a new folder")
    parser.add_argument("--rolling", action="store_true", help="drain and replace four nodes")
    parser.add_argument("--one-address", action="store_true", help="of the first node, to all")
    parser.add_argument("--other", type=Path, default=Path.cwd(), help="checkout, for --rolling")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.keep:
        options.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kk-shelf-") as temporary:
        folder = options.keep or Path(temporary)
        if options.rolling:
            rolled = roll(folder, options.other, options.seed, has_one_address=options.one_address)
            tally = asyncio.run(rolled)
        elif reason := netns.why_not():
            raise SystemExit(f"benchmarks.shelf_drill: {reason}")
        else:
            tally = chaos(folder, options.minutes, options.seed)
    tally.show()
    good, total = tally.count("same", "refused"), tally.count()
    emit(
        "requests with the undisturbed answer, or refused for another try",
        ours=good,
        baseline=total,
        ratio=good / max(1, total),
        goal="all",
        met=good == total,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
