"""The faults of the catalogue that befall a fleet in virtual time, in a random order.

A fault is named with the rows of the catalogue that it stands for. Of each hour the first part is
for faults, which may overlap, and each has ended when the quiet part begins.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc.aio

from benchmarks.virtual_fleet import VirtualFleet, VirtualNode, address_of, name_of, offer_of
from benchmarks.virtual_time import EPOCH
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import MAX_CARD_BYTES, Endpoint
from kakeya.fleet.cards.convert import join_cards, to_wire
from kakeya.fleet.gossip.round import EXCHANGE_METHOD, PUSH_METHOD, SYNC_METHOD
from kakeya.fleet.view.tombstones import RegistryState
from kakeya.v1 import distributed_pb2 as pb

FAULTS_S, HOUR_S = 2400.0, 3600.0
"""The part of an hour that has faults; the rest of it is quiet."""
LAST_S = (5.0, 600.0)
STRANGERS = 100
STRANGER = "stranger"
NOWHERE = "10.9.9.9:9"
"""The address from which hostile calls come; nothing listens there."""
UNDIALABLE = ("127.0.0.1:70000", "mini.local:50051", "10.0.0.1:0", "")
Edge = Callable[[str, str], bool]


class Trouble:
    """What is done to a fleet, and since when each node has been left alone.

    `tell(what)` gets a line for each fault. Everything is drawn from `seed`, so it repeats.
    """

    def __init__(self, fleet: VirtualFleet, seed: int, tell: Callable[[str], None]) -> None:
        self.done: Counter[str] = Counter()
        self.last_end = 0.0
        """Loop time at which the last fault ended."""
        self.copies: set[str] = set()
        """Ids that two processes have."""
        self.slept: dict[str, float] = {}
        """Loop time at which a node woke, and what it knew was older than it could tell."""
        self._fleet, self._seed, self._tell = fleet, seed, tell
        self._busy: set[str] = set()
        self._calm_at: dict[str, float] = {}
        self._all_calm_at = 0.0
        self._wide = 0
        self._cuts: list[Edge] = []
        self._slow: dict[str, float] = {}
        fleet.network.is_cut = self._is_cut
        fleet.network.lag_s = lambda a, b: self._slow.get(a, 0.0) + self._slow.get(b, 0.0)
        self.dialled: set[str] = set()
        self._kinds: dict[str, Callable[[random.Random, float], Awaitable[None]]] = {
            "killed (1, 30)": self._kill,
            "left (28)": self._leave,
            "hung (2, 3)": self._hang,
            "one-way edge (4, 6)": self._one_way,
            "partition (7)": self._partition,
            "first seed lost (8)": self._lose_seed,
            "clock skewed (9)": self._skew,
            "clock back or ahead (10, 11)": self._jump,
            "sleep (12)": self._sleep,
            "copied disk (13)": self._copy,
            "started without its state (15, 33)": self._amnesia,
            "old state, disk was full (32)": self._old_state,
            "poisoned cards (17, 19)": self._poison,
            "flood of strangers (18)": self._flood,
            "malformed or oversize (20, 21)": self._garbage,
            "slow peer (31)": self._slow_peer,
            "flapping link (1, 30)": self._flap,
            "messages lost": self._lose,
        }

    async def hour(self, number: int, faults: int) -> None:
        """Let an hour's faults happen; ends with the last one."""
        async with asyncio.TaskGroup() as group:
            for one in range(faults):
                group.create_task(self._fault(random.Random(f"{self._seed} {number} {one}")))

    async def _fault(self, rng: random.Random) -> None:
        kind = rng.choice(list(self._kinds))
        lasts_s = min(rng.uniform(*LAST_S), FAULTS_S / 2)
        # Half of them end together, so that the quiet begins with much to heal.
        latest_s = FAULTS_S - lasts_s
        await asyncio.sleep(rng.choice([latest_s, rng.uniform(0.0, latest_s)]))
        self._tell(f"{kind}, {lasts_s:.0f} s")
        self.done[kind] += 1
        await self._kinds[kind](rng, lasts_s)
        self.last_end = asyncio.get_running_loop().time()

    # --- which nodes are left alone

    def calm_since(self, name: str) -> float:
        """Loop time since which no fault has touched a node; inf while one does."""
        return float("inf") if name in self._busy else self._calm_at.get(name, 0.0)

    @property
    def all_calm_since(self) -> float:
        """Loop time since which no fault has touched all nodes; inf while one does."""
        return float("inf") if self._wide else self._all_calm_at

    @contextmanager
    def _victim(self, rng: random.Random, name: str = "") -> Iterator[VirtualNode | None]:
        """A node that has no other fault, for the length of one; None = there is none."""
        free = [n for n in self._fleet.up() if n.name not in self._busy and name in ("", n.name)]
        if not free or (len(free) == 1 and not name):
            yield None
            return
        node = rng.choice(free)
        self._busy.add(node.name)
        try:
            yield node
        finally:
            self._busy.discard(node.name)
            self._calm_at[node.name] = asyncio.get_running_loop().time()

    @contextmanager
    def _everywhere(self) -> Iterator[None]:
        self._wide += 1
        try:
            yield
        finally:
            self._wide -= 1
            self._all_calm_at = asyncio.get_running_loop().time()

    def _is_cut(self, source: str, target: str) -> bool:
        self.dialled.add(target)
        return any(cut(source, target) for cut in self._cuts)

    @contextmanager
    def _cut(self, edge: Edge) -> Iterator[None]:
        self._cuts.append(edge)
        try:
            yield
        finally:
            self._cuts.remove(edge)

    # --- processes

    async def _kill(self, rng: random.Random, lasts_s: float, name: str = "") -> None:
        with self._victim(rng, name) as node:
            if node:
                await node.kill()
                await asyncio.sleep(lasts_s)
                node.restart()

    async def _lose_seed(self, rng: random.Random, lasts_s: float) -> None:
        await self._kill(rng, lasts_s, name_of(0))

    async def _leave(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                await node.leave()
                await asyncio.sleep(lasts_s)
                node.restart()

    async def _hang(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                here = node.address
                with self._cut(lambda a, b: here in (a, b)):
                    await node.suspend()
                    await asyncio.sleep(lasts_s)
                    node.wake(slept_s=0.0)

    async def _sleep(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                await node.suspend()
                await asyncio.sleep(lasts_s)
                node.wake(slept_s=lasts_s)
                self.slept[node.name] = asyncio.get_running_loop().time()

    async def _amnesia(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                back_s = rng.choice([0.0, 3600.0])
                await node.kill()
                node.clock.skew_s -= back_s
                await asyncio.sleep(lasts_s)
                node.restart(RegistryState())
                await asyncio.sleep(LAST_S[0])
                node.clock.skew_s += back_s

    async def _old_state(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                written = node.memory()
                await asyncio.sleep(lasts_s / 2)
                if node.is_up:
                    await node.kill()
                    await asyncio.sleep(lasts_s / 2)
                    node.restart(written)

    async def _copy(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                self.copies.add(node.name)
                copy = VirtualNode(
                    self._fleet,
                    node.name,
                    clock=node.clock,
                    seeds=(address_of(name_of(0)),),
                    address=address_of(name_of(len(self._fleet.nodes) + self.done.total())),
                    memory=node.memory(),
                )
                copy.start()
                await asyncio.sleep(lasts_s)
                await copy.suspend()
                self.copies.discard(node.name)

    # --- clocks

    async def _skew(self, rng: random.Random, lasts_s: float) -> None:
        await self._set_clock(rng, lasts_s, (-119.0, -30.0, -1.0, 1.0, 30.0, 119.0))

    async def _jump(self, rng: random.Random, lasts_s: float) -> None:
        await self._set_clock(rng, lasts_s, (-3600.0, 3600.0, 365 * 86_400.0))

    async def _set_clock(self, rng: random.Random, lasts_s: float, by: Sequence[float]) -> None:
        with self._victim(rng) as node:
            if node:
                jump_s = rng.choice(by)
                node.clock.skew_s += jump_s
                await asyncio.sleep(lasts_s)
                node.clock.skew_s -= jump_s

    # --- edges

    async def _one_way(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as one, self._victim(rng) as other:
            if one and other:
                here, there = one.address, other.address
                with self._cut(lambda a, b: (a, b) == (here, there)):
                    await asyncio.sleep(lasts_s)

    async def _partition(self, rng: random.Random, lasts_s: float) -> None:
        nodes = list(self._fleet.nodes.values())
        left = {node.address for node in rng.sample(nodes, len(nodes) // 2)}
        with self._everywhere(), self._cut(lambda a, b: (a in left) != (b in left)):
            await asyncio.sleep(lasts_s)

    async def _flap(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                here, end = node.address, asyncio.get_running_loop().time() + lasts_s
                while asyncio.get_running_loop().time() < end:
                    with self._cut(lambda a, b: here in (a, b)):
                        await asyncio.sleep(rng.uniform(1.0, 20.0))
                    await asyncio.sleep(rng.uniform(1.0, 20.0))

    async def _slow_peer(self, rng: random.Random, lasts_s: float) -> None:
        with self._victim(rng) as node:
            if node:
                self._slow[node.address] = rng.choice([0.2, 2.0, 6.0])
                await asyncio.sleep(lasts_s)
                del self._slow[node.address]

    async def _lose(self, rng: random.Random, lasts_s: float) -> None:
        share = rng.uniform(0.05, 0.3)
        network = self._fleet.network
        with self._everywhere():
            network.loss += share
            await asyncio.sleep(lasts_s)
            network.loss -= share

    # --- hostile peers

    async def _poison(self, rng: random.Random, lasts_s: float) -> None:
        await self._say(rng, EXCHANGE_METHOD, join_cards(poisoned(rng)))

    async def _flood(self, rng: random.Random, lasts_s: float) -> None:
        now = EPOCH + asyncio.get_running_loop().time()
        names = [f"{STRANGER}-{rng.randrange(10**6)}" for _ in range(STRANGERS)]
        offer = offer_of(NOWHERE)
        cards = [to_wire(name, offer, incarnation=1, announced_at=now) for name in names]
        with self._everywhere():
            await self._say(rng, EXCHANGE_METHOD, join_cards(cards))
            await asyncio.sleep(lasts_s)

    async def _garbage(self, rng: random.Random, lasts_s: float) -> None:
        method = rng.choice([EXCHANGE_METHOD, SYNC_METHOD, PUSH_METHOD])
        await self._say(rng, method, rng.randbytes(rng.choice([1, 1000, 50_000])))
        await self._say(rng, method, bytes(5 * MIB))

    async def _say(self, rng: random.Random, method: str, message: bytes) -> None:
        target = rng.choice(self._fleet.up()).address
        # A typed refusal is an answer; whatever else a handler raises ends the soak.
        with suppress(grpc.aio.AioRpcError):
            await self._fleet.network.call(NOWHERE, target, method, message, 5.0)


def poisoned(rng: random.Random) -> Sequence[bytes]:
    """Cards that no node may take, in the names of members and of strangers."""
    member, ahead = name_of(rng.randrange(10)), EPOCH + 1e9
    offer = offer_of(NOWHERE)
    ways = [replace(offer, endpoints=(Endpoint(a, "lan", 1, 1.0),)) for a in UNDIALABLE]
    wires = [to_wire(STRANGER, way, incarnation=1, announced_at=ahead) for way in ways]
    stamps = (float("nan"), float("inf"), ahead)
    wires += [to_wire(member, offer, incarnation=1, announced_at=one) for one in stamps]
    named = ("", "x" * 300, "../x", "a\nb")
    wires += [to_wire(name, offer, incarnation=1, announced_at=EPOCH) for name in named]
    endless = replace(offer, ttl_s=float("nan"))
    long = pb.NodeCapability(node_id=member, platform="x" * 2 * MAX_CARD_BYTES)
    return [
        *wires,
        to_wire(member, endless, incarnation=1, announced_at=EPOCH),
        to_wire(member, offer, incarnation=2**60, announced_at=EPOCH),
        long.SerializeToString(),
        rng.randbytes(300),
    ]


def is_stranger(node_id: str) -> bool:
    """Whether a node is one of a flood."""
    return node_id.startswith(STRANGER)
