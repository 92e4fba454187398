"""The requests that this node routed, and that the figures of the nodes may not count yet.

A node's figures are of some moment. What was routed to it after that moment is added to them: the
prompt waits there, the answer will be a row, and the blocks of the prompt will be warm for the next
request with the same prefix. Newer figures count it themselves, and the ledger adds nothing any
more. So many requests at the same time do not all choose the node that was idle a moment ago, and
what a node evicted or lost is promised no longer than until its next figures.

How many prompts come to a node, and how busy they keep it, is measured here too: nodes tell it of
all requests where they can, and this node knows it of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kakeya.dispatch.routing.candidate import QueuedWork, RouteCandidate, RoutedRequest
from kakeya.dispatch.routing.decision import RouteDecision
from kakeya.dispatch.routing.estimate import UNKNOWN_PREFILL

KEPT_S = 60.0
"""How long the blocks of an ended request are promised at most, without newer figures."""
WINDOW_S = 60.0
"""The time over which rates are measured."""
_LEAST_SPAN_S = 10.0
"""One request after a start is no rate yet."""


@dataclass(slots=True)
class _Routed:
    """A request that was routed; `computes` tokens of its prompt. It is at its node from
    `there_mono` on. Moments are None = not yet."""

    node_id: str
    request: RoutedRequest
    computes: int
    there_mono: float
    first_mono: float | None = None
    ended_mono: float | None = None

    def is_known(self, made_mono: float) -> bool:
        """Whether figures of so late say all about it: what is computed then is warm there."""
        return self.first_mono is not None and self.first_mono < made_mono


class RouteLedger:
    """The routed requests; times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._routed: dict[str, _Routed] = {}
        self._lately: deque[tuple[float, str, int]] = deque()
        """When a prompt went to which node, and its tokens to compute."""
        self._since_mono: float | None = None

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._routed)

    def begin(self, key: str, request: RoutedRequest, decision: RouteDecision, now: float) -> None:
        """Note that a request goes to the chosen node, before the next one is decided. Each try
        has a key of its own."""
        chosen = decision.chosen
        computes = request.prompt_tokens - chosen.warm_tokens - chosen.fetched_tokens
        self._routed[key] = _Routed(decision.node_id, request, computes, now + chosen.link_s)
        self._lately.append((now, decision.node_id, computes))
        self._since_mono = now if self._since_mono is None else self._since_mono

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
        while self._lately and self._lately[0][0] < now - WINDOW_S:
            self._lately.popleft()

    def _corrected(
        self, request: RoutedRequest, node: RouteCandidate, now: float
    ) -> RouteCandidate:
        made_mono = now - node.age_s
        tokens, prompts, rows, warm = 0, 0, list[int](), node.warm_tokens
        there, sharers = 0, 0
        for routed in self._routed.values():
            if routed.node_id != node.node_id:
                continue
            common = common_tokens(request, routed.request)
            if not routed.is_known(made_mono):
                warm = max(warm, common)
            if routed.ended_mono is not None:
                continue
            shares = 2 * common > request.prompt_tokens
            if routed.there_mono < made_mono:
                there += shares
                continue
            sharers += shares
            if routed.first_mono is None:
                tokens += routed.computes
                prompts += 1
            else:
                rows.append(routed.request.output_tokens)
        work = replace(
            self._rated(node, now),
            prompt_tokens=node.work.prompt_tokens + tokens,
            prompts=node.work.prompts + prompts,
            rows=(*node.work.rows, *rows),
        )
        return replace(
            node, work=work, warm_tokens=warm, sharers=max(node.sharers, there) + sharers
        )

    def _rated(self, node: RouteCandidate, now: float) -> QueuedWork:
        """The node's work with the rates of this node's requests, where it tells no higher ones."""
        if self._since_mono is None:
            return node.work
        computes = [tokens for _, node_id, tokens in self._lately if node_id == node.node_id]
        span_s = min(WINDOW_S, max(_LEAST_SPAN_S, now - self._since_mono))
        busy_s = sum(computes) / (node.speed.prefill_tokens_per_s or UNKNOWN_PREFILL)
        return replace(
            node.work,
            prompts_per_s=max(node.work.prompts_per_s, len(computes) / span_s),
            busy_share=max(node.work.busy_share, min(1.0, busy_s / span_s)),
        )


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
