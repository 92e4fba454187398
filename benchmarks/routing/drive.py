"""Plays the sessions of a trace on four nodes with one policy, and notes the times of each request.

A session's next turn begins when the last one has ended, its sub-agents too. So a policy that is
slow gets fewer requests at a time, as with true clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.routing.shelf import Job, Timeline, VirtualNode
from benchmarks.routing.traces import BLOCK_TOKENS, History, Session
from kakeya.dispatch.routing.candidate import NodeSpeed

RATIOS = (1, 1, 2, 3)
PREFILL, DECODE = 250.0, 20.0
"""Tokens per second of a node of speed 1: those of a base M4 with a model of 8 B in 4 bits."""
ROOM_TOKENS = 40_000
"""Of KV on a node of speed 1; the others have as much more as they are faster."""
LINK_S = 0.0005
"""One way."""


@dataclass(slots=True, eq=False)
class Call:
    """A request as a policy sees it. `gateway` is the node that its client calls."""

    session: int
    gateway: int
    prompt_tokens: int
    blocks: Sequence[bytes]
    all_blocks: Sequence[bytes] = ()
    node: int = -1
    issued_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    expected_warm: int = -1
    fetched_tokens: int = 0
    job: Job | None = None

    @property
    def warm_tokens(self) -> int:
        """What was truly warm when the prompt began."""
        return self.job.warm_tokens if self.job is not None else 0


class Policy(Protocol):
    """A rule by which requests go to nodes."""

    def route(self, call: Call) -> tuple[int, float]:
        """The node, and the seconds until the request is there."""
        ...

    def first(self, call: Call) -> None:
        """The first token is there."""
        ...

    def ended(self, call: Call) -> None:
        """The answer is whole."""
        ...


@dataclass(slots=True, eq=False)
class _Running:
    session: Session
    gateway: int
    parent: Callable[[], None] | None
    history: History = field(default_factory=History)
    turn: int = 0
    waits_for: int = 0


class Drive:
    """One run."""

    def __init__(
        self,
        make: Callable[[Sequence[VirtualNode], Timeline], Policy],
        *,
        ratios: Sequence[int] = RATIOS,
    ) -> None:
        self.time = Timeline()
        self.nodes = [
            VirtualNode(
                f"mini-{number}",
                NodeSpeed(
                    prefill_tokens_per_s=PREFILL * ratio,
                    decode_tokens_per_s=DECODE * ratio,
                    row_cost=0.15,
                    piece_tokens=256,
                    max_rows=8,
                ),
                ROOM_TOKENS * ratio,
                self.time,
            )
            for number, ratio in enumerate(ratios, start=1)
        ]
        self.policy = make(self.nodes, self.time)
        self.calls: list[Call] = []

    def play(self, sessions: Sequence[Session]) -> list[Call]:
        """All sessions to their ends."""
        for session in sessions:
            running = _Running(session, session.number % len(self.nodes), None)
            self.time.at(session.start_s, lambda running=running: self._issue(running))
        self.time.run()
        return self.calls

    def _issue(self, running: _Running) -> None:
        turn = running.session.turns[running.turn]
        for text in turn.added:
            running.history.add(text)
        prompt_tokens, blocks = running.history.tokens, tuple(running.history.blocks)
        running.history.add(turn.output)
        call = Call(running.session.number, running.gateway, prompt_tokens, blocks)
        call.all_blocks = tuple(running.history.blocks)
        call.issued_s = self.time.now
        self.calls.append(call)
        call.node, delay_s = self.policy.route(call)

        def first(_: Job) -> None:
            call.first_s = self.time.now + LINK_S
            self.policy.first(call)

        def end(_: Job) -> None:
            call.ended_s = self.time.now + LINK_S
            self.policy.ended(call)
            self._turn_over(running)

        call.job = Job(prompt_tokens, blocks, call.all_blocks, turn.output[1], first, end)
        job = call.job
        self.time.at(self.time.now + delay_s, lambda: self._arrive(call, job))

    def _arrive(self, call: Call, job: Job) -> None:
        node = self.nodes[call.node]
        if call.fetched_tokens:
            node.receive(call.blocks[: call.fetched_tokens // BLOCK_TOKENS])
        node.take(job)

    def _turn_over(self, running: _Running) -> None:
        turn = running.session.turns[running.turn]
        running.waits_for = len(turn.subs)
        for sub in turn.subs:
            child = _Running(sub, running.gateway, lambda: self._sub_over(running))
            self.time.at(self.time.now, lambda child=child: self._issue(child))
        if not turn.subs:
            self._next_turn(running)

    def _sub_over(self, running: _Running) -> None:
        running.waits_for -= 1
        if not running.waits_for:
            self._next_turn(running)

    def _next_turn(self, running: _Running) -> None:
        running.turn += 1
        if running.turn < len(running.session.turns):
            think_s = running.session.turns[running.turn].think_s
            self.time.at(self.time.now + think_s, lambda: self._issue(running))
        elif running.parent is not None:
            running.parent()
