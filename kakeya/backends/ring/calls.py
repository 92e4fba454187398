"""The other nodes of a ring group, and the calls of RingService on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import grpc.aio

from kakeya.backends.ring.host import RankOrder
from kakeya.backends.ring.members import GroupEnded
from kakeya.backends.ring.spec import RingSpec
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound, PeerProtocol, PeerUnavailable
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.generation.progress import LoadPhase, LoadProgress
from kakeya.prefix.peers.peers import Neighbourhood
from kakeya.v1 import ring_pb2 as pb
from kakeya.v1.ring_pb2_grpc import RingServiceStub
from kakeya.wire.beats import hear
from kakeya.wire.calls import calling

if TYPE_CHECKING:
    from kakeya.v1.ring_pb2_grpc import RingServiceAsyncStub

_log = logging.getLogger(__name__)
_CALL_S = 5.0
_LIST_S = 2.0
_END_S = 4.0
"""A rank has half a second to end by itself."""
_FAULT_S = 1.0
_DOWN_S = 40.0
"""A group that ends may wait `GONE_S` for its engine, and then for its members."""
_FOREVER_S = 10 * 365 * 86400.0


class LentRank:
    """A rank at another node, with memory that is lent to it."""

    def __init__(self, peer: RingPeer, order: RankOrder, lent: pb.RankLent) -> None:
        self._peer = peer
        self._order = order
        self.label = peer.label
        self.address = f"{peer.host}:{lent.port}"
        """Where the ring reaches it."""
        self.leader_host = lent.leader_host
        """Where it reaches this node."""
        self.facts: Mapping[str, str] = dict(lent.facts)
        self.bytes = lent.lent_bytes
        self.progress: LoadProgress | None = None
        self._is_ended = False
        self.fault = ""
        """How it failed; "" = it did not, or as rank 0 ended."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the rank is no more."""

    async def start(self, hosts: str) -> None:
        """Have its process started. Raises the errors of the peer."""
        await self._peer.start_rank(self._order, hosts)

    async def end(self) -> None:
        """End it, once; its memory has been given back, or it cannot be reached. Its fault is known
        where the report comes within `_FAULT_S`."""
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(KakeyaError):
                await self._peer.end_rank(self._order)
            # The fault comes on another call, and may come behind the answer.
            await asyncio.wait((self.lost,), timeout=_FAULT_S)

    async def follow(
        self, call: grpc.aio.UnaryStreamCall[pb.HostRankRequest, pb.RankReport]
    ) -> None:
        """Hear of the rank until it is lost."""
        try:
            while (heard := await hear(call, pb.RankReport, self.label)) is not None:
                if heard.HasField("progress"):
                    self.progress = _progress_from_wire(heard.progress)
        except KakeyaError as failure:
            self.fault = f"rank {self._order.rank} is lost: {failure.message}"
        if not self.lost.done():
            self.lost.set_result(self.fault or f"rank {self._order.rank} on {self.label} ended")


