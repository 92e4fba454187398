"""The product's own decision, as nodes use it: any node takes requests, each with a ledger of its
own, and asks all others for their figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.routing.drive import LINK_S, Call
from benchmarks.routing.shelf import EXPECTED_OUTPUT, Timeline, VirtualNode
from benchmarks.routing.traces import BLOCK_TOKENS
from kakeya.dispatch.routing.candidate import (
    NodeLink,
    QueuedWork,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.dispatch.routing.decision import choose
from kakeya.dispatch.routing.ledger import RouteLedger
from kakeya.fleet.paths.link_rates import fetch_seconds
from kakeya.prefix.peers.seams import LOOKUP_S

ASK_S = 0.002
BYTES_PER_S = 1.1e9
"""10 Gbit."""


class Shelf:
    """The product's decision. Clients call one address or four. Without `tells` nodes are of an
    older build, which tell neither their rates nor what is alike in flight: a gateway knows that of
    its own requests. With `kv_bytes_per_token` nodes carry KV."""

    def __init__(
        self,
        nodes: Sequence[VirtualNode],
        time: Timeline,
        *,
        addresses: int,
        tells: bool = True,
        kv_bytes_per_token: int = 0,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self._nodes = nodes
        self._time = time
        self._addresses = addresses
        self._tells = tells
        self._kv_bytes_per_token = kv_bytes_per_token
        self._bytes_per_s = bytes_per_s
        self._ledgers = [RouteLedger() for _ in nodes]
        self._last: dict[int, str] = {}
        self._coming: list[list[tuple[float, bytes]]] = [[] for _ in nodes]
        """By node, when KV is there that is on its way, and its last block."""

    def route(self, call: Call) -> tuple[int, float]:
        """Decide as the call's gateway."""
        if self._addresses == 1:
            call.gateway = 0
        now = self._time.now
        request = RoutedRequest(
            prompt_tokens=call.prompt_tokens,
            output_tokens=EXPECTED_OUTPUT,
            conversation=str(call.session),
            last_node=self._last.get(call.session, ""),
            blocks=tuple(call.blocks),
            block_tokens=BLOCK_TOKENS,
            kv_bytes_per_token=self._kv_bytes_per_token,
        )
        ledger = self._ledgers[call.gateway]
        exact = [self._exact(request, at, call.gateway) for at in range(len(self._nodes))]
        decision = choose(request, ledger.corrected(request, exact, now))
        key = str(id(call))
        ledger.begin(key, request, decision, now)
        self._last[call.session] = decision.node_id
        chosen = decision.chosen
        call.fetched_tokens = chosen.fetched_tokens and chosen.warm_tokens + chosen.fetched_tokens
        call.expected_warm = chosen.warm_tokens + chosen.fetched_tokens
        at = next(at for at, node in enumerate(self._nodes) if node.name == decision.node_id)
        delay_s = ASK_S + (0.0 if at == call.gateway else LINK_S)
        return at, self._with_kv_s(call, at, chosen.fetched_tokens, delay_s)

    def _with_kv_s(self, call: Call, at: int, fetched: int, delay_s: float) -> float:
        """Until a request is at its node with KV that is carried there, for it or for another one
        before it: a node fetches each block once."""
        now, coming = self._time.now, self._coming[at]
        if fetched:
            delay_s += LOOKUP_S + fetch_seconds(
                fetched * self._kv_bytes_per_token, self._bytes_per_s
            )
            coming.append((now + delay_s, call.blocks[call.fetched_tokens // BLOCK_TOKENS - 1]))
        self._coming[at] = coming = [one for one in coming if one[0] > now]
        ours = set(call.blocks)
        return max(delay_s, *(when - now for when, last in coming if last in ours), 0.0)

    def first(self, call: Call) -> None:
        """The first token."""
        self._ledgers[call.gateway].first_token(str(id(call)), self._time.now)

    def ended(self, call: Call) -> None:
        """The end."""
        self._ledgers[call.gateway].end(str(id(call)), self._time.now)

    def _figures(self, at: int, warm_tokens: int) -> RouteCandidate:
        node = self._nodes[at]
        recent, now = node.recent, self._time.now
        return RouteCandidate(
            node_id=node.name,
            speed=node.speed,
            work=QueuedWork(
                prompt_tokens=node.queued_tokens,
                prompts=len(node.prefilling) + len(node.waiting),
                rows=tuple(max(16, EXPECTED_OUTPUT - job.emitted) for job in node.rows),
                prompts_per_s=recent.per_s(now) if self._tells else 0.0,
                busy_share=recent.busy_share(now) if self._tells else 0.0,
            ),
            link=NodeLink(round_trip_s=2 * LINK_S, bytes_per_s=self._bytes_per_s),
            warm_tokens=warm_tokens,
            kv_rates={other.name: self._bytes_per_s for other in self._nodes if other is not node},
        )

    def _exact(self, request: RoutedRequest, at: int, gateway: int) -> RouteCandidate:
        node = self._nodes[at]
        blocks = held = node.warm_blocks(request.blocks)
        if self._tells:
            blocks = node.promised_blocks(request.blocks)
        most = request.prompt_tokens - 1
        figures = self._figures(at, min(blocks * BLOCK_TOKENS, most))
        sharers = node.sharers(request.blocks) if self._tells else 0
        held_tokens = min(held * BLOCK_TOKENS, most)
        is_local = at == gateway
        return replace(figures, is_local=is_local, sharers=sharers, held_tokens=held_tokens)
