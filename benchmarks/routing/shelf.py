"""Four nodes in virtual time: prompts computed in pieces one after the other, steps that all rows
share, and KV in blocks, of which the least recently used go first.

Between two pieces of a prompt comes a step of the rows that decode. What is warm is found when a
prompt begins to be computed; its blocks stay until its answer has ended.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.routing.traces import BLOCK_TOKENS
from kakeya.backends.recent_prompts import RecentPrompts
from kakeya.dispatch.routing.candidate import NodeSpeed

EXPECTED_OUTPUT = 128
"""What nodes and policies expect of an answer: its true length is known to none."""


class Timeline:
    """Virtual time, and what happens in it, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it then."""
        heapq.heappush(self._due, (when, next(self._count), call))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(slots=True, eq=False)
class Job:
    """A request at a node. `computes` is what is expected of its prompt when it arrives, and truly
    left once it `began`."""

    prompt_tokens: int
    blocks: Sequence[bytes]
    all_blocks: Sequence[bytes]
    output_tokens: int
    on_first: Callable[[Job], None]
    on_end: Callable[[Job], None]
    computes: int = 0
    warm_tokens: int = 0
    began: bool = False
    emitted: int = 0
    reserved: int = 0
    pinned: int = 0


class VirtualNode:
    """One node."""

    def __init__(self, name: str, speed: NodeSpeed, room_tokens: int, time: Timeline) -> None:
        self.name = name
        self.speed = speed
        self.capacity = room_tokens // BLOCK_TOKENS
        self.kv: OrderedDict[bytes, None] = OrderedDict()
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.rows: list[Job] = []
        self.served = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._pins: Counter[bytes] = Counter()
        self._reserved = 0
        self._time = time
        self._version = 0
        self._is_busy = False
        self._began_s = 0.0
        self._steps = 0
        self._piece = 0
        self.recent = RecentPrompts(time.now)

    # what is told of it

    @property
    def requests(self) -> int:
        """Those that wait, are computed or decode."""
        return len(self.waiting) + len(self.prefilling) + len(self.rows)

    @property
    def jobs(self) -> itertools.chain[Job]:
        """All of them."""
        return itertools.chain(self.prefilling, self.waiting, self.rows)

    @property
    def queued_tokens(self) -> int:
        """Of prompts that are to be computed."""
        return sum(job.computes for job in itertools.chain(self.prefilling, self.waiting))

    @property
    def active_blocks(self) -> int:
        """Blocks of KV that rows and prompts hold, and will."""
        return len(self._pins) + self._reserved

    def warm_blocks(self, blocks: Sequence[bytes]) -> int:
        """How many leading blocks are here: leaves leave first, so halves decide."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self.kv:
                low = middle
            else:
                high = middle - 1
        return low

    def promised_blocks(self, blocks: Sequence[bytes]) -> int:
        """The same, with those that prompts in front will have computed."""
        found = self.warm_blocks(blocks)
        for job in itertools.chain(self.prefilling, self.waiting):
            while (
                found < len(blocks)
                and found < len(job.blocks)
                and blocks[found] == job.blocks[found]
            ):
                found += 1
        return found

    def sharers(self, blocks: Sequence[bytes]) -> int:
        """How many requests have most of these blocks."""
        least = len(blocks) // 2
        return sum(
            len(job.blocks) > least and job.blocks[least] == blocks[least]
            for job in (self.jobs if blocks else ())
        )

    # what happens to it

    def take(self, job: Job) -> None:
        """A request arrives."""
        self.served += 1
        self.recent.begin(self._time.now)
        found = self.promised_blocks(job.blocks) * BLOCK_TOKENS
        job.computes = job.prompt_tokens - min(found, job.prompt_tokens - 1)
        self.waiting.append(job)
        if not self._is_busy:
            self._next()
        elif self._steps > 1:  # rows decode alone: they stop behind the step that runs
            step_s = self._step_s()
            done = max(1, math.ceil((self._time.now - self._began_s) / step_s))
            if done < self._steps:
                self._steps = done
                self._due(self._began_s + done * step_s)

    def receive(self, blocks: Sequence[bytes]) -> None:
        """Blocks come from another node."""
        self._touch(blocks)
        self._make_room(0)

    def _step_s(self) -> float:
        return (1 + self.speed.row_cost * (len(self.rows) - 1)) / self.speed.decode_tokens_per_s

    def _due(self, when: float) -> None:
        self._version += 1
        version = self._version
        self._time.at(when, lambda: self._done(version))

    def _next(self) -> None:
        self._admit()
        self._piece = self._steps = 0
        took = 0.0
        if self.prefilling:
            job = self.prefilling[0]
            if not job.began:
                self._begin(job)
            self._piece = min(self.speed.piece_tokens, job.computes)
            took = self._piece / self.speed.prefill_tokens_per_s
            if self.rows:
                self._steps = 1
                took += self._step_s()
        elif self.rows:
            self._steps = min(job.output_tokens - job.emitted for job in self.rows)
            took = self._steps * self._step_s()
        self._is_busy = bool(took)
        if self._is_busy:
            self._began_s = self._time.now
            self._due(self._time.now + took)

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.rows) < self.speed.max_rows:
            job = self.waiting[0]
            warm = self.warm_blocks(job.blocks)
            needed = len(job.all_blocks) - warm + 1
            for block in job.blocks[:warm]:
                self._pins[block] += 1
            if not self._make_room(needed) and (self.prefilling or self.rows):
                self._unpin(job.blocks[:warm])
                return
            self._unpin(job.blocks[:warm])
            job.reserved = needed
            self._reserved += needed
            self.waiting.popleft()
            self.prefilling.append(job)

    def _make_room(self, blocks: int) -> bool:
        """Evict the oldest blocks that no request uses."""
        over = len(self.kv) + self._reserved + blocks - self.capacity
        if over <= 0:
            return True
        for block in list(itertools.islice(self.kv, over + len(self._pins))):
            if block not in self._pins:
                del self.kv[block]
                over -= 1
                if over <= 0:
                    return True
        return False

    def _begin(self, job: Job) -> None:
        warm = self.warm_blocks(job.blocks)
        job.began = True
        job.warm_tokens = min(warm * BLOCK_TOKENS, job.prompt_tokens - 1)
        job.computes = job.prompt_tokens - job.warm_tokens
        job.pinned = warm
        self._touch(job.blocks[:warm])
        for block in job.blocks[:warm]:
            self._pins[block] += 1

    def _touch(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self.kv[block] = None
            self.kv.move_to_end(block)

    def _done(self, version: int) -> None:
        if version != self._version:
            return
        now = self._time.now
        self.busy_s += now - self._began_s
        ended: list[Job] = []
        if self._steps:
            for job in self.rows:
                job.emitted += self._steps
            ended = [job for job in self.rows if job.emitted >= job.output_tokens]
            self.rows = [job for job in self.rows if job.emitted < job.output_tokens]
        first = self._piece_done()
        for job in ended:
            self._end(job)
        self._is_busy = False
        if first is not None:
            first.on_first(first)
            if first.output_tokens > 1:
                self.rows.append(first)
            else:
                self._end(first)
        if not self._is_busy:
            self._next()

    def _piece_done(self) -> Job | None:
        """The job with the whole prompt computed, if there is one."""
        if not self._piece:
            return None
        job = self.prefilling[0]
        job.computes -= self._piece
        self.computed_tokens += self._piece
        if job.computes > 0:
            return None
        self.prefilling.popleft()
        self.recent.end(self._time.now)
        job.emitted = 1
        self._touch(job.blocks)
        for block in job.blocks[job.pinned :]:
            self._pins[block] += 1
        new = min(job.reserved, len(job.blocks) - job.pinned)
        job.reserved -= new
        self._reserved -= new
        return job

    def _end(self, job: Job) -> None:
        self._unpin(job.blocks)
        self._reserved -= job.reserved
        self._touch(job.all_blocks)
        self._make_room(0)
        job.on_end(job)

    def _unpin(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
            else:
                del self._pins[block]
