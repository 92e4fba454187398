"""The policies of others, after their documents, in one place that sees every node as it is.

That is more than any of them has: queues, rows and the blocks of KV are read from the nodes
themselves, without a delay and without a mistake. Ours knows only what a node could know.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.routing.drive import LINK_S, Call
from benchmarks.routing.shelf import Timeline, VirtualNode
from benchmarks.routing.traces import BLOCK_TOKENS


class _Rival:
    def __init__(self, nodes: Sequence[VirtualNode], time: Timeline) -> None:
        self.nodes = nodes
        self.rng = random.Random(0)
        self.in_flight = [0] * len(nodes)

    def route(self, call: Call) -> tuple[int, float]:
        """Send it to the node that the rule picks."""
        node = self._pick(call)
        self.in_flight[node] += 1
        return node, LINK_S

    def _pick(self, call: Call) -> int:
        raise NotImplementedError

    def first(self, call: Call) -> None:
        """Nothing, for most."""

    def ended(self, call: Call) -> None:
        """It is in flight no more."""
        self.in_flight[call.node] -= 1

    def least(self, scores: Sequence[float]) -> int:
        """The node with the least score; chance decides among equals."""
        best = min(scores)
        return self.rng.choice([at for at, score in enumerate(scores) if score <= best])


class RoundRobin(_Rival):
    """One after the other."""

    _next = -1

    def _pick(self, call: Call) -> int:
        self._next = (self._next + 1) % len(self.nodes)
        return self._next


class LeastRequests(_Rival):
    """The fewest requests in flight; with `weighted`, for each speed."""

    def __init__(self, nodes: Sequence[VirtualNode], time: Timeline, *, weighted: bool) -> None:
        super().__init__(nodes, time)
        self._weights = [node.speed.prefill_tokens_per_s if weighted else 1.0 for node in nodes]

    def _pick(self, call: Call) -> int:
        return self.least(
            [
                (count + 1) / weight
                for count, weight in zip(self.in_flight, self._weights, strict=True)
            ]
        )


class LeastSeconds(_Rival):
    """The soonest first token, by queues and speeds, of a prompt of which nothing is warm."""

    def __init__(self, nodes: Sequence[VirtualNode], time: Timeline) -> None:
        super().__init__(nodes, time)
        self._tokens = [0] * len(nodes)

    def _pick(self, call: Call) -> int:
        return self.least(
            [
                (queued + call.prompt_tokens) / node.speed.prefill_tokens_per_s
                for queued, node in zip(self._tokens, self.nodes, strict=True)
            ]
        )

    def route(self, call: Call) -> tuple[int, float]:
        """Note its tokens, too."""
        node, delay_s = super().route(call)
        self._tokens[node] += call.prompt_tokens
        return node, delay_s

    def first(self, call: Call) -> None:
        """Its prompt waits no more."""
        self._tokens[call.node] -= call.prompt_tokens


class Sticky(LeastRequests):
    """Olla: a conversation stays where it began, by its key; new ones go to the least loaded."""

    def __init__(self, nodes: Sequence[VirtualNode], time: Timeline, *, weighted: bool) -> None:
        super().__init__(nodes, time, weighted=weighted)
        self._homes: dict[int, int] = {}

    def _pick(self, call: Call) -> int:
        if call.session not in self._homes:
            self._homes[call.session] = super()._pick(call)
        return self._homes[call.session]


class CacheAware(_Rival):
    """SGLang: a tree of what went to each node; the shortest queue while loads differ too much,
    else the best match above a threshold, else the smallest tree."""

    def __init__(
        self,
        nodes: Sequence[VirtualNode],
        time: Timeline,
        *,
        threshold: float,
        most_more: int,
        most_times: float,
    ) -> None:
        super().__init__(nodes, time)
        self._threshold, self._most_more, self._most_times = threshold, most_more, most_times
        self._trees: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in nodes]

    def _pick(self, call: Call) -> int:
        loads = self.in_flight
        if max(loads) - min(loads) > self._most_more and max(loads) > self._most_times * min(loads):
            node = self.least(loads)
        else:
            matches = [self._match(tree, call.blocks) for tree in self._trees]
            if max(matches) > self._threshold * len(call.blocks):
                node = self.least([-match for match in matches])
            else:
                node = self.least([len(tree) for tree in self._trees])
        tree = self._trees[node]
        for block in reversed(call.blocks):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self.nodes[node].capacity:
            tree.popitem(last=False)
        return node

    @staticmethod
    def _match(tree: OrderedDict[bytes, None], blocks: Sequence[bytes]) -> int:
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in tree:
                low = middle
            else:
                high = middle - 1
        return low


class Weighted(_Rival):
    """llm-d: the sum of scores from 0 to 1 for the prefix, the queue and the use of KV."""

    def __init__(
        self,
        nodes: Sequence[VirtualNode],
        time: Timeline,
        *,
        prefix: float,
        queue: float,
        kv: float,
        counts_running: bool,
    ) -> None:
        super().__init__(nodes, time)
        self._weights = prefix, queue, kv
        self._counts_running = counts_running

    def _pick(self, call: Call) -> int:
        prefix, queue, kv = self._weights
        queues = [
            count if self._counts_running else max(0, count - node.speed.max_rows)
            for count, node in zip(self.in_flight, self.nodes, strict=True)
        ]
        low, high = min(queues), max(queues)
        scores = [
            prefix * node.warm_blocks(call.blocks) / max(1, len(call.blocks))
            + queue * ((high - length) / (high - low) if high > low else 1.0)
            + kv * (1 - min(1.0, node.active_blocks / node.capacity))
            for node, length in zip(self.nodes, queues, strict=True)
        ]
        return self.least([-score for score in scores])


class KvCost(_Rival):
    """Dynamo: blocks to compute less credits for those that are there, rows' blocks, requests."""

    def __init__(
        self,
        nodes: Sequence[VirtualNode],
        time: Timeline,
        *,
        scale: float,
        credit: float,
        request_blocks: float,
    ) -> None:
        super().__init__(nodes, time)
        self._scale, self._credit, self._request_blocks = scale, credit, request_blocks
        self._active = [0.0] * len(nodes)
        self._owed: dict[int, float] = {}

    def _pick(self, call: Call) -> int:
        size = BLOCK_TOKENS / 16  # its blocks have 16 tokens
        incoming = call.prompt_tokens / 16
        costs = [
            self._scale
            * (self._active[at] + incoming - self._credit * size * node.warm_blocks(call.blocks))
            + sum(len(job.blocks) * size + job.emitted / 16 for job in node.rows)
            + self._request_blocks * self.in_flight[at]
            for at, node in enumerate(self.nodes)
        ]
        node = self.least(costs)
        owed = incoming - size * self.nodes[node].warm_blocks(call.blocks)
        self._active[node] += owed
        self._owed[id(call)] = owed
        return node

    def first(self, call: Call) -> None:
        """Its prompt waits no more."""
        self._active[call.node] -= self._owed.pop(id(call))
