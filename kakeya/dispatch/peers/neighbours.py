"""The nodes of the fleet that serve a model: found by their cards, asked for what no card has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    NotFound,
    PeerError,
    StoreFailed,
    UnknownMethod,
)
from kakeya.core.ids import NodeId
from kakeya.core.log import event
from kakeya.dispatch.peers.client import PeerCalls, PeerDescription
from kakeya.dispatch.peers.quote import Quote
from kakeya.dispatch.peers.relay_calls import RelayCalls
from kakeya.dispatch.peers.text_files import TextFiles
from kakeya.fleet.cards.cards import Card, CardRole, OfferedModel
from kakeya.fleet.cards.names import names_of
from kakeya.fleet.paths.link_rates import LOOPBACK
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.peers.peers import Neighbourhood
from kakeya.prefix.seam import PrefixClaim, TokenSource
from kakeya.wire.channels import is_local
from kakeya.wire.status import is_answer

_log = logging.getLogger(__name__)
QUOTE_S = 0.25
"""How long a peer may take to quote: an idle one answers in a few milliseconds."""
LATE = "it did not quote in time"
MOST_QUOTED = 16
"""Nodes that are asked for one request: on a shelf of ten, all."""
DESCRIBED_S = 30.0
"""For so long a peer is believed what it told of its model: its owner may change the manifest."""
_MOST_DESCRIBED = 256
_SLOW_S = 3.0
"""A node that did not quote in time is in doubt for so long."""
_SPARED_S = 30.0
"""A node of another build that knows no ServingService is asked again after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePeer:
    """A live node; `network` is the kind of the one that it is called over, "" = not known."""

    node_id: str
    label: str
    life: int
    address: str
    is_suspect: bool
    rtt_s: float = 0.0
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPeer(LivePeer):
    """A live node that offers a model."""

    offered: OfferedModel


@dataclass(frozen=True, slots=True)
class _Described:
    life: int
    told_mono: float
    description: PeerDescription


