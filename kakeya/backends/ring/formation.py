"""A ring group around its rank 0: the memory of all other ranks first, then their processes.

Each context of `form` is one try: what it got it gives back at its end, whatever failed. Rank 0's
own memory is that of the model, which the arbiter lends before its engine is started.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from kakeya.backends.engine.process import SocketFolder
from kakeya.backends.ring import weights
from kakeya.backends.ring.host import RankOrder, rank_environ
from kakeya.backends.ring.spec import RingSpec
from kakeya.core.errors import KakeyaError, LoadFailed
from kakeya.fleet.placement.ring import ring_name
from kakeya.generation.progress import LoadProgress


class LentSeat(Protocol):
    """A rank at another node, with its memory; see `LentRank`."""

    label: str
    address: str
    leader_host: str
    facts: Mapping[str, str]
    bytes: int
    progress: LoadProgress | None
    lost: asyncio.Future[str]
    fault: str

    async def start(self, hosts: str) -> None:
        """Start its process."""
        ...

    async def end(self) -> None:
        """End it, and give its memory back."""
        ...


class RankLender(Protocol):
    """A node that has ranks; see `RingPeer`."""

    def lent(self, order: RankOrder) -> AbstractAsyncContextManager[LentSeat]:
        """A rank there, while the context lasts."""
        ...


class Lenders(Protocol):
    """The other nodes; see `RingPeers`."""

    @property
    def own_id(self) -> str:
        """The id of this node."""
        ...

    def get(self, node_id: str) -> RankLender:
        """A node. Raises PeerUnavailable."""
        ...


class Formation:
    """See the module. `find` gives the folder of the weights here, and `facts` what all ranks must
    have in common with it."""

    def __init__(
        self,
        spec: RingSpec,
        lenders: Lenders,
        find: Callable[[RingSpec], Path],
        sockets: Path | None,
        *,
        facts: Callable[[Path], Mapping[str, str]] = weights.facts_of,
    ) -> None:
        self._spec = spec
        self._lenders = lenders
        self._find = find
        self._sockets = sockets
        self._facts = facts
        self.ranks: Sequence[LentSeat] = ()
        """The other ranks, as far as their memory is lent."""
        self.group_id = ""
        self.refusal: KakeyaError | None = None
        """Why the last try failed before rank 0 was started."""
        self.faults: Sequence[str] = ()
        """How ranks failed in the last try that rank 0 was started in."""

    @asynccontextmanager
    async def form(self) -> AsyncIterator[FormedRing]:
        """The group with all ranks but 0 started. Raises ConfigError for ranks that differ,
        LoadFailed where this node has no port or disk for it, and the refusals of members."""
        self.refusal = None
        async with AsyncExitStack() as stack:
            stack.callback(self._over)
            try:
                formed = await self._gather(stack)
            except (KakeyaError, OSError) as fault:
                refusal = fault if isinstance(fault, KakeyaError) else _no_ring(fault)
                self.refusal, self.faults = refusal, ()
                raise refusal from fault
            stack.push_async_callback(self._end_ranks)
            yield formed

    async def _gather(self, stack: AsyncExitStack) -> FormedRing:
        spec = self._spec
        folder = await asyncio.to_thread(self._find, spec)
        own = await asyncio.to_thread(self._facts, folder)
        for rank in range(1, len(spec.seats)):
            order = RankOrder(spec=spec, rank=rank, leader=self._lenders.own_id)
            lender = self._lenders.get(spec.seats[rank].node)
            seat = await stack.enter_async_context(lender.lent(order))
            weights.compare(rank, seat.label, seat.facts, own)
            self.ranks = (*self.ranks, seat)
        hosts = json.dumps(
            [
                [f"{self.ranks[0].leader_host}:{_free_port()}"],
                *([one.address] for one in self.ranks),
            ]
        )
        sockets = await stack.enter_async_context(SocketFolder.lent(self._sockets))
        environ = await asyncio.to_thread(rank_environ, sockets.path, 0, hosts)
        await asyncio.gather(*(one.start(hosts) for one in self.ranks))
        self.group_id = ring_name(hosts)
        return FormedRing(self, environ)

    async def _end_ranks(self) -> None:
        """End all at once; what cannot be reached ends by itself."""
        await asyncio.gather(*(one.end() for one in self.ranks), return_exceptions=True)
        self.faults = [one.fault for one in self.ranks if one.fault]

    def _over(self) -> None:
        self.ranks, self.group_id = (), ""


class FormedRing:
    """Implements `OtherRanks`."""

    def __init__(self, formation: Formation, environ: Mapping[str, str]) -> None:
        self._formation = formation
        self._environ = environ

    def env(self) -> Mapping[str, str]:
        """See `OtherRanks`."""
        return self._environ

    async def lost(self) -> str:
        """See `OtherRanks`."""
        losses = [rank.lost for rank in self._formation.ranks]
        done, _ = await asyncio.wait(losses, return_when=asyncio.FIRST_COMPLETED)
        return f"lost a rank: {done.pop().result()}"


def _no_ring(fault: OSError) -> LoadFailed:
    return LoadFailed(f"rank 0 has no port or no hostfile for its ring: {fault.strerror or fault}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
