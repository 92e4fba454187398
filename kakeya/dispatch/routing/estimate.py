"""The times that a request is expected to need on a node, term by term, in seconds.

    link      the prompt travels there, and the first token back
    load      the model is brought to memory
    wait      prompts that go first are computed
    place     all rows are taken; the first of them ends
    prefill   what is not warm of the prompt is computed, or fetched from the node that has it
                                                                             -> the first token
    decode    the other tokens, in steps that all rows share                 -> the end

A node could be best for each request by itself and bad for all, so what a request costs others, and
what it leaves them, counts too:

    rows      rows that decode there stand still for its prompt, and share their steps with it
    later     prompts that come meanwhile wait for its prompt: with `u` seconds of prompts before it
              and `x` of its own, those that come within them do so for u x + x^2 / 2 in all
    places    it takes one of the places, the dearer the more of them are taken
    copy      a credit, below 0: a prefix that conversations share, and that is warm elsewhere,
              is computed here, or fetched, and serves them here from now on; the more want it at
              once, the more it is worth

`later` and `places` are what queueing theory asks for a request that is sent to one of many queues
(Krishnan 1990; Hyytia, Penttinen, Aalto 2012): by how much the expected delay of all others grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from kakeya.core.figures import Json
from kakeya.dispatch.routing.candidate import (
    UNKNOWN_OUTPUT_TOKENS,
    NodeSpeed,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.fleet.paths.link_rates import fetch_seconds
from kakeya.prefix.names.blocks import TOKEN_BYTES
from kakeya.prefix.peers.seams import LOOKUP_S

UNKNOWN_PREFILL = 200.0
UNKNOWN_DECODE = 10.0
"""Tokens per second where no node measured any. A node that measured none, as after its start,
counts as the slowest that did: most shelves have equal nodes, and one that is started again has the
KV of its conversations."""
DECODE_SHARE = 0.1
"""Weight of a second between first token and end beside one before the first token."""
LATER_SHARE = 0.4
"""Of the delay of later prompts: others of them go to another node then."""
COPY_SHARE = 0.3
"""Of the time that a copied prefix took, which is made up for by those that find it there."""
COPY_SHARE_EACH = 0.25
"""More of it for each request in flight with the same prefix."""
MOST_BUSY = 0.9
TERMS = ("link", "load", "wait", "place", "prefill", "decode", "rows", "later", "places", "copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """KV of so many tokens that comes from a node, in `seconds`, with `bytes_per_s`."""

    tokens: int = 0
    node_id: str = ""
    seconds: float = 0.0
    bytes_per_s: float = 0.0

    def describe(self) -> Json:
        """For receipts and `kakeya explain`."""
        return {
            "node": self.node_id,
            "seconds": round(self.seconds, 3),
            "bytes_per_second": round(self.bytes_per_s),
        }


NO_FETCH = KvFetch()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEstimate:
    """The expected times of one node. Of the prompt, `warm_tokens` are there already, and those of
    `fetch` more come from another node; the others are computed."""

    node_id: str
    link_s: float
    load_s: float
    wait_s: float
    place_s: float
    prefill_s: float
    decode_s: float
    rows_s: float = 0.0
    later_s: float = 0.0
    places_s: float = 0.0
    copy_s: float = 0.0
    warm_tokens: int = 0
    fetch: KvFetch = NO_FETCH

    @property
    def fetched_tokens(self) -> int:
        """Of the prompt, the tokens whose KV comes from another node."""
        return self.fetch.tokens

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
        own = self.first_s + DECODE_SHARE * self.decode_s
        return own + self.rows_s + self.later_s + self.places_s + self.copy_s

    def describe(self) -> Json:
        """For receipts and `kakeya explain`."""
        return {
            "node": self.node_id,
            "first_s": round(self.first_s, 3),
            "end_s": round(self.end_s, 3),
            "score_s": round(self.score_s, 3),
            "terms_s": {term: round(getattr(self, f"{term}_s"), 3) for term in TERMS},
            "warm_tokens": self.warm_tokens,
            "fetched_tokens": self.fetched_tokens,
            "fetch": self.fetch.describe() if self.fetched_tokens else None,
        }


def estimate_all(
    request: RoutedRequest, nodes: Sequence[RouteCandidate]
) -> tuple[RouteEstimate, ...]:
    """Estimate the times of a request on each of the nodes, in their order."""
    prefill, decode = UNKNOWN_PREFILL, UNKNOWN_DECODE
    if measured := [one for node in nodes if (one := node.speed.prefill_tokens_per_s)]:
        prefill = min(measured)
    if measured := [one for node in nodes if (one := node.speed.decode_tokens_per_s)]:
        decode = min(measured)
    known = [replace(node, speed=node.speed.or_as(prefill, decode)) for node in nodes]
    return tuple(_estimate(request, node, known) for node in known)


def _estimate(
    request: RoutedRequest, node: RouteCandidate, nodes: Sequence[RouteCandidate]
) -> RouteEstimate:
    speed, work = node.speed, node.work
    prefill_rate = speed.prefill_tokens_per_s
    rows = [left or UNKNOWN_OUTPUT_TOKENS for left in work.rows]
    token_s = _slowdown(speed, prefill_rate, len(rows)) / prefill_rate
    warm = min(node.warm_tokens, max(0, request.prompt_tokens - 1))
    fetch = plan_fetch(request, node, nodes, warm, token_s)
    own_s = (request.prompt_tokens - warm - fetch.tokens) / prefill_rate
    wait_s = work.prompt_tokens * token_s
    decode_s = max(0, request.output_tokens - 1) * _step_s(speed, len(rows) + 1)
    return RouteEstimate(
        node_id=node.node_id,
        link_s=0.0 if node.is_local else node.link.seconds(TOKEN_BYTES * request.prompt_tokens),
        load_s=node.load_s,
        wait_s=wait_s,
        place_s=_place_s(speed, rows, work.prompts),
        prefill_s=node.warm_s + fetch.seconds + own_s * token_s * prefill_rate,
        decode_s=decode_s,
        rows_s=DECODE_SHARE * _rows_s(request, speed, rows, own_s),
        later_s=LATER_SHARE * _followers(node) * own_s * (wait_s + own_s / 2),
        places_s=_places_s(node, decode_s),
        copy_s=-_copy_s(request, nodes, warm, fetch, own_s, prefill_rate),
        warm_tokens=warm,
        fetch=fetch,
    )


def _step_s(speed: NodeSpeed, rows: int) -> float:
    """Seconds of a decode step of so many rows."""
    shared = max(0, min(rows, speed.max_rows) - 1)
    return (1 + speed.row_cost * shared) / speed.decode_tokens_per_s


def _slowdown(speed: NodeSpeed, prefill_rate: float, rows: int) -> float:
    """How many times longer prompts take beside rows that decode."""
    if not rows or not speed.piece_tokens:
        return 1.0
    return 1.0 + _step_s(speed, rows) * prefill_rate / speed.piece_tokens


def _place_s(speed: NodeSpeed, rows: list[int], prompts: int) -> float:
    """Seconds until a place is free for one more, when each of the prompts has had one."""
    free = speed.max_rows - len(rows)
    if prompts < free:
        return 0.0
    in_order = sorted(rows)
    ends = in_order[: speed.max_rows] + [0] * free
    heapify(ends)
    for left in (*in_order[speed.max_rows :], *[UNKNOWN_OUTPUT_TOKENS] * prompts):
        heapreplace(ends, ends[0] + left)
    return ends[0] * _step_s(speed, speed.max_rows)


def plan_fetch(
    request: RoutedRequest,
    node: RouteCandidate,
    nodes: Sequence[RouteCandidate],
    warm: int,
    token_s: float,
) -> KvFetch:
    """The KV behind the warm tokens that comes to a node from another one, where that is sooner
    than computing it in `token_s` each; of several the one that saves most, the first by its
    id."""
    best, best_saved_s = NO_FETCH, 0.0
    by_id = sorted(nodes, key=lambda one: one.node_id)
    for holder in by_id if request.kv_bytes_per_token else ():
        tokens = min(holder.held_tokens, request.prompt_tokens - 1) - warm
        rate = node.kv_rates.get(holder.node_id, 0.0)
        if holder.node_id == node.node_id or tokens <= 0 or rate <= 0:
            continue
        size = tokens * request.kv_bytes_per_token
        seconds = LOOKUP_S + fetch_seconds(size, rate)
        saved_s = tokens * token_s - seconds
        if saved_s > best_saved_s:
            best_saved_s = saved_s
            best = KvFetch(tokens=tokens, node_id=holder.node_id, seconds=seconds, bytes_per_s=rate)
    return best


def _rows_s(request: RoutedRequest, speed: NodeSpeed, rows: list[int], own_s: float) -> float:
    """Seconds by which all rows that decode end later."""
    shared = sum(min(left, request.output_tokens) for left in rows)
    slower_s = speed.row_cost / speed.decode_tokens_per_s
    return len(rows) * own_s + shared * slower_s


def _followers(node: RouteCandidate) -> float:
    """How many prompts follow within a second that the node stays busy for longer."""
    return node.work.prompts_per_s / (1 - min(MOST_BUSY, node.work.busy_share))


def _places_s(node: RouteCandidate, decode_s: float) -> float:
    """Seconds by which later prompts wait longer for a place."""
    taken = len(node.work.rows) + node.work.prompts + 1
    share = min(1.5, taken / node.speed.max_rows)
    wait_s = decode_s / node.speed.max_rows
    return node.work.prompts_per_s * decode_s * wait_s * share**2


def _copy_s(
    request: RoutedRequest,
    nodes: Sequence[RouteCandidate],
    warm: int,
    fetch: KvFetch,
    own_s: float,
    prefill_rate: float,
) -> float:
    """Seconds of the own prompt that make up for themselves."""
    if request.last_node:  # what is missing here is the conversation's own
        return 0.0
    warmest = max(nodes, key=lambda one: (one.warm_tokens, one.sharers))
    held = warm + fetch.tokens
    shared_s = max(0, min(warmest.warm_tokens, request.prompt_tokens - 1) - held) / prefill_rate
    share = min(1.0, COPY_SHARE + COPY_SHARE_EACH * warmest.sharers)
    return min(share * shared_s, own_s) + share * fetch.seconds
