"""Chooses the verifying and the drafting node: a pure function of a view, equal on every node.

Order of candidates: tokens per second, then memory, then node id, then model id, so that no two
candidates tie and equal views give equal plans without a word between the nodes. A proposer on
another node is preferred, because its weights and activations then leave the verifier's memory.
There is no fallback: without a candidate the caller gets an error that names the missing part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kakeya.core.errors import PlacementError
from kakeya.core.ids import ModelId, NodeId
from kakeya.core.units import format_bytes
from kakeya.fleet.cards.cards import Card, CardRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model on one node in one role, with the numbers it is ranked by."""

    node_id: NodeId
    model_id: ModelId
    address: str
    tokens_per_second: float
    memory_bytes: int
    is_extended: bool = False

    @property
    def rank(self) -> tuple[float, int, str, str]:
        """Sorts the best first."""
        return (-self.tokens_per_second, -self.memory_bytes, self.node_id, self.model_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodePlacement:
    """The chosen verifier and proposer. Speeds are tokens per second, 0 = not measured."""

    verifier: Candidate
    proposer: Candidate

    @property
    def verifier_node(self) -> NodeId:
        """The node that decodes."""
        return self.verifier.node_id

    @property
    def verifier_model(self) -> ModelId:
        """The model that decides every token."""
        return self.verifier.model_id

    @property
    def verifier_address(self) -> str:
        """The gRPC address of the verifier's node."""
        return self.verifier.address

    @property
    def proposer_node(self) -> NodeId:
        """The node that drafts."""
        return self.proposer.node_id

    @property
    def proposer_model(self) -> ModelId:
        """The model that drafts; `ngram` needs no weights."""
        return self.proposer.model_id

    @property
    def proposer_address(self) -> str:
        """The gRPC address of the proposer's node."""
        return self.proposer.address

    @property
    def proposer_is_extended(self) -> bool:
        """Whether the proposer's node understands this build's extensions of the protocol."""
        return self.proposer.is_extended

    @property
    def colocated(self) -> bool:
        """Whether both are one node."""
        return self.verifier.node_id == self.proposer.node_id

    def render(self) -> str:
        """One line for the operator."""
        where = "colocated" if self.colocated else "remote"
        return f"verify {_describe(self.verifier)}; draft {_describe(self.proposer)} ({where})"


def plan_spec_decode_placement(
    snapshot: Sequence[Card],
    *,
    now: float,
    verifier_model: str | None = None,
    proposer_model: str | None = None,
    prefer_remote_proposer: bool = True,
    suspects: Collection[str] = frozenset(),
) -> SpecDecodePlacement:
    """Choose the best verifier, then the best proposer, a remote one if any is live.

    Expired cards and `suspects` (node ids that do not answer here) are left out. Raises
    PlacementError that names the role, the model and the count of known nodes.
    """
    live = [card for card in snapshot if not card.is_expired(now) and card.node_id not in suspects]
    verifiers = candidates(live, CardRole.VERIFIER, verifier_model)
    if not verifiers:
        raise _missing("verifier", verifier_model, len(live), len(snapshot))
    verifier = verifiers[0]
    proposers = candidates(live, CardRole.PROPOSER, proposer_model)
    if not proposers:
        raise _missing("proposer", proposer_model, len(live), len(snapshot))
    remote = [found for found in proposers if found.node_id != verifier.node_id]
    chosen = remote if prefer_remote_proposer and remote else proposers
    return SpecDecodePlacement(verifier=verifier, proposer=chosen[0])


def candidates(
    cards: Sequence[Card], role: CardRole, model_id: str | None = None
) -> list[Candidate]:
    """Every model that the cards offer in a role, or the model of the given name; best first."""
    found = [
        Candidate(
            node_id=card.node_id,
            model_id=model.model_id,
            address=card.grpc_address,
            tokens_per_second=model.tokens_per_second,
            memory_bytes=card.unified_memory_bytes,
            is_extended=card.is_extended,
        )
        for card in cards
        for model in card.offers(role, model_id)
    ]
    return sorted(found, key=lambda candidate: candidate.rank)


def _missing(role: str, model_id: str | None, live: int, seen: int) -> PlacementError:
    wanted = f"carries {model_id} as {role}" if model_id else f"carries a {role}"
    return PlacementError(
        f"no live node {wanted}; {live} of {seen} known nodes are live and answer"
    )


def _describe(candidate: Candidate) -> str:
    speed = f"{candidate.tokens_per_second:.1f} tok/s" if candidate.tokens_per_second else "speed ?"
    memory = format_bytes(candidate.memory_bytes) if candidate.memory_bytes else "memory ?"
    return f"{candidate.model_id} on {candidate.node_id} [{speed}, {memory}]"
