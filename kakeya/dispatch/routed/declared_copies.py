"""The declared prompts of this node, kept warm on other nodes too.

    round     after a change of the fleet or of a prompt, and each `RENEW_S`: the peers that serve
              the model are asked for their care of each prompt; of these the first few, in the
              order of `fleet/placement/keepers.py`, are to keep it warm from now on
    refused   a peer that is short of memory or busy, or has the model not loaded, is passed over
              for `SPARED_S`, and the next one is asked

A peer gets the token ids once, and only over a channel that no other node reads.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, UnknownMethod
from kakeya.core.figures import Figure, Json, gauge
from kakeya.core.tasks import Supervisor
from kakeya.dispatch.peers.neighbours import MOST_QUOTED, ServingPeer, ServingPeers
from kakeya.dispatch.routed.route import offering
from kakeya.fleet.placement.keepers import Keeping, keepers
from kakeya.generation.facts import ModelFacts
from kakeya.generation.kv import KvHolder
from kakeya.prefix.seam import WarmOutcome
from kakeya.prefix.warm.declared import DeclaredPrompts, DeclaredText
from kakeya.prefix.warm.for_peers import LAPSE_S, PeerPrefix

RENEW_S = LAPSE_S / 4
SPARED_S = 60.0
_ASK_S = 5.0
_IDLE_S = 3600.0
_IN_CLEAR = "the way there is not encrypted: prompts are sent to members of a fleet only"


@dataclass(slots=True)
class _Copies:
    """Of one text: the nodes that keep it warm by their lives, and those that do not, by reason."""

    kept: dict[str, int] = field(default_factory=dict)
    spared: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Why a node was passed over, and until when."""
    renew_mono: float = math.inf
    """When those that keep it are told again."""

    def unable(self, now: float) -> dict[str, str]:
        """The nodes that are passed over now."""
        return {one: why for one, (why, until) in self.spared.items() if now < until}


