"""The ranks that this node has of groups that other nodes lead: their memory, and their processes.

lent      the arbiter lends the bytes of the share, as it does for a model; idle models go
started   the process of the rank is a child of this node, and reads its own copy of the weights
over      when the call that asked for the rank ends, in whatever way: the process is ended, and
          then the memory is given back
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kakeya.backends.engine.escalation import EndIt, EngineSight, Escalation, KillIt
from kakeya.backends.engine.process import EngineProcess, SocketFolder
from kakeya.backends.engines import EngineCommand
from kakeya.backends.ring import weights
from kakeya.backends.ring.spec import RingSpec
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    KakeyaError,
    MemoryRefused,
    NotFound,
    PeerUnavailable,
    Unsupported,
)
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.fleet.cards.names import short_id
from kakeya.fleet.placement.ring import ring_name
from kakeya.generation.progress import LoadProgress
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.resident import Role, RolePriority, Warmth

_log = logging.getLogger(__name__)
CAPABILITY = "ring-rank"
RANK = Role(
    name=CAPABILITY,
    priority=RolePriority(95),
    eviction="not evicted: it ends with its ring group",
    places=None,
    stay_warm_s=0.0,
    is_lent=True,
)
LEASE_S = 30.0
"""How long a rank waits for models in use that have to make room for it."""
_GRACE_S = 0.5
_SEEN_S = 0.2
"""The end of a process is seen a moment behind it, when its group may be ending for it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """A rank that another node asks for."""

    spec: RingSpec
    rank: int
    leader: str

    @property
    def key(self) -> str:
        """Its name at this node."""
        return f"{self.spec.name}#{self.rank}"


class HostedRank:
    """A rank with its memory."""

    def __init__(self, order: RankOrder, folder: Path, size: int, sockets: SocketFolder) -> None:
        self.order = order
        self.folder = folder
        self.bytes = size
        self.sockets = sockets
        self.starting = asyncio.Lock()
        self.group_id = ""
        """Of the ring, once it is started."""
        self.progress: LoadProgress | None = None
        self.process: EngineProcess | None = None
        self.over = asyncio.Event()
        """Set when its memory was given back."""
        self.leaves = asyncio.Event()
        self._news: asyncio.Queue[None] = asyncio.Queue(1)
        self._port = socket.socket()
        # Held until the process takes it: no other rank of this node is given the same one.
        self._port.bind(("", 0))
        self.port = int(self._port.getsockname()[1])

    def free_port(self) -> None:
        """Let the process have the port."""
        self._port.close()

    def heard(self, progress: LoadProgress) -> None:
        """Note how far its load is."""
        self.progress = progress
        self.poke()

    def poke(self) -> None:
        """Have `reports` look."""
        if self._news.empty():
            self._news.put_nowait(None)

    async def reports(self) -> AsyncGenerator[LoadProgress, None]:
        """The progress of its load as it comes, until it leaves. Raises PeerUnavailable at the end
        of its process."""
        told: LoadProgress | None = None
        while True:
            await self._news.get()
            if self.progress is not None and self.progress is not told:
                told = self.progress
                yield told
            leaves = self.leaves.is_set()
            patience_s = _SEEN_S if leaves else 0.0
            if self.process is not None and await self.process.has_exited_within(patience_s):
                ended = await self.process.exited()
                # A rank whose rank 0 is gone ends itself: only a kill is a fault of its own then.
                if not leaves or ended.returncode < 0:
                    raise PeerUnavailable(f"rank {self.order.rank} ended by {ended.describe()}")
            if leaves:
                return

    def status(self) -> Json:
        """For people and programs."""
        return {
            "group": self.order.spec.name,
            "rank": self.order.rank,
            "leader": self.order.leader,
            "memory_mb": self.bytes // MIB,
            "pid": self.process.pid if self.process else None,
            "load": self.progress.describe() if self.progress else "",
        }