class RingPeer:
    """One other node."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, label: str, host: str) -> None:
        self._stub: RingServiceAsyncStub = RingServiceStub(channel)
        self.node_id = node_id
        self.label = label
        self.host = host
        """Where this node reaches it."""

    @asynccontextmanager
    async def lent(self, order: RankOrder) -> AsyncIterator[LentRank]:
        """A rank there, with its memory, while the context lasts. Raises the errors of the peer."""
        message = pb.HostRankRequest(
            group=order.spec.to_wire(), rank=order.rank, leader=order.leader
        )
        with calling(self.label):
            call = self._stub.HostRank(message, timeout=_FOREVER_S)
        try:
            with _in_its_words(self.label):
                while (first := await hear(call, pb.RankReport, self.label)) is not None:
                    if first.HasField("lent"):
                        break
                    if first.is_ended:
                        # Told here: the group gives its other memory back before it ends.
                        event(_log, "ring group was ended", group=order.spec.name, by=self.label)
                        raise GroupEnded(
                            f"{order.spec.name} was ended on {self.label} while this node was away"
                        )
            if first is None:
                raise PeerProtocol(f"{self.label} lends no rank and does not say why")
            rank = LentRank(self, order, first.lent)
            following = asyncio.create_task(rank.follow(call), name=f"rank {order.key}")
            try:
                yield rank
            finally:
                await rank.end()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        finally:
            call.cancel()

    async def start_rank(self, order: RankOrder, hosts: str) -> None:
        """Start the process of a rank that is lent."""
        message = pb.StartRankRequest(name=order.spec.name, rank=order.rank, hosts_json=hosts)
        with calling(self.label):
            await self._stub.StartRank(message, timeout=_CALL_S)

    async def end_rank(self, order: RankOrder) -> None:
        """End a rank; its memory has been given back at the return."""
        message = pb.EndRankRequest(name=order.spec.name, rank=order.rank)
        with calling(self.label):
            await self._stub.EndRank(message, timeout=_END_S)

    async def raise_group(self, spec: RingSpec) -> AsyncGenerator[Json, None]:
        """Have a group up that the peer leads; its state as it changes."""
        message = pb.RaiseGroupRequest(group=spec.to_wire(), is_for_leader=True)
        with calling(self.label):
            call = self._stub.RaiseGroup(message, timeout=_FOREVER_S)
        try:
            with _in_its_words(self.label):
                while (heard := await hear(call, pb.GroupReport, self.label)) is not None:
                    if heard.group_json:
                        yield json.loads(heard.group_json)
        finally:
            call.cancel()

    async def end_group(self, name: str) -> str:
        """End a group that the peer leads, or one of a leader that is away in which it had a rank;
        what is still to happen, "" = nothing."""
        message = pb.EndGroupRequest(name=name, is_for_leader=True)
        with calling(self.label):
            return str((await self._stub.EndGroup(message, timeout=_DOWN_S)).note)

    async def groups(self) -> Sequence[Json]:
        """The groups that it leads and its ranks of others."""
        with calling(self.label):
            reply = await self._stub.ListGroups(pb.ListGroupsRequest(), timeout=_LIST_S)
        return list(json.loads(reply.groups_json))


class RingPeers:
    """The nodes of the fleet by their cards."""

    def __init__(self, plane: Neighbourhood, clock: Clock) -> None:
        self._plane = plane
        self._clock = clock

    @property
    def own_id(self) -> str:
        """The id of this node."""
        return str(self._plane.registry.node_id)

    @property
    def own_label(self) -> str:
        """The name of this node for people."""
        return self.label_of(self.own_id)

    def label_of(self, node_id: str) -> str:
        """The name of a node for people."""
        known = {str(card.node_id): card.label for card in self._cards()}
        return known.get(node_id) or node_id

    def node_id(self, named: str) -> str:
        """The id of a live node by its id, its label, or the start of its id. Raises NotFound."""
        cards = self._cards()
        for found in (
            [card for card in cards if named and named in (card.node_id, card.label)],
            [card for card in cards if named and card.node_id.startswith(named)],
        ):
            if len(found) == 1:
                return str(found[0].node_id)
        labels = ", ".join(card.label or card.node_id for card in cards)
        raise NotFound(f"no live node of the fleet is called {named[:80]!r}; there are {labels}")

    def are_live(self, node_ids: Sequence[str]) -> bool:
        """Whether these nodes are there, as far as this one knows."""
        suspects = self._plane.registry.suspects()
        live = {card.node_id for card in self._cards() if card.node_id not in suspects}
        return live.issuperset(node_ids)

    def get(self, node_id: str) -> RingPeer:
        """A node that can be called. Raises PeerUnavailable."""
        for card in self._others():
            address = self._plane.routes.address_for(card)
            if card.node_id == node_id and address and not self._plane.why_not_dial(address):
                channel = self._plane.channels.get(address, card.node_id)
                host = address.rpartition(":")[0].strip("[]")
                return RingPeer(channel, node_id, card.label or node_id, host)
        raise PeerUnavailable(f"node {self.label_of(node_id)} is away")

    def all(self) -> Sequence[RingPeer]:
        """All other nodes that can be called."""
        found = []
        for card in self._others():
            with contextlib.suppress(PeerUnavailable):
                found.append(self.get(str(card.node_id)))
        return found

    async def groups(self) -> tuple[list[Json], list[str]]:
        """The groups of all other nodes, and the names of those that do not answer."""
        peers = self.all()
        called = {peer.node_id for peer in peers}
        away = (card for card in self._others() if card.node_id not in called)
        silent = [str(card.label or card.node_id) for card in away]

        async def ask(peer: RingPeer) -> Sequence[Json]:
            try:
                return await peer.groups()
            except KakeyaError as failure:
                event(_log, "no answer about ring groups", node=peer.label, error=failure.message)
                silent.append(peer.label)
                return ()

        answers = await asyncio.gather(*map(ask, peers))
        return [group for answer in answers for group in answer], sorted(silent)

    def _cards(self) -> Sequence[Card]:
        return self._registry.snapshot(mono=self._clock.mono())

    def _others(self) -> Sequence[Card]:
        return self._registry.live_peers(mono=self._clock.mono())

    @property
    def _registry(self) -> CapabilityRegistry:
        return self._plane.registry


@contextmanager
def _in_its_words(label: str) -> Iterator[None]:
    """Leave the name of the peer out: refusals of ranks and groups name their nodes themselves."""
    try:
        yield
    except KakeyaError as failure:
        if not isinstance(failure, PeerUnavailable):
            failure.message = failure.message.removeprefix(f"{label}: ")
        raise


def _progress_from_wire(message: pb.RankProgress) -> LoadProgress | None:
    try:
        phase = LoadPhase[message.phase]
    except KeyError:
        return None
    return LoadProgress(phase=phase, done_bytes=message.done_bytes, total_bytes=message.total_bytes)
