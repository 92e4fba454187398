"""A scheduler in virtual time, on this thread: a model whose every forward takes its seconds.

Each next token is a hash of all tokens whose KV a sequence holds, so that any that is lost, doubled
or another's changes everything behind it. What waits for a moment is submitted at it, however long
the forward was during which it came.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kakeya.core.errors import KakeyaError, MemoryRefused
from kakeya.decoding.control.controller import DraftController
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.limits import EngineLimits
from kakeya.engine.model import KvView, MemoryUse
from kakeya.engine.steps.drafting import RemoteBooks
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.engine.steps.sequence import SequenceTools, Violations
from kakeya.generation.frames import Done, EngineFrame, KvPark, KvWant, Progress, QueuePlace, Tokens
from kakeya.generation.kv import LOGIT_BYTES
from kakeya.generation.request import DecodeJob
from tests.engine.child_engine import ToyForward, ToyModel, ToyState

STEP_S = 0.005
TOKEN_S = 0.001
"""Of a prompt; a chunk has 32 tokens."""
CHUNK_S = 32 * TOKEN_S
_IDLE_S = 0.05
"""So long nothing happens at a time."""


def _sum(tokens: Iterable[int], before: int = 0) -> int:
    for token in tokens:
        before = zlib.crc32(token.to_bytes(4, "little"), before)
    return before


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What a whole generation gives: each next token is what the sum of all before it says."""
    total, made = _sum(prompt), []
    for _ in range(count):
        made.append(total % 100)
        total = _sum(made[-1:], total)
    return made


class HashState(ToyState):
    model: HashModel
    sums: list[int]
    """Of the first so many tokens; the first is that of none."""

    def prefill(self, tokens: Sequence[int]) -> None:
        self.model.prefilled += len(tokens)
        self.model.work(TOKEN_S * len(tokens))
        for token in tokens:
            self.append(token)

    def launch(self, token: int | None, *, keeps_logits: bool = False) -> None:
        self.model.work(self.model.step_s)
        self.step(token)

    def selected_from(self, logits: bytes) -> int:
        return logits.index(1) // LOGIT_BYTES

    def step(self, token: int | None) -> None:
        self.append(self.flight[-1] if token is None else token)
        self.flight.append(self.sums[-1] % 100)

    def verify(self, tokens: Sequence[int]) -> list[int]:
        self.model.work(self.model.step_s)
        selected = []
        for token in tokens:
            self.append(token)
            selected.append(self.sums[-1] % 100)
        return selected

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.sums.append(_sum((token,), self.sums[-1]))

    def restore(self, blocks: Sequence[KvView]) -> None:
        super().restore(blocks)
        self.sums = [0]
        for token in self.tokens:
            self.sums.append(_sum((token,), self.sums[-1]))

    def trim(self, count: int) -> bool:
        del self.sums[len(self.sums) - count :]
        return super().trim(count)


@dataclass
class HashForward(ToyForward):
    """Takes as long as the longest piece alone, each part its share."""

    model: HashModel

    def __post_init__(self) -> None:
        self.pieces = [piece for _, piece in self.members]
        longest = max(len(piece) for _, piece in self.members)
        self._part_s = TOKEN_S * longest / self.parts

    def advance(self) -> bool:
        self.model.work(self._part_s)
        self.parts -= 1
        for state, piece in self.members if not self.parts else ():
            assert isinstance(state, HashState)
            self.model.prefilled += len(piece)
            for token in piece:
                state.append(token)
        return not self.parts


class HashModel(ToyModel):
    def __init__(self, rig: VirtualRig, **facts: object) -> None:
        super().__init__("", Path())
        values = {"prefill_tokens_per_second": 1 / TOKEN_S, "forward_costs_s": {1: STEP_S}}
        self.facts = replace(self.facts, batch_rows=8, **{**values, **facts})  # type: ignore[arg-type]
        self.opened = self.prefilled = 0
        self.step_s = STEP_S
        self.shared: list[int] = []
        """Sequences in each forward over prompts."""
        self._rig = rig
        self._states: list[weakref.ref[HashState]] = []

    def open(self) -> HashState:
        self.opened += 1
        state = HashState("", Path())
        state.model, state.sums = self, [0]
        self._states.append(weakref.ref(state))
        return state

    def memory(self) -> MemoryUse:
        """A byte for each token of a state that anything still refers to and that is not stowed."""
        held = [state() for state in self._states]
        size = sum(len(one.tokens) - one.tokens.count(-1) for one in held if one is not None)
        return MemoryUse(active_bytes=size, peak_bytes=size)

    def work(self, seconds: float) -> None:
        self._rig.pass_time(seconds)

    def begin_prompts(
        self, states: Sequence[ToyState], pieces: Sequence[Sequence[int]], parts: int
    ) -> HashForward:
        self.shared.append(len(states))
        return HashForward(list(zip(states, pieces, strict=True)), parts, self)

    def launch_together(self, states: Sequence[ToyState], tokens: Sequence[int | None]) -> None:
        self.work(self.step_s)
        for state, token in zip(states, tokens, strict=True):
            assert isinstance(state, HashState)
            state.step(token)


