"""The times that a request is expected to need on a node, term by term.

link      the prompt travels there, and the first token back
load      the model is brought to memory
wait      prompts that go first are computed
place     all rows are taken; the first of them ends
prefill   the part of the prompt that is not warm is computed, or comes from another node
                                                                         -> the first token
decode    the other tokens, in steps that all rows share                 -> the end
imposed   what the request costs others: rows that decode meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.core.figures import Json
from kakeya.dispatch.routing.candidate import (
    UNKNOWN_OUTPUT_TOKENS,
    NodeSpeed,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.prefix.names.blocks import TOKEN_BYTES

UNKNOWN_PREFILL = 200.0
UNKNOWN_DECODE = 10.0
"""Tokens per second of a node that measured none: slower than any that did, so that it is chosen
where others are busy, and measures itself then."""
END_SHARE = 0.25
"""Weight of a second between the first token and the end, beside one before the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEstimate:
    """The expected times of one node, in seconds. `warm_tokens` of the prompt are not computed,
    and `fetched_tokens` of these come from another node."""

    node_id: str
    link_s: float
    load_s: float
    wait_s: float
    place_s: float
    prefill_s: float
    decode_s: float
    imposed_s: float
    warm_tokens: int
    fetched_tokens: int = 0

    @property
    def first_s(self) -> float:
        """Until the first token."""
        return self.link_s + self.load_s + self.wait_s + self.place_s + self.prefill_s

    @property
    def end_s(self) -> float:
        """Until the last token."""
        return self.first_s + self.decode_s

    @property
    def score_s(self) -> float:
        """What nodes are compared by; the least is the best."""
        return self.first_s + END_SHARE * self.decode_s + self.imposed_s

    def describe(self) -> Json:
        """For receipts and `kakeya explain`."""
        terms = ("link", "load", "wait", "place", "prefill", "decode", "imposed")
        return {
            "node": self.node_id,
            "first_s": round(self.first_s, 3),
            "end_s": round(self.end_s, 3),
            "score_s": round(self.score_s, 3),
            "terms_s": {term: round(getattr(self, f"{term}_s"), 3) for term in terms},
            "warm_tokens": self.warm_tokens,
            "fetched_tokens": self.fetched_tokens,
        }


def estimate(request: RoutedRequest, node: RouteCandidate) -> RouteEstimate:
    """Estimate the times of a request on one node."""
    prefill_rate = node.speed.prefill_tokens_per_s or UNKNOWN_PREFILL
    rows = [left or UNKNOWN_OUTPUT_TOKENS for left in node.work.rows]
    slow = _slowdown(node.speed, prefill_rate, len(rows))
    warm = min(node.warm_tokens, max(0, request.prompt_tokens - 1))
    prefill_s = node.warm_s + (request.prompt_tokens - warm) / prefill_rate * slow
    step_s = _step_s(node.speed, min(len(rows) + 1, node.speed.max_rows))
    return RouteEstimate(
        node_id=node.node_id,
        link_s=0.0 if node.is_local else node.link.seconds(TOKEN_BYTES * request.prompt_tokens),
        load_s=node.load_s,
        wait_s=node.work.prompt_tokens / prefill_rate * slow,
        place_s=_place_s(node.speed, rows),
        prefill_s=prefill_s,
        decode_s=max(0, request.output_tokens - 1) * step_s,
        imposed_s=0.0,
        warm_tokens=warm,
    )


def _step_s(speed: NodeSpeed, rows: int) -> float:
    """Seconds of a decode step of so many rows."""
    return (1 + speed.row_cost * max(0, rows - 1)) / (speed.decode_tokens_per_s or UNKNOWN_DECODE)


def _slowdown(speed: NodeSpeed, prefill_rate: float, rows: int) -> float:
    """How many times longer prompts take beside rows that decode."""
    if not rows or not speed.piece_tokens:
        return 1.0
    return 1.0 + _step_s(speed, min(rows, speed.max_rows)) * prefill_rate / speed.piece_tokens


def _place_s(speed: NodeSpeed, rows: list[int]) -> float:
    """Seconds until fewer rows than the most are taken."""
    before = len(rows) - speed.max_rows
    if before < 0:
        return 0.0
    return sorted(rows)[before] * _step_s(speed, speed.max_rows)
