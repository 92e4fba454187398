"""The requests that this node routed, and that the figures of the nodes may not count yet.

A node's figures are of some moment. What was routed to it after that moment is added to them: the
prompt waits there, the answer will be a row, and the blocks of the prompt will be warm for the next
request with the same prefix. Newer figures count it themselves, and the ledger adds nothing any
more. So many requests at the same time do not all choose the node that was idle a moment ago, and
what a node evicted or lost is promised no longer than until its next figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kakeya.dispatch.routing.candidate import RouteCandidate, RoutedRequest
from kakeya.dispatch.routing.decision import RouteDecision

KEPT_S = 60.0
"""How long the blocks of an ended request are promised at most, without newer figures."""


@dataclass(slots=True)
class _Routed:
    """A request that was routed; `computes` tokens of its prompt. Moments are None = not yet."""

    node_id: str
    request: RoutedRequest
    computes: int
    begun_mono: float
    first_mono: float | None = None
    ended_mono: float | None = None

    def is_known(self, made_mono: float) -> bool:
        """Whether figures of so late say all about it: what is computed then is warm there."""
        return self.first_mono is not None and self.first_mono < made_mono


class RouteLedger:
    """The routed requests; times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._routed: dict[str, _Routed] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._routed)

    def begin(self, key: str, request: RoutedRequest, decision: RouteDecision, now: float) -> None:
        """Note that a request goes to the chosen node, before the next one is decided. Each try
        has a key of its own."""
        computes = request.prompt_tokens - decision.chosen.warm_tokens
        self._routed[key] = _Routed(decision.node_id, request, computes, now)

    def first_token(self, key: str, now: float) -> None:
        """Note that the prompt is computed."""
        if (routed := self._routed.get(key)) is not None and routed.first_mono is None:
            routed.first_mono = now

    def end(self, key: str, now: float) -> None:
        """Note that a request has ended; without a first token it left nothing."""
        if (routed := self._routed.get(key)) is None:
            return
        if routed.first_mono is None:
            del self._routed[key]
        else:
            routed.ended_mono = now

    def corrected(
        self, request: RoutedRequest, candidates: Sequence[RouteCandidate], now: float
    ) -> tuple[RouteCandidate, ...]:
        """The candidates with all that was routed to them since their figures were made."""
        self._forget(candidates, now)
        return tuple(self._corrected(request, one, now) for one in candidates)

    def _forget(self, candidates: Sequence[RouteCandidate], now: float) -> None:
        """Forget ended requests that the figures of their nodes count, or of long ago."""
        made = {one.node_id: now - one.age_s for one in candidates}
        done = [
            key
            for key, routed in self._routed.items()
            if routed.ended_mono is not None
            and routed.ended_mono < max(made.get(routed.node_id, 0.0), now - KEPT_S)
        ]
        for key in done:
            del self._routed[key]

    def _corrected(
        self, request: RoutedRequest, node: RouteCandidate, now: float
    ) -> RouteCandidate:
        made_mono = now - node.age_s
        tokens, rows, warm = 0, list[int](), node.warm_tokens
        for routed in self._of(node.node_id):
            if not routed.is_known(made_mono):
                warm = max(warm, common_tokens(request, routed.request))
            if routed.begun_mono < made_mono or routed.ended_mono is not None:
                continue
            rows.append(routed.request.output_tokens)
            if routed.first_mono is None:
                tokens += routed.computes
        if not rows and warm == node.warm_tokens:
            return node
        work = replace(
            node.work,
            prompt_tokens=node.work.prompt_tokens + tokens,
            rows=(*node.work.rows, *rows),
        )
        return replace(node, work=work, warm_tokens=warm)

    def _of(self, node_id: str) -> Iterator[_Routed]:
        return (routed for routed in self._routed.values() if routed.node_id == node_id)


def common_tokens(one: RoutedRequest, other: RoutedRequest) -> int:
    """How many leading tokens two prompts share, in whole blocks."""
    if one.block_tokens != other.block_tokens:
        return 0
    low, high = 0, min(len(one.blocks), len(other.blocks))
    while low < high:  # a block names all before it
        middle = (low + high + 1) // 2
        if one.blocks[middle - 1] == other.blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * one.block_tokens
