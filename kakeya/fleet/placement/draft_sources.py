"""Draft sources of a model: the caller's policy, applied to this node's view of the fleet.

    auto, ""           n-grams in the engine, then the placement's draft model, if it fits
    off                no source
    ngram              n-grams in the engine
    peer               the placement's proposer on another node, n-grams there included
    MODEL@HOST:PORT    exactly that proposer

A draft model fits when it shares the verifier's vocabulary; any other model would only yield wrong
drafts. Drafts change speed, never tokens, so nothing here can spoil an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, PlacementError
from kakeya.core.ids import NGRAM, ModelId
from kakeya.core.settings import Illegal, is_loopback, peer_address
from kakeya.fleet.cards.cards import Card, CardRole, OfferedModel
from kakeya.fleet.placement.placement import SpecDecodePlacement, plan_spec_decode_placement
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.generation.facts import ModelFacts
from kakeya.generation.request import DraftSource
from kakeya.generation.spec import EMBEDDED
from kakeya.wire.channels import is_local

LOCAL_NGRAM = DraftSource(kind="ngram")
_PLANNED = ("", "auto", "peer")
"""Policies that leave the address to the node."""
POLICIES = "auto, off, ngram, peer or MODEL_ID@HOST:PORT"


class FleetDrafts:
    """Chooses draft sources from the registry's view of this moment.

    In a fleet with identities (`is_secured`) a peer gets the prompt only after it has shown the
    certificate of exactly the planned node. `route` gives the best address of a node.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        clock: Clock,
        *,
        is_secured: bool = False,
        route: Callable[[Card], str] = lambda card: card.grpc_address,
    ) -> None:
        self._registry = registry
        self._route = route
        self._clock = clock
        self._is_secured = is_secured

    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        """Sources, best first. Raises InvalidArgument for an unknown policy."""
        own, *peers = self._registry.snapshot(mono=self._clock.mono())
        if policy in _PLANNED:
            peers = [replace(card, grpc_address=self._route(card)) for card in peers]
        return choose_sources(
            facts,
            policy,
            (own, *peers),
            now=self._clock.wall(),
            suspects=self._registry.suspects(),
            is_secured=self._is_secured,
        )


def choose_sources(
    facts: ModelFacts,
    policy: str,
    cards: Sequence[Card],
    *,
    now: float,
    suspects: Collection[str] = frozenset(),
    is_secured: bool = False,
) -> tuple[DraftSource, ...]:
    """Apply a policy to the cards, the own one first; `suspects` are node ids to leave out."""
    match policy:
        case "" | "auto":
            fitting = _fitting_cards(facts, cards, with_ngram=False)
            plan = _place(facts, fitting, now=now, suspects=suspects)
            return (LOCAL_NGRAM,) if plan is None else (LOCAL_NGRAM, _remote(plan, is_secured))
        case "off":
            return ()
        case "ngram":
            return (LOCAL_NGRAM,)
        case "peer":
            fitting = _fitting_cards(facts, cards, with_ngram=True)
            plan = _place(facts, fitting, now=now, suspects=suspects)
            return () if plan is None or plan.colocated else (_remote(plan, is_secured),)
        case _:
            return (_named(policy, cards, is_secured),)


def _place(
    facts: ModelFacts, cards: Sequence[Card], *, now: float, suspects: Collection[str]
) -> SpecDecodePlacement | None:
    try:
        return plan_spec_decode_placement(
            cards, now=now, verifier_model=facts.model_id, suspects=suspects
        )
    except PlacementError:
        return None


def _fitting_cards(
    facts: ModelFacts, cards: Sequence[Card], *, with_ngram: bool
) -> tuple[Card, ...]:
    """Reduce the cards to this node as the only verifier and the proposers that fit it."""
    verifier = OfferedModel(ModelId(facts.model_id), CardRole.VERIFIER)
    own, *peers = (
        replace(card, models=_fitting(card, facts, with_ngram=with_ngram)) for card in cards
    )
    return (replace(own, models=(verifier, *own.models)), *peers)


def _fitting(card: Card, facts: ModelFacts, *, with_ngram: bool) -> tuple[OfferedModel, ...]:
    return tuple(
        model
        for model in card.offers(CardRole.PROPOSER)
        if (with_ngram if model.model_id == NGRAM else shares_vocabulary(model, facts))
    )


def shares_vocabulary(model: OfferedModel, facts: ModelFacts) -> bool:
    """Whether a proposer's token ids mean the same as the verifier's, as far as is known."""
    if model.vocabulary_digest and facts.vocabulary_digest:
        return model.vocabulary_digest == facts.vocabulary_digest
    return model.model_id in EMBEDDED and facts.model_id in EMBEDDED


def _remote(plan: SpecDecodePlacement, is_secured: bool) -> DraftSource:
    return DraftSource(
        kind="remote",
        address=plan.proposer_address,
        model_id=plan.proposer_model,
        extended=plan.proposer.is_extended,
        server_name=_server_name(plan.proposer_node, plan.proposer_address, is_secured),
    )


def _server_name(node_id: str, address: str, is_secured: bool) -> str:
    """The node id that the source's certificate must show: that of the card's owner."""
    return node_id if is_secured and not is_local(address) else ""


def _named(policy: str, cards: Sequence[Card], is_secured: bool) -> DraftSource:
    model_id, _, address = policy.rpartition("@")
    try:
        peer_address(address)
    except Illegal:
        model_id = ""
    if not model_id:
        raise InvalidArgument(
            f"draft policy {policy[:80]!r} is unknown; give {POLICIES}", param="draft_policy"
        )
    card = next((card for card in cards if card.grpc_address == address), None)
    if card is None and not is_loopback(address):
        # The source gets the prompt's tokens, so a caller may name only addresses of the fleet.
        raise InvalidArgument(
            f"draft policy {policy[:80]!r} names an address that no live node has; "
            "see kakeya status for those that have one",
            param="draft_policy",
        )
    return DraftSource(
        kind="remote",
        address=address,
        model_id=model_id,
        extended=card is not None and card.is_extended,
        server_name=_server_name(card.node_id, address, is_secured) if card is not None else "",
    )