class RankHost:
    """See the module. `on_change` is called when the ranks here have changed."""

    def __init__(
        self,
        arbiter: MemoryArbiter,
        own: weights.OwnWeights,
        command: EngineCommand,
        sockets: Path | None,
        *,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self.own = own
        self._command = command
        self._sockets = sockets
        self._on_change = on_change
        self._sizes: dict[str, int] = {}
        self._ranks: dict[str, HostedRank] = {}
        self._ways: dict[str, Escalation] = {}
        """By rank, over its successive processes: ends of one that outgrows its lease are rare."""
        arbiter.register(
            Capability(
                name=CAPABILITY,
                role=RANK,
                handler=_RankHandler(self._sizes),
                estimate=self._estimate,
                warmth=Warmth(is_pinned=True),
            )
        )

    @property
    def ranks(self) -> tuple[HostedRank, ...]:
        """Those that have their memory."""
        return tuple(self._ranks.values())

    def find(self, name: str, rank: int) -> HostedRank:
        """A rank here. Raises NotFound."""
        found = self._ranks.get(f"{name}#{rank}")
        if found is None:
            raise NotFound(f"{self.own.label()} has no rank {rank} of a ring group {name[:80]!r}")
        return found

    @asynccontextmanager
    async def lent(self, order: RankOrder) -> AsyncIterator[HostedRank]:
        """A rank with its memory, while its group lasts.

        Raises ConfigError without the weights, Conflict for the rank of another leader and for one
        that is being lent, MemoryRefused.
        """
        folder = await asyncio.to_thread(self.own.folder, order.spec)
        whole = await asyncio.to_thread(weights.estimate_of, folder)
        size = weights.rank_size(order.spec, order.rank, whole).bytes
        await self._replace(order)
        async with AsyncExitStack() as stack:
            self._sizes[order.key] = size  # nothing is awaited since it was found free
            stack.callback(self._forget, order.key)
            sockets = await stack.enter_async_context(SocketFolder.lent(self._sockets))
            await self._lease(stack, order)
            rank = self._ranks[order.key] = HostedRank(order, folder, size, sockets)
            event(
                _log, "rank leased", rank=order.key, leader=short_id(order.leader), mb=size // MIB
            )
            try:
                yield rank
            finally:
                await _end(rank)

    async def start(self, name: str, rank: int, hosts: str) -> None:
        """Start the process of a rank. Raises NotFound, Conflict, ConfigError."""
        found = self.find(name, rank)
        async with found.starting:
            if found.group_id or found.leaves.is_set():
                raise Conflict(f"rank {rank} of {name} was started already, or ends")
            found.group_id = ring_name(hosts)
            environ = await asyncio.to_thread(rank_environ, found.sockets.path, rank, hosts)
            model = found.order.spec.model()
            bound = ("--memory-bytes", str(found.bytes))
            command = self._command(replace(model, ring=(*model.ring, *bound)), str(found.folder))
            found.free_port()
            socket = found.sockets.next_socket()
            found.process = await EngineProcess.start(
                found.order.key, command, socket, environ, found.heard
            )
            found.process.on_exit(found.poke)
        self._on_change()

    async def end(self, name: str, rank: int) -> None:
        """End a rank, and return when its memory was given back. Raises NotFound."""
        found = self.find(name, rank)
        found.leaves.set()
        found.poke()
        await found.over.wait()

    def end_all(self) -> None:
        """End all ranks: this node stops."""
        for rank in self.ranks:
            rank.leaves.set()
            rank.poke()

    def measure(self) -> None:
        """Tell the arbiter how much of the lent bytes ranks use."""
        for rank in self.ranks:
            if rank.process is None or rank.process.has_exited:
                continue
            if used := resident_bytes(rank.process.pid):
                size = max(rank.bytes, used)
                self._arbiter.measure(CAPABILITY, rank.order.key, size, size - used)
                self._bound(rank, rank.process, used)

    def _bound(self, rank: HostedRank, process: EngineProcess, used: int) -> None:
        """End a rank far above its lease and what the budget leaves beside that, as an engine that
        does not shrink; its group forms again."""
        allowed = max(rank.bytes, used + self._arbiter.status().free_bytes)
        sight = EngineSight(child=process.pid, resident_bytes=used, lease_bytes=allowed, running=0)
        way = self._ways.setdefault(rank.order.key, Escalation())
        step = way.see(sight, self._clock.mono())
        if isinstance(step, EndIt | KillIt):
            event(_log, "rank ended", level=logging.WARNING, rank=rank.order.key, why=step.reason)
            process.kill(step.reason)

    async def _replace(self, order: RankOrder) -> None:
        """End the same rank of a call that is not known to be over yet."""
        name = order.spec.name
        while (known := self._ranks.get(order.key)) is not None:
            if known.order.leader != order.leader:
                raise Conflict(
                    f"{self.own.label()} has a rank {order.rank} of {name} already, in the group "
                    f"that {known.order.leader} leads"
                )
            await self.end(name, order.rank)
        if order.key in self._sizes:
            raise Conflict(
                f"{self.own.label()} finds memory for a rank {order.rank} of a group {name} just "
                "now; ask again, or give the group another --name"
            )

    async def _lease(self, stack: AsyncExitStack, order: RankOrder) -> None:
        self._arbiter.unlearn(CAPABILITY, order.key)  # this share may be another one
        terms = Terms(timeout_s=LEASE_S, warmth=Warmth(is_pinned=True), may_displace_text=True)
        try:
            await stack.enter_async_context(self._arbiter.acquire(CAPABILITY, order.key, terms))
        except (MemoryRefused, DeadlineExceeded) as no:
            size = self._sizes[order.key]
            raise lends_not(self.own.label(), order.rank, size, self._arbiter, no) from no

    def _forget(self, key: str) -> None:
        with contextlib.suppress(NotFound, Conflict):
            self._arbiter.unload(CAPABILITY, key)
        self._sizes.pop(key, None)
        if rank := self._ranks.pop(key, None):
            rank.over.set()
            event(_log, "rank over, its memory is given back", rank=key)
            self._on_change()

    def _estimate(self, key: str) -> int:
        if key not in self._sizes:
            raise NotFound(f"{key} is no rank of this node")
        return self._sizes[key]


class _RankHandler:
    """A rank is loaded by being lent its bytes; nothing is run."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    async def load(self, model_key: str) -> Loaded:
        size = self._sizes[model_key]
        return Loaded(backend=model_key, measured_bytes=size, unfilled_bytes=size)

    async def unload(self, model_key: str, backend: object) -> None:
        del model_key, backend

    async def run(self, backend: object, payload: object) -> object:
        raise Unsupported(f"rank {backend} runs nothing; {payload!r} was asked of it")


def lends_not(
    label: str, rank: int, size: int, arbiter: MemoryArbiter, why: KakeyaError
) -> MemoryRefused:
    """Make the error of a node that has no memory for a rank."""
    seen = arbiter.status()
    return MemoryRefused(
        f"{label} lends rank {rank} no {size // MIB} MB: {max(0, seen.free_bytes) // MIB} MB of "
        f"{seen.budget_bytes // MIB} MB are free ({why.message})",
        retry_after_s=why.retry_after_s,
    )


async def _end(rank: HostedRank) -> None:
    rank.leaves.set()
    rank.poke()
    async with rank.starting:
        rank.free_port()
        if rank.process is not None:
            await rank.process.aclose(_GRACE_S)


def rank_environ(folder: Path, rank: int, hosts: str) -> dict[str, str]:
    """The environment of a rank; its hostfile lies in the folder. Blocks."""
    json.loads(hosts)  # a leader that writes none would have the child end with a riddle
    path = folder / "hosts.json"
    path.write_text(hosts, encoding="utf-8")
    return {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(path)}
