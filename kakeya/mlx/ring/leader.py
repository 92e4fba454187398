"""The model of a ring group at rank 0: an `MlxModel` each call of which other ranks repeat.

A call is told before it is computed here, so that all ranks compute at the same time. What changes
only bookkeeping is told together with the next forward. What the ranks of a group cannot repeat is
refused: KV in pages (a page would hold the share of one rank), adapters, and drafts for peers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import cast

from kakeya.core.errors import KakeyaError, Unsupported
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.engine.model import DeviceLost, PromptForward, SequenceState
from kakeya.engine.ring.leader import RingLeader
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier


class RingCalls:
    """Tells calls in order; a number names a sequence or a forward of prompts at all ranks."""

    def __init__(self, leader: RingLeader) -> None:
        self._leader = leader
        self._numbers = count(1)
        # Objects end on whatever thread their last name goes; the next call tells it.
        self._later: deque[Sequence[object]] = deque()

    def name(self, owner: object) -> int:
        """A new number for an object, which followers forget when it is gone."""
        number = next(self._numbers)
        weakref.finalize(owner, self._later.append, ("drop", number)).atexit = False
        return number

    def later(self, *call: object) -> None:
        """Tell a call that computes nothing, with the next one that does."""
        self._later.append(call)

    @contextmanager
    def told(self, *call: object, tokens: int = 1) -> Iterator[None]:
        """Tell a call of so many tokens that is computed meanwhile.

        Raises DeviceLost where it fails: the other ranks may be past it.
        """
        calls = [self._later.popleft() for _ in range(len(self._later))]
        self._leader.tell(*calls, call, tokens=tokens)
        with self.computing(tokens):
            yield

    @contextmanager
    def computing(self, tokens: int = 1) -> Iterator[None]:
        """Compute a call that was told, or is told later."""
        with self._leader.working(tokens):
            try:
                yield
            except KakeyaError:
                raise
            except Exception as failure:
                raise DeviceLost(f"the ranks of the group have parted: {failure!r}") from failure


class LeaderVerifier(MlxVerifier):
    """A sequence that has its share of KV at each rank."""

    def __init__(self, model: LoadedModel, calls: RingCalls) -> None:
        super().__init__(model)
        self._calls = calls
        self.number = calls.name(self)
        calls.later("open", self.number)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens and wait until their KV is computed."""
        with self._calls.told("prefill", self.number, list(tokens), tokens=len(tokens)):
            super().prefill(tokens)

    def launch(self, token: int | None, *, keeps_logits: bool = False) -> None:
        """Start a plain step."""
        with self._calls.told("launch", self.number, token):
            super().launch(token, keeps_logits=keeps_logits)

    def collect(self) -> int:
        """Wait for the oldest launched step."""
        self._calls.later("collect", self.number)
        with self._calls.computing():
            return super().collect()

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` in one forward."""
        with self._calls.told("verify", self.number, list(tokens), tokens=len(tokens)):
            return super().verify(tokens)

    def trim(self, count: int) -> bool:
        """Drop the KV of the last `count` tokens."""
        self._calls.later("trim", self.number, count)
        return super().trim(count)

    def pretend(self, length: int) -> bool:
        """Make the layers hold made-up tokens, for timing."""
        self._calls.later("pretend", self.number, length)
        return super().pretend(length)


class LeaderForward:
    """Implements `engine.model.PromptForward`; the other ranks compute the same parts."""

    def __init__(
        self,
        calls: RingCalls,
        begin: Callable[[], PromptForward],
        sequences: Sequence[int],
        pieces: Sequence[Sequence[int]],
        parts: int,
    ) -> None:
        self._calls = calls
        self._number = calls.name(self)
        self._tokens = sum(map(len, pieces))
        with calls.told("begin", self._number, sequences, pieces, parts, tokens=self._tokens):
            self._inner = begin()

    @property
    def parts(self) -> int:
        """Parts that are left."""
        return self._inner.parts

    def advance(self) -> bool:
        """Compute the next part."""
        with self._calls.told("advance", self._number, tokens=self._tokens):
            return self._inner.advance()

    def leave(self, state: SequenceState) -> None:
        """Append nothing to this sequence."""
        self._calls.later("leave", self._number, cast("LeaderVerifier", state).number)
        self._inner.leave(state)


class RingModel(MlxModel):
    """Implements `engine.model.Model` at rank 0."""

    def __init__(self, loaded: LoadedModel, load_s: float, fast: bool, leader: RingLeader) -> None:
        """Check the model, as all ranks do at the same time."""
        self._calls = RingCalls(leader)
        super().__init__(loaded, load_s, fast)

    def open(self) -> LeaderVerifier:
        """A new, empty sequence."""
        return LeaderVerifier(self._loaded, self._calls)

    def begin_prompts(
        self, states: Sequence[SequenceState], pieces: Sequence[Sequence[int]], parts: int
    ) -> PromptForward:
        """Begin to append a piece to each sequence."""
        begin = partial(super().begin_prompts, states, pieces, parts)
        if self.facts.prefill_parts == 1:
            return begin()  # a piece of one sequence, which tells it itself
        return LeaderForward(self._calls, begin, _numbers(states), list(map(list, pieces)), parts)

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        """Start a plain step of each sequence in one forward."""
        with self._calls.told("launch_together", _numbers(states), list(tokens)):
            super().launch_together(states, tokens)

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Raises Unsupported."""
        raise Unsupported("a ring group drafts for no peer: it is slower than a node alone")

    def tidy(self) -> None:
        """Give buffers that no array uses back, at all ranks."""
        self._calls.later("tidy")
        super().tidy()


def _numbers(states: Sequence[SequenceState]) -> list[int]:
    return [state.number for state in cast("Sequence[LeaderVerifier]", states)]