@dataclass(eq=False)
class Told:
    """What one job came to, and when. One that can go on is asked for again, as the agent does it:
    up to `retries` times without a token between."""

    job: DecodeJob
    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    prefill_at_s: list[float] = field(default_factory=list)
    places: list[tuple[float, QueuePlace]] = field(default_factory=list)
    """Its places in the queue, each with the time at which it was told."""
    done: Done | None = None
    error: KakeyaError | None = None
    ticket: QueueTicket | None = None
    retries: int = 0
    losses_in_a_row: int = 0

    @property
    def is_over(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]


class VirtualRig:
    """`check` is called before each forward; `memory_bytes` bound what the model takes."""

    def __init__(
        self,
        *,
        places: int = 8,
        kv_bytes: int = 1 << 30,
        memory_bytes: int = 0,
        controller: DraftController | None = None,
        **facts: object,
    ) -> None:
        self.now_s = 0.0
        self.check: Callable[[], None] = lambda: None
        self.model = HashModel(self, **facts)
        self.slots = KvSlots(kv_bytes)
        tools = SequenceTools(
            slots=self.slots,
            controller=controller or DraftController(),
            books=RemoteBooks(),
            violations=Violations(),
            max_draft_rows=8,
            timer=lambda: self.now_s,
        )
        limits = EngineLimits(self.model, self.slots, resident=lambda: None, trim=lambda: False)
        limits.set(memory_bytes, 0, 0)
        self.scheduler = Scheduler(self.model, tools, max_running=places, limits=limits)
        self.scheduler._parking.wait = self._skip  # type: ignore[method-assign]
        self.parks: Callable[[Told, KvPark], None] = lambda told, frame: None
        self.wants: Callable[[KvWant], None] = lambda frame: None
        self._open: list[Told] = []
        self._is_running = False
        self._due: list[tuple[float, Callable[[], None]]] = []

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self._due.append((at_s, act))

    def submit(self, at_s: float = 0.0, *, retries: int = 0, **job: object) -> Told:
        values: dict[str, object] = {"token_ids": [1, 2, 3], "max_tokens": 4}
        told = Told(DecodeJob(**{**values, **job}), retries=retries)  # type: ignore[arg-type]
        if at_s:
            self.at(at_s, lambda: self._send(told, told.job))
        else:
            self._send(told, told.job)
        return told

    def cancel(self, at_s: float, told: Told) -> None:
        """At that time, if it was submitted by then and is not over."""

        def act() -> None:
            if told in self._open and told.ticket is not None:
                told.ticket.cancel()
                self._close(told)

        self.at(at_s, act)

    def run(self) -> None:
        """Until all have ended; with nothing to compute, what is due next comes at once."""
        while True:
            while self._open:
                self._is_running = True
                self.scheduler.run()
                self._is_running = False
            if not self._due:
                return
            self.now_s = max(self.now_s, min(at_s for at_s, _ in self._due))
            self._act()

    def pass_time(self, seconds: float) -> None:
        """A forward takes so long."""
        self.check()
        self.now_s += seconds
        self._act()

    def _skip(self) -> None:
        """Nobody computes: what is due next comes at once; else time passes all the same, for those
        that wait for pages only so long."""
        if self.scheduler._queue.waiting or self.scheduler._queue.growth.is_asking:
            next_s = min((at_s for at_s, _ in self._due), default=self.now_s + _IDLE_S)
            self.now_s = max(self.now_s, next_s)
            self._act()

    def _act(self) -> None:
        for at_s, act in [one for one in self._due if one[0] <= self.now_s]:
            self._due.remove((at_s, act))
            act()

    def _send(self, told: Told, job: DecodeJob) -> None:
        def put(frame: EngineFrame) -> None:
            if isinstance(frame, Tokens):
                told.losses_in_a_row = 0
                told.tokens += frame.token_ids
                told.at_s.append(self.now_s)
            elif isinstance(frame, Progress):
                told.prefill_at_s.append(self.now_s)
            elif isinstance(frame, QueuePlace):
                told.places.append((self.now_s, frame))
            elif isinstance(frame, KvPark):
                self.parks(told, frame)
            elif isinstance(frame, KvWant):
                self.wants(frame)
            elif isinstance(frame, Done):
                told.done = frame
                self._close(told)

        def fail(error: KakeyaError) -> None:
            if told not in self._open:  # nobody listens to a cancelled one any more
                return
            is_lost = isinstance(error, MemoryRefused) and error.retry_after_s is not None
            if is_lost and told.losses_in_a_row < told.retries:
                told.losses_in_a_row += 1
                self.at(self.now_s + error.retry_after_s, lambda: self._again(told))
            else:
                told.error = error
            self._close(told)

        told.ticket = QueueTicket(job, put, fail)
        self._open.append(told)
        self.scheduler.submit(told.ticket)

    def _again(self, told: Told) -> None:
        history = [*told.job.token_ids, *told.tokens]
        left = told.job.max_tokens - len(told.tokens)
        deadline_s = None if told.tokens else told.job.deadline_s
        job = replace(told.job, token_ids=history, max_tokens=left, deadline_s=deadline_s)
        self._send(told, job)

    def _close(self, told: Told) -> None:
        self._open.remove(told)
        if not self._open and self._is_running:
            self.scheduler.stop()
