"""A shelf whose parts are lost all the time, and whose clients must not notice.

Three machines (network namespaces, so Linux and root) with a node each, one fleet with identities.
At the address of the first ask openai clients (text, tools, a JSON Schema, the answer behind a
tool), `claude -p` and `codex exec`, where scripts/agents has installed them. Engines of all
machines, and agents and links of the others, are killed, stopped, cut and restored at random, and
nodes are drained and replaced. Each request must end with the answer of the undisturbed shelf, or
be refused with a type and a time to come again.

With --ring the second and third machine pull a model's files from the first, and serve it as a ring
group; the answers must be those of one process. Ranks, agents and links of both are lost.

With --rolling four nodes on loopback serve 20 streaming clients and four gRPC sessions, each with
the addresses of all nodes; each node is drained and replaced in turn, by a node of the checkout
--other, and that of the other by one of this checkout. With --one-address all clients have the
address of the first node alone, and that one is replaced four times.

.venv/bin/python -m benchmarks.shelf_drill [--ring] [--minutes 10] [--seed N] [--keep FOLDER]
.venv/bin/python -m benchmarks.shelf_drill --rolling [--one-address] [--other CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

from benchmarks.failover import Streamed
from benchmarks.report import emit
from benchmarks.shelf_drill.clients import (
    Form,
    Tally,
    agent_loop,
    client_of,
    openai_loop,
    undisturbed,
)
from benchmarks.shelf_drill.faults import ENGINES, FLAGS, RING_FLAGS, Faults, start
from benchmarks.shelf_drill.rolling import roll
from kakeya.cli.child import NodeProcess
from kakeya.generation.spec import EMBEDDED_FOLDER
from scripts.agents import MODEL, RUNS
from tests import netns
from tests.node.test_routed_namespaces import get
from tests.node.test_three_namespaces import HTTP, Mini

_CLIENTS = 4
FILES = "shelf/tools"
"""What the files are called that are pulled: by another name than that of the shipped model."""
_LATE_S = 240.0
"""For the last answers, and the last machines to come back."""


async def found(minis: Sequence[Mini], flags: Sequence[str]) -> None:
    """Make one fleet of the machines."""
    front, *others = minis
    for mini in minis:
        mini.folder.mkdir()
    await asyncio.to_thread(front.kakeya, "init", "--label", front.label)
    await start(front, flags)
    for mini in others:
        token = (await asyncio.to_thread(front.kakeya, "invite"))["token"]
        await start(mini, flags, "--join", token)


async def offered(front: Mini, machines: int) -> None:
    """Wait until so many machines offer the model to the first."""
    async with asyncio.timeout(60):
        while True:
            nodes = (await asyncio.to_thread(get, front, "/api/v1/fleet"))["nodes"]
            if sum(MODEL in str(node["models"]) for node in nodes) == machines:
                return
            await asyncio.sleep(0.5)


async def drill(minis: Sequence[Mini], folder: Path, minutes: float, seed: int) -> Tally:
    """Run the clients and the faults; what became of the requests."""
    front, *others = minis
    await found(minis, FLAGS)
    await offered(front, len(minis))
    async with client_of(HTTP) as openai:
        known = await undisturbed(openai)
    faults, until = Faults(random.Random(seed), FLAGS), _in(minutes)
    work = [faults.trouble(front, until, kinds=ENGINES, rests_x=4.0)]
    work += [faults.trouble(mini, until) for mini in others]
    return await disturbed(front, known, faults, work, folder, minutes, seed)


async def ring_drill(minis: Sequence[Mini], folder: Path, minutes: float, seed: int) -> Tally:
    """The same with a group of two machines, which pull its files from the first."""
    front, *others = minis
    # The answers of one process are those that the group must give.
    async with NodeProcess(folder / "alone", "--model", MODEL) as alone:
        async with client_of(alone.http) as openai:
            known = await undisturbed(openai)
    await found(minis, RING_FLAGS)
    files = front.data / "models" / FILES
    await asyncio.to_thread(shutil.copytree, EMBEDDED_FOLDER / MODEL, files)
    for mini in others:
        await asyncio.to_thread(said, mini, "models", "pull", FILES)
    nodes = ",".join(mini.node_id for mini in others)
    named = ("--nodes", nodes, "--split", "tensor", "--name", MODEL)
    await asyncio.to_thread(said, front, "ring", "up", FILES, *named)
    await offered(front, 1)
    prompt = ("--prompt", "def main(argv):", "--max-tokens", "24")
    texts = [
        await asyncio.to_thread(said, mini, "generate", "--model", MODEL, *prompt) for mini in minis
    ]
    faults, until = Faults(random.Random(seed), RING_FLAGS), _in(minutes)
    leader, member = others
    work = [faults.trouble(leader, until, kinds=ENGINES, rests_x=4.0)]
    work.append(faults.trouble(member, until))
    tally = await disturbed(front, known, faults, work, folder, minutes, seed)
    tally.note("any node", "same" if len({*texts}) == 1 else "wrong", str(texts))
    await asyncio.to_thread(said, front, "ring", "status")
    await asyncio.to_thread(said, front, "ring", "down", MODEL)
    return tally


def said(mini: Mini, *arguments: str) -> str:
    """Run a command of `kakeya` on a machine, and print what it says."""
    program = ("-m", "kakeya.cli.main", *arguments, "--data-dir", str(mini.data))
    done = mini.machine.python(*program, limit_s=180)
    print(
        f"{mini.label}: kakeya {' '.join(arguments)}\n{done.stdout}{done.stderr[-2000:]}",
        flush=True,
    )
    if done.returncode:
        raise SystemExit(f"kakeya {arguments[0]} ended with {done.returncode}")
    return done.stdout


def _in(minutes: float) -> Callable[[], bool]:
    until = time.monotonic() + minutes * 60
    return lambda: time.monotonic() < until


async def disturbed(
    front: Mini,
    known: Mapping[str, tuple[Form, Streamed]],
    faults: Faults,
    work: Sequence[Coroutine[None, None, None]],
    folder: Path,
    minutes: float,
    seed: int,
) -> Tally:
    """What becomes of the requests of clients during that work."""
    for name, (_, whole) in known.items():
        print(f"{name}: {len(whole.moments)} pieces, {whole.ends}", flush=True)
    tally, goes_on = Tally(), _in(minutes)
    rngs = [random.Random(seed + 1 + number) for number in range(_CLIENTS)]
    clients = [openai_loop(HTTP, known, tally, goes_on, rng) for rng in rngs]
    programs = [name for name in ("claude-code", "codex") if RUNS[name].program.exists()]
    clients += [agent_loop(name, HTTP, folder, tally, goes_on) for name in programs]
    async with asyncio.timeout(minutes * 60 + _LATE_S):
        await asyncio.gather(*clients, *work)
    await asyncio.sleep(2)
    status = await asyncio.to_thread(get, front, "/api/v1/status")
    left = sum(one["running"] + one["waiting"] for one in status["clients"])
    if left:
        tally.note("left behind", "hung", f"{left} requests at the front node")
    print(f"faults: {faults.done.total()}, {dict(faults.done)}; routes: {status['routes']}")
    return tally


def chaos(folder: Path, minutes: float, seed: int, *, has_ring: bool) -> Tally:
    """The drill of three machines."""
    with netns.network(3) as machines:
        minis = [
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        ]
        with machines[0].entered():
            run = ring_drill if has_ring else drill
            return asyncio.run(run(minis, folder, minutes, seed))


def main() -> None:
    """Run a drill, and tell what its clients saw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--keep", type=Path, help="the logs of the nodes, in a new folder")
    parser.add_argument("--ring", action="store_true", help="a group of two serves all")
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
            tally = chaos(folder, options.minutes, options.seed, has_ring=options.ring)
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