class DeclaredCopies:
    """See the module; `run` is its one background task."""

    def __init__(
        self,
        declared: DeclaredPrompts,
        peers: ServingPeers,
        *,
        nodes: int,
        facts: Callable[[str], ModelFacts | None],
        is_private: Callable[[ServingPeer], bool],
        clock: Clock,
    ) -> None:
        """Each prompt is kept warm on so many nodes, this one included; `facts` are those of an own
        model, and raise where it is gone."""
        self._declared = declared
        self._peers = peers
        self._nodes = nodes
        self._facts = facts
        self._is_private = is_private
        self._clock = clock
        self._copies: dict[bytes, _Copies] = {}
        self._wake = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether other nodes are to keep anything."""
        return self._nodes > 1 and self._declared.count > 0

    def start(self, supervisor: Supervisor) -> None:
        """Keep copies under a supervisor."""
        if self.is_on:
            self._declared.changed = self._wake.set
            supervisor.start("copies of declared prompts", self.run)

    def fleet_changed(self) -> None:
        """Note that nodes came, left or changed."""
        if any(not self._is_settled(text, self._candidates(text)) for text in self._declared.texts):
            self._wake.set()

    async def run(self) -> None:
        """Keep the copies, for ever."""
        while True:
            self._wake.clear()
            await self.place()
            await self._clock.sleep(self._pause_s(), self._wake)

    async def place(self) -> None:
        """One round."""
        texts = self._declared.texts
        known = {text.digest for text in texts}
        self._copies = {one: held for one, held in self._copies.items() if one in known}
        await asyncio.gather(*map(self._place, texts))

    def status(self) -> list[Json]:
        """Of each prompt, the nodes that keep it warm, and those that were passed over."""
        now, told = self._clock.mono(), list[Json]()
        for text in self._declared.texts:
            copies = self._copies.get(text.digest, _Copies())
            told.append(
                {
                    "model": text.model_id,
                    "tokens": len(text.tokens),
                    "nodes": [self._peers.own_id, *sorted(copies.kept)],
                    "wanted": self._nodes,
                    "passed_over": copies.unable(now),
                }
            )
        return told

    def figures(self) -> Iterator[Figure]:
        """How many copies other nodes keep."""
        kept = sum(len(copies.kept) for copies in self._copies.values())
        name = "kakeya_declared_copies"
        yield gauge(name, "Declared prompts that other nodes keep warm, each counted", kept)

    # Between the parts of this module

    def _candidates(self, text: DeclaredText) -> Mapping[str, ServingPeer]:
        try:
            facts = self._facts(text.model_id)
        except KakeyaError:  # its adapter was removed since
            return {}
        found = offering(self._peers, text.model_id, facts)
        # Of a model that was never loaded it is not even known that its words are the same.
        trusted = [peer for peer in found if not peer.is_suspect and peer.offered.vocabulary_digest]
        return {peer.node_id: peer for peer in trusted[:MOST_QUOTED]}

    def _is_settled(self, text: DeclaredText, peers: Mapping[str, ServingPeer]) -> bool:
        """Whether so many nodes as can be keep a text, and all are still there."""
        copies, now = self._copies.get(text.digest), self._clock.mono()
        if copies is None or now >= copies.renew_mono:
            return False
        are_there = all(
            one in peers and peers[one].life == life for one, life in copies.kept.items()
        )
        able = len(peers.keys() - copies.unable(now).keys())
        return are_there and len(copies.kept) >= min(self._nodes - 1, able)

    async def _place(self, text: DeclaredText) -> None:
        peers = self._candidates(text)
        if self._is_settled(text, peers):
            return
        copies = self._copies.setdefault(text.digest, _Copies())
        now = self._clock.mono()
        for node_id, peer in peers.items():
            if not self._is_private(peer):
                copies.spared[node_id] = (_IN_CLEAR, now + SPARED_S)
        unable = copies.unable(now)
        asked = [peer for peer in peers.values() if peer.node_id not in unable]
        answers = await asyncio.gather(*(self._ask(peer, text, copies) for peer in asked))
        told = {
            peer.node_id: keeping
            for peer, keeping in zip(asked, answers, strict=True)
            if keeping is not None
        }
        kept: dict[str, int] = {}
        for node_id in keepers(text.digest, told, len(told)):
            if len(kept) >= self._nodes - 1:
                break
            if await self._keep(peers[node_id], text, told[node_id], copies):
                kept[node_id] = peers[node_id].life
        copies.kept = kept
        copies.renew_mono = self._clock.mono() + RENEW_S if kept else math.inf

    async def _ask(self, peer: ServingPeer, text: DeclaredText, copies: _Copies) -> Keeping | None:
        """A peer's care for a text; None = it does not say."""
        try:
            return await self._peers.calls(peer).keeping(text.digest, _ASK_S)
        except KakeyaError as failure:
            self._pass_over(peer, failure, copies)
            return None

    async def _keep(
        self, peer: ServingPeer, text: DeclaredText, keeping: Keeping, copies: _Copies
    ) -> bool:
        """Have a peer keep a text; whether it does."""
        holder = KvHolder(node_id=self._peers.own_id, tokens=len(text.tokens))
        prefix = PeerPrefix(
            model_id=text.model_id, digest=text.digest, tokens=text.tokens, holder=holder
        )
        calls = self._peers.calls(peer)
        try:
            report = None
            if keeping is not Keeping.NOTHING:
                report = await calls.keep_warm(replace(prefix, tokens=()))
            if report is None:
                report = await calls.keep_warm(prefix)
        except KakeyaError as failure:
            self._pass_over(peer, failure, copies)
            return False
        if report is not None and report.outcome is WarmOutcome.WARM:
            copies.spared.pop(peer.node_id, None)
            return True
        until_mono = self._clock.mono() + SPARED_S
        reason = "it kept nothing" if report is None else report.reason
        copies.spared[peer.node_id] = (reason, until_mono)
        return False

    def _pass_over(self, peer: ServingPeer, failure: KakeyaError, copies: _Copies) -> None:
        if isinstance(failure, UnknownMethod):
            reason = "it is of an older build, which keeps nothing for others"
        else:
            reason = failure.message
            self._peers.failed(peer, failure)
        copies.spared[peer.node_id] = (reason, self._clock.mono() + SPARED_S)

    def _pause_s(self) -> float:
        """Until a copy has to be renewed, or a node that was passed over may be asked again."""
        now, due = self._clock.mono(), [self._clock.mono() + _IDLE_S]
        for copies in self._copies.values():
            due.append(copies.renew_mono)
            if len(copies.kept) < self._nodes - 1:
                due += [until for _, until in copies.spared.values() if until > now]
        return max(1.0, min(due) - now)