class ServingPeers:
    """See the module; lives on the event loop."""

    def __init__(
        self, plane: Neighbourhood, texts: TextFiles, clock: Clock, *, shares_kv: bool = False
    ) -> None:
        """`shares_kv`: this node exchanges KV with peers."""
        self._plane = plane
        self._shares_kv = shares_kv
        self._texts = texts
        self._clock = clock
        self._described: dict[tuple[str, str], _Described] = {}
        """By node id and model id."""
        self._sending: set[asyncio.Task[None]] = set()
        self._bringing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By digest, for as long as requests bring that text."""
        self._unable: dict[str, float] = {}
        """Node ids, and until when they are not asked, in monotonic seconds."""
        self._slow: dict[str, float] = {}
        """Node ids, and until when they are in doubt."""

    @property
    def own_id(self) -> str:
        """The id of this node."""
        return str(self._plane.registry.node_id)

    def live(self) -> tuple[LivePeer, ...]:
        """The peers that can be called, with models or without, those in doubt last; by node id."""
        return tuple(sorted((LivePeer(**facts) for _, facts in self._told()), key=_order))

    def offering(
        self, model_id: str = "", role: CardRole = CardRole.VERIFIER
    ) -> tuple[ServingPeer, ...]:
        """The peers with a model in a role, or with any, in the order of `live`. Of BASE:NAME those
        with the base: which adapters a node has is not on its card."""
        found = [
            ServingPeer(offered=offered, **facts)
            for card, facts in self._told()
            for offered in card.offers(role, model_id or None)
        ]
        base = model_id.rpartition(":")[0]
        if not found and base:
            return self.offering(base, role)
        return tuple(sorted(found, key=_order))

    def on_disk(self) -> Mapping[str, tuple[int, float]]:
        """The models that peers give from their disks and do not offer, by name: the bytes of their
        files, and the bytes/s that are expected from the peer with the best link."""
        found: dict[str, tuple[int, float]] = {}
        for card, facts in self._told():
            rate = self._plane.links.expected(card.node_id, facts["network"])
            for name, size in card.on_disk:
                if name not in found or rate > found[name][1]:
                    found[name] = size, rate
        return found

    def out_of_reach(self, model_id: str) -> str:
        """The live peers that have a model of which this node cannot ask them, and why, in words;
        "" = none has it."""
        found = []
        called = {card.node_id for card, _ in self._told()}
        for card in self._plane.registry.live_peers(mono=self._clock.mono()):
            name = card.label or card.node_id
            roles = {model.role for model in card.models if model.model_id == model_id}
            if CardRole.VERIFIER in roles and card.node_id not in called:
                found.append(
                    f"{name} serves it, and does not answer this node: kakeya doctor {name}"
                )
            elif CardRole.PROPOSER in roles:
                found.append(f"{name} only drafts with it")
            elif model_id in dict(card.on_disk):
                found.append(f"{name} has it on its disk: kakeya models pull {model_id}")
        return "; ".join(found)

    def _told(self) -> Iterator[tuple[Card, dict[str, Any]]]:
        """The card of each peer that can be called, and what a `LivePeer` says of it."""
        mono, suspects = self._clock.mono(), self._plane.registry.suspects()
        cards = self._plane.registry.live_peers(mono=mono)
        names = names_of(cards)
        for card in cards:
            if not card.is_extended or self._unable.get(card.node_id, 0.0) > mono:
                continue
            address = self._plane.routes.address_for(card)
            if not address or self._plane.why_not_dial(address):
                continue
            way = next((one for one in card.endpoints if one.address == address), None)
            named = "" if way is None else way.network
            is_slow = self._slow.get(card.node_id, 0.0) > mono
            yield (
                card,
                {
                    "node_id": card.node_id,
                    "label": names[card.node_id],
                    "life": card.life,
                    "address": address,
                    "is_suspect": is_slow or card.node_id in suspects,
                    "rtt_s": 0.0 if way is None else way.rtt_ms / 1000,
                    "network": LOOPBACK if is_local(address) else named,
                },
            )

    def is_live(self, node_id: str) -> bool:
        """Whether a node is there, as far as this one knows."""
        registry = self._plane.registry
        is_known = registry.get(NodeId(node_id), mono=self._clock.mono()) is not None
        return is_known and node_id not in registry.suspects()

    def calls(self, peer: LivePeer) -> PeerCalls:
        """The calls of a peer."""
        return PeerCalls(self._plane.channels.get(peer.address, peer.node_id), peer.label)

    def relay_calls(self, peer: ServingPeer) -> RelayCalls:
        """The calls of a peer for whole requests."""
        channel = self._plane.channels.get(peer.address, peer.node_id)
        return RelayCalls(channel, peer.label, self.own_id)

    async def quotes(
        self,
        peers: Sequence[ServingPeer],
        model_id: str,
        client: str,
        token_ids: Sequence[int],
        cuts: Sequence[int],
    ) -> Mapping[str, Quote | str]:
        """Ask peers at once for their quotes; a text says why there is none. By node id."""

        async def ask(peer: ServingPeer) -> Quote | str:
            try:
                return await self.calls(peer).quote(model_id, client, token_ids, cuts, QUOTE_S)
            except KakeyaError as failure:
                self.failed(peer, failure)
                return LATE if isinstance(failure, DeadlineExceeded) else failure.message

        answers = await asyncio.gather(*map(ask, peers))
        return dict(zip((peer.node_id for peer in peers), answers, strict=True))

    async def adapted(self, client: str) -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name at peers, by name. Of a peer that does
        not answer in time, or is of an older build, none."""

        async def ask(peer: ServingPeer) -> Sequence[AdaptedId]:
            try:
                return await self.calls(peer).adapted(client, QUOTE_S)
            except UnknownMethod:
                return ()
            except KakeyaError as failure:
                self.failed(peer, failure)
                return ()

        peers = {peer.node_id: peer for peer in self.offering() if not peer.is_suspect}
        found = await asyncio.gather(*map(ask, peers.values()))
        by_name = {one.model_id: one for answer in found for one in answer}
        return tuple(by_name[name] for name in sorted(by_name))

    def kv_rates(self, model_id: str) -> Mapping[str, float] | None:
        """The bytes/s with which KV of a model is expected here from each peer that serves it, by
        node id; None = this node shares no KV."""
        if not self._shares_kv:
            return None
        return {
            peer.node_id: self._plane.links.expected(peer.node_id, peer.network)
            for peer in self.offering(model_id)[:MOST_QUOTED]
        }

    def abroad(self, kv_key: str) -> str:
        """The name at other nodes of a KV key of this node."""
        return f"{self.own_id}/{kv_key}" if kv_key else ""

    def warm_turn(
        self, peer: ServingPeer, claim: PrefixClaim, kv_key: str, tokens: TokenSource
    ) -> None:
        """Have a conversation's next turn warm at a peer, in the background: without it the next
        request computes what it needs."""

        async def send() -> None:
            with contextlib.suppress(KakeyaError):
                history = await tokens()
                retention = claim.use.retention or Retention.LONG
                await self.calls(peer).warm_turn(
                    claim.model_id, claim.client, self.abroad(kv_key), history, retention
                )

        task = asyncio.create_task(send(), name=f"next turn of {kv_key}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def aclose(self) -> None:
        """End what is under way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def failed(self, peer: LivePeer, failure: KakeyaError) -> None:
        """Note the failure of a call: a node that does not answer comes in doubt."""
        if is_answer(failure):
            return
        if isinstance(failure, UnknownMethod):
            self._unable[peer.node_id] = self._clock.mono() + _SPARED_S
        elif isinstance(failure, DeadlineExceeded):
            self._slow[peer.node_id] = self._clock.mono() + _SLOW_S
        elif isinstance(failure, PeerError):
            self._plane.call_failed(peer.address)

    def known(self, model_id: str, role: CardRole = CardRole.VERIFIER) -> PeerDescription | None:
        """What is known of a model of any peer without asking one."""
        for peer in self.offering(model_id, role):
            found = self._described.get((peer.node_id, model_id))
            if found is not None and found.life == peer.life:
                return found.description
        return None

    async def describe(
        self,
        model_id: str,
        client: str,
        timeout_s: float,
        priority: GenerationPriority,
        *,
        role: CardRole = CardRole.VERIFIER,
    ) -> PeerDescription:
        """Learn what a model is, and bring the files of its text here; the first peer to tell is
        believed, for a while. Raises the last peer's error, NotFound where no peer offers it."""
        last: KakeyaError = NotFound(f"model {model_id[:80]!r} is not served by the fleet now")
        began_mono = self._clock.mono()
        for peer in self.offering(model_id, role):
            known = None if ":" in model_id else self._described.get((peer.node_id, model_id))
            is_same = known is not None and known.life == peer.life
            if known is not None and is_same and began_mono - known.told_mono < DESCRIBED_S:
                return known.description
            left_s = max(0.0, timeout_s - (self._clock.mono() - began_mono))
            try:
                return await self._ask(peer, model_id, client, left_s, priority)
            except KakeyaError as failure:
                self.failed(peer, failure)
                last = failure
        raise last

    async def _ask(
        self,
        peer: ServingPeer,
        model_id: str,
        client: str,
        timeout_s: float,
        priority: GenerationPriority,
    ) -> PeerDescription:
        calls = self.calls(peer)
        told = await calls.describe(model_id, client, timeout_s, priority)
        folder = ""
        if told.text_digest:
            lock = self._bringing.setdefault(told.text_digest, asyncio.Lock())
            try:
                async with lock:
                    found = await self._texts.find(told.text_digest)
                    if found is None:
                        parts = calls.text_files(model_id, client)
                        found = await self._texts.keep(told.text_digest, parts)
                        event(_log, "text of a peer's model", model=model_id, node=peer.label)
            except OSError as problem:
                raise StoreFailed(
                    f"the text of {model_id} cannot be kept here: {problem}"
                ) from problem
            folder = str(found)
        told = replace(told, facts=replace(told.facts, model_path=folder))
        self._described[peer.node_id, model_id] = _Described(peer.life, self._clock.mono(), told)
        while len(self._described) > _MOST_DESCRIBED:
            with contextlib.suppress(StopIteration):
                del self._described[next(iter(self._described))]
        return told


def _order(peer: LivePeer) -> tuple[bool, str]:
    return peer.is_suspect, peer.node_id
