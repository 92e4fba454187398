"""Seeded traces: sessions of turns, with everything that chance decides drawn before a policy runs.

coding    agents share a long system prompt; prompts grow turn by turn, some turns start
          sub-agents with a system prompt of their own, and wait for all of them
chat      many short conversations with a few system prompts
unseen    prompts that no other shares anything with
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_TOKENS = 64
Segment = tuple[int, int]
"""A text by its number, and its tokens."""


@dataclass(slots=True)
class Turn:
    """What a turn adds to the prompt, `think_s` after the end of the one before."""

    added: tuple[Segment, ...]
    output: Segment
    think_s: float = 0.0
    subs: list[Session] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """A conversation; `start_s` counts for those that no turn starts."""

    number: int
    turns: list[Turn]
    start_s: float = 0.0


class History:
    """The blocks of a growing prompt: each is named by all before it and by itself."""

    __slots__ = ("_parent", "_tail", "_tail_tokens", "blocks", "tokens")

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.tokens = 0
        self._parent = 0
        self._tail: list[tuple[int, int, int]] = []
        self._tail_tokens = 0

    def add(self, segment: Segment) -> None:
        """Write a text behind what is there."""
        number, left = segment
        self.tokens += left
        start = 0
        while left:
            take = min(left, BLOCK_TOKENS - self._tail_tokens)
            self._tail.append((number, start, take))
            self._tail_tokens += take
            start, left = start + take, left - take
            if self._tail_tokens == BLOCK_TOKENS:
                self._parent = hash((self._parent, *self._tail))
                self.blocks.append(self._parent.to_bytes(8, "big", signed=True))
                self._tail, self._tail_tokens = [], 0


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._texts = 0
        self._sessions = 0

    def text(self, tokens: float) -> Segment:
        self._texts += 1
        return self._texts, max(1, int(tokens))

    def around(self, median: float, spread: float, most: float = math.inf) -> float:
        return min(most, median * math.exp(self.rng.gauss(0.0, spread)))

    def session(self, turns: list[Turn], start_s: float = 0.0) -> Session:
        self._sessions += 1
        return Session(self._sessions, turns, start_s)

    def starts(self, per_s: float, until_s: float) -> list[float]:
        found, at = [], self.rng.expovariate(per_s)
        while at < until_s:
            found.append(at)
            at += self.rng.expovariate(per_s)
        return found


def coding(seed: int, load: float, until_s: float) -> list[Session]:
    """Coding agents with sub-agents; at load 1 one begins each 33 s."""
    make = _Maker(seed)
    rng = make.rng
    programs = [make.text(tokens) for tokens in (6000, 4000, 8000)]
    helpers = [make.text(tokens) for tokens in (2500, 2000, 3000)]

    def helper(kind: int) -> Session:
        task = make.text(make.around(600, 0.5))
        turns = [Turn((helpers[kind], task), make.text(make.around(120, 0.6, 600)))]
        turns += [
            Turn(
                (make.text(make.around(400, 0.9, 4000)),),
                make.text(make.around(90, 0.6, 600)),
                think_s=rng.expovariate(1 / 1.5),
            )
            for _ in range(rng.randint(1, 4))
        ]
        return make.session(turns)

    def agent(start_s: float) -> Session:
        kind = rng.choices((0, 1, 2), (5, 3, 2))[0]
        project = make.text(make.around(1200, 0.5))
        turns = [Turn((programs[kind], project), make.text(make.around(150, 0.6, 800)))]
        for _ in range(rng.randint(5, 20)):
            is_human = rng.random() < 0.15
            turn = Turn(
                (make.text(make.around(350, 1.0, 5000)),),
                make.text(make.around(110, 0.7, 800)),
                think_s=rng.expovariate(1 / 25.0 if is_human else 1 / 2.0),
            )
            if rng.random() < 0.12:
                turn.subs = [helper(kind) for _ in range(rng.randint(2, 4))]
            turns.append(turn)
        return make.session(turns, start_s)

    return [agent(at) for at in make.starts(0.03 * load, until_s)]


def chat(seed: int, load: float, until_s: float) -> list[Session]:
    """Many short chats; at load 1 one begins each 2 s."""
    make = _Maker(seed)
    rng = make.rng
    systems = [make.text(tokens) for tokens in (1200, 800, 500, 1600, 300, 1000)]

    def conversation(start_s: float) -> Session:
        system = systems[rng.choices(range(6), (30, 20, 15, 15, 10, 10))[0]]
        first = Turn((system, make.text(make.around(120, 0.9, 2000))), make.text(150))
        turns = [first]
        turns += [
            Turn(
                (make.text(make.around(80, 0.9, 1500)),),
                make.text(make.around(140, 0.7, 800)),
                think_s=rng.expovariate(1 / 15.0),
            )
            for _ in range(min(8, int(rng.expovariate(1 / 3.0))))
        ]
        return make.session(turns, start_s)

    return [conversation(at) for at in make.starts(0.5 * load, until_s)]


def unseen(seed: int, load: float, until_s: float) -> list[Session]:
    """Prompts that share nothing; at load 1 one comes each second."""
    make = _Maker(seed)
    return [
        make.session(
            [
                Turn(
                    (make.text(make.around(900, 0.8, 8000)),),
                    make.text(make.around(110, 0.7, 600)),
                )
            ],
            at,
        )
        for at in make.starts(1.0 * load, until_s)
    ]


TRACES: dict[str, Callable[[int, float, float], list[Session]]] = {
    "coding": coding,
    "chat": chat,
    "unseen": unseen,
}
