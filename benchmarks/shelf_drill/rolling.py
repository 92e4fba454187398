"""Nodes that are drained and replaced one after the other, under streaming clients.

A client has a list of the nodes' addresses, begins at its own, and goes to the next one where it is
refused or the port is closed; or all clients have the address of the first node alone, which is
replaced again and again. A request that was taken has to end with its answer. Sessions of gRPC go
on turn after turn, wherever they are.

The node that takes the place of another is started while that one is drained, and takes its port.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from benchmarks.failover import MODEL, QUICK, Streamed
from benchmarks.shelf_drill.clients import Form, Tally, ask, client_of, undisturbed
from benchmarks.shelf_drill.sessions import SessionLoop, undisturbed_turns
from kakeya.cli.child import NodeProcess
from kakeya.node.datadir import is_left

_NODES, _CLIENTS, _SESSIONS = 4, 20, 4
_BETWEEN_S = 5.0
_LOOK_S = 0.2


class RollingShelf:
    """Four nodes; every second one runs the other checkout."""

    def __init__(self, folder: Path, here: Path, other: Path) -> None:
        self._folder = folder
        self._checkouts = [here, other] * (_NODES // 2)
        self.nodes: list[NodeProcess] = []

    def make(self, number: int) -> NodeProcess:
        """A node of the checkout whose turn it is; it has the addresses of the one before."""
        flags = ["--node-id", f"node-{number}", "--model", MODEL, *QUICK]
        for peer in self.nodes[:1] if number else self.nodes[1:2]:
            flags += ["--peer", peer.grpc]
        if number < len(self.nodes):
            before = self.nodes[number]
            flags += ["--bind", before.grpc, "--http", before.http]
        program = [*self._run_in(self._checkouts[number]), "kakeya.node.daemon"]
        return NodeProcess(self._folder / str(number), *flags, program=program, stop_s=30.0)

    def _run_in(self, checkout: Path) -> list[str]:
        where = ("env", "-C", str(checkout), f"PYTHONPATH={checkout}")
        return [*where, sys.executable, "-m"]

    async def settled(self) -> None:
        """Wait until each node sees the model at all."""
        async with asyncio.timeout(90), httpx.AsyncClient(timeout=20) as client:
            while True:
                seen = []
                for node in self.nodes:
                    fleet = (await client.get(f"http://{node.http}/api/v1/fleet")).json()["nodes"]
                    seen.append(sum(MODEL in str(one["models"]) for one in fleet))
                if seen == [_NODES] * _NODES:
                    return
                await asyncio.sleep(0.5)

    async def replace(self, number: int) -> None:
        """Drain a node, and start one of the other checkout in its place meanwhile."""
        node, began = self.nodes[number], time.monotonic()
        data = self._folder / str(number) / "data"
        command = [*self._run_in(self._checkouts[number]), "kakeya.cli.main", "drain"]
        command += ["--until-replaced", "--data-dir", str(data)]
        child = await asyncio.create_subprocess_exec(*command)
        while not is_left(data) and child.returncode is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        self._checkouts[number] = self._checkouts[(number + 1) % _NODES]
        self.nodes[number] = fresh = self.make(number)
        starting = asyncio.create_task(fresh.__aenter__())
        if await child.wait():
            raise SystemExit(f"node {number} could not be drained: it runs a checkout without this")
        status, left_mono = await node.wait(), time.monotonic()
        await starting
        print(
            f"node {number}: drained in {left_mono - began:.1f} s, exit {status}; the next one "
            f"is ready {time.monotonic() - left_mono:.1f} s later",
            flush=True,
        )


async def _client(
    addresses: Sequence[str],
    known: Mapping[str, tuple[Form, Streamed]],
    tally: Tally,
    over: asyncio.Event,
    rng: random.Random,
) -> None:
    """Ask one thing after the other, each of the next address that takes it."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(one)) for one in addresses]
        while not over.is_set():
            name = rng.choice(list(known))
            for turn in itertools.count():
                pause_s = await ask(clients[turn % len(clients)], name, *known[name], tally)
                if pause_s is None:
                    break
                if turn % len(clients) == len(clients) - 1:
                    await asyncio.sleep(pause_s)


async def _watch_own_loop() -> None:
    """Tell each time that the drill itself stood still: its clients were as late."""
    while True:
        due = time.monotonic() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        if (late_s := time.monotonic() - due) > 1.0:
            print(f"{time.strftime('%T')} the drill stood still for {late_s:.1f} s", flush=True)


async def roll(folder: Path, other: Path, seed: int, *, has_one_address: bool) -> Tally:
    """Drain and replace each node once, or the first one as often; what became of the requests."""
    shelf, tally, over = RollingShelf(folder, Path.cwd(), other), Tally(), asyncio.Event()
    watching = asyncio.create_task(_watch_own_loop())
    try:
        for number in range(_NODES):
            node = shelf.make(number)
            await node.__aenter__()
            shelf.nodes.append(node)
        await shelf.settled()
        async with client_of(shelf.nodes[0].http) as openai:
            known = await undisturbed(openai)
        turns = await undisturbed_turns(shelf.nodes[0].grpc)
        addresses = [node.http for node in shelf.nodes]
        ports = [node.grpc for node in shelf.nodes]
        clients = []
        for own in range(_SESSIONS):
            told = ports[:1] if has_one_address else ports[own:] + ports[:own]
            loop = SessionLoop(told, turns, tally)
            clients.append(asyncio.create_task(loop.run(over)))
        for number in range(_CLIENTS):
            own = number % _NODES
            told = addresses[:1] if has_one_address else addresses[own:] + addresses[:own]
            rng = random.Random(seed + number)
            clients.append(asyncio.create_task(_client(told, known, tally, over, rng)))
        for number in range(_NODES):
            await asyncio.sleep(_BETWEEN_S)
            await shelf.replace(0 if has_one_address else number)
            await shelf.settled()
        await asyncio.sleep(_BETWEEN_S)
        over.set()
        await asyncio.gather(*clients)
    finally:
        watching.cancel()
        for node in shelf.nodes:
            await node.stop()
    return tally
