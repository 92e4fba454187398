"""The choice of a node: the one with the best score, of those that can serve the request in time.

    deadline   nodes that are expected to meet it come before those that are not
    score      seconds to the first token, a part of those to the end, and what others wait for it
    ties       scores within TIE of each other: the node that served the conversation last, then
               the own node, then the better score, then the least id

The order of the candidates has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.errors import PeerUnavailable
from kakeya.core.figures import Json
from kakeya.dispatch.routing.candidate import RouteCandidate, RoutedRequest
from kakeya.dispatch.routing.estimate import RouteEstimate, estimate_all
from kakeya.generation.facts import ModelState

TIE_S = 0.02
TIE = 0.05
"""Scores that differ by less than both together are equal: figures are no better than that."""
RETRY_S = 5.0
"""Until a caller may try again: a node that was lost is back, or its card is gone."""


class NoRoute(PeerUnavailable):
    """No node can serve the request; `reasons` says of each why not."""

    code = "no_route"

    def __init__(self, reasons: Sequence[tuple[str, str]]) -> None:
        said = "; ".join(f"{node_id}: {why}" for node_id, why in reasons)
        super().__init__(
            f"no node can serve the request: {said or 'no node has the model'}",
            retry_after_s=RETRY_S,
        )
        self.reasons = tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    """The chosen node and why; `estimates` are of all nodes that could serve, the best first, and
    `unfit` the others with their reasons."""

    node_id: str
    reason: str
    estimates: tuple[RouteEstimate, ...]
    unfit: tuple[tuple[str, str], ...] = ()

    @property
    def chosen(self) -> RouteEstimate:
        """The estimate of the chosen node."""
        return next(one for one in self.estimates if one.node_id == self.node_id)

    def describe(self) -> Json:
        """For receipts and `kakeya explain`."""
        return {
            "node": self.node_id,
            "reason": self.reason,
            "candidates": [one.describe() for one in self.estimates],
            "unfit": dict(self.unfit),
        }


def choose(request: RoutedRequest, candidates: Sequence[RouteCandidate]) -> RouteDecision:
    """Choose the node of a request. Raises NoRoute."""
    unfit = tuple(sorted((one.node_id, why) for one in candidates if (why := _unfit(one))))
    fit = {one.node_id: one for one in candidates if not _unfit(one)}
    if not fit:
        raise NoRoute(unfit)
    estimates = sorted(
        estimate_all(request, tuple(fit.values())), key=lambda one: (one.score_s, one.node_id)
    )
    deadline_s = float("inf") if request.deadline_s is None else request.deadline_s
    timely = [one for one in estimates if one.first_s <= deadline_s]
    best = (timely or estimates)[0]
    equals = [one for one in timely or estimates if one.score_s <= best.score_s * (1 + TIE) + TIE_S]
    chosen = min(
        equals,
        key=lambda one: (
            one.node_id != request.last_node,
            not fit[one.node_id].is_local,
            one.score_s,
            one.node_id,
        ),
    )
    reason = _reason(request, chosen, equals, estimates, is_late=not timely)
    return RouteDecision(
        node_id=chosen.node_id, reason=reason, estimates=tuple(estimates), unfit=unfit
    )


def _unfit(node: RouteCandidate) -> str:
    if node.unfit:
        return node.unfit
    return "the model is stopped there" if node.state is ModelState.STOPPED else ""


def _reason(
    request: RoutedRequest,
    chosen: RouteEstimate,
    equals: Sequence[RouteEstimate],
    estimates: Sequence[RouteEstimate],
    *,
    is_late: bool,
) -> str:
    """Why a node was chosen, in words."""
    said = f"first token in about {chosen.first_s:.2f} s"
    if chosen.warm_tokens:
        said += f", {chosen.warm_tokens} of {request.prompt_tokens} tokens are warm there"
    if chosen.fetched_tokens:
        said += f", {chosen.fetched_tokens} come from {chosen.fetch.node_id}"
    if len(estimates) == 1:
        return f"the only node that can serve it: {said}"
    if is_late:
        said += f"; no node is expected to meet the deadline of {request.deadline_s:.1f} s"
    if len(equals) > 1:
        why = "served the conversation last" if chosen.node_id == request.last_node else "is first"
        return f"{said}; of {len(equals)} nodes that are as good it {why}"
    other = next(one for one in estimates if one is not chosen)
    return f"{said}; the next best, {other.node_id}, in {other.first_s:.2f} s"
