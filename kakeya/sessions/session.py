"""One conversation as token ids: an append-only history, and the rules of its window.

Pure: no I/O, no clock; callers pass `now` in monotonic seconds. A history without room for output
is cut before a generation: the sink (the first tokens) and the newest window stay.

    [ sink ][ dropped ][ window ........ ]  -> generate ->  [ sink ][ window ........ ][ new ]

Theory: a cut moves every token behind the sink, so all their KV is computed anew. With a cut to the
limit itself, a full session would pay for that at every turn. With a cut to half of the context, it
pays once and then keeps its prefix until the other half has filled.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya.core.errors import CapacityExhausted, ConfigError, InvalidArgument, InvariantBroken
from kakeya.core.ids import SessionId
from kakeya.generation.facts import ModelFacts
from kakeya.generation.model import ServedModel
from kakeya.generation.request import MAX_PROMPT_TOKENS

MAX_HISTORY_TOKENS = 1 << 20
"""The longest history of a session: 4 MiB in the agent, far more than any model attends to."""
MAX_OUTPUT_RESERVE_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCut:
    """The rule by which a history is cut before a generation."""

    sink_tokens: int
    window_tokens: int
    limit_tokens: int
    """The longest history, together with the room kept for output, that is not cut."""
    reserve_tokens: int
    """Most room kept for output."""

    @property
    def kept_tokens(self) -> int:
        """Length of a history after a cut."""
        return self.sink_tokens + self.window_tokens

    def excess(self, history_length: int, max_tokens: int) -> int:
        """How many tokens to drop from a history before a generation of up to `max_tokens`."""
        if history_length + min(max_tokens, self.reserve_tokens) <= self.limit_tokens:
            return 0
        return max(0, history_length - self.kept_tokens)


def window_for(context_tokens: int, sink_tokens: int, window_tokens: int | None) -> HistoryCut:
    """Fit a window into a model's context.

    A given window is the limit too. Without a window, a history may fill the context up to a
    reserve for output, and a cut keeps half of the context. Raises ConfigError when there is no
    room for a new token.
    """
    room = context_tokens - sink_tokens
    kept = room // 2 if window_tokens is None else window_tokens
    if sink_tokens < 0 or kept < 1 or kept >= room:
        raise ConfigError(
            f"a sink of {sink_tokens} and a window of {kept} tokens do not fit into a "
            f"context of {context_tokens}: their sum must stay below it, the window at least 1"
        )
    is_given = window_tokens is not None
    return HistoryCut(
        sink_tokens=sink_tokens,
        window_tokens=kept,
        limit_tokens=sink_tokens + kept if is_given else context_tokens,
        reserve_tokens=0 if is_given else max(1, min(MAX_OUTPUT_RESERVE_TOKENS, room // 4)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSession:
    """All that another node needs to go on with a session; `weights` "" = not known."""

    session_id: str
    model_id: str
    client: str
    label: str
    stop_token_ids: frozenset[int]
    history: Sequence[int]
    idle_s: float
    weights: str


@dataclass(slots=True, eq=False)
class Session:
    """One session; mutated by its store and service only, one operation at a time."""

    session_id: SessionId
    model: ServedModel
    facts: ModelFacts
    window: HistoryCut
    stop_token_ids: frozenset[int]
    used_mono: float
    label: str = ""
    operation: str = ""
    """The operation that runs on the session; "" = idle."""
    failure: str = ""
    """Why the session cannot be used any more; "" = healthy."""
    client: str = ""
    """The client that opened the session; "" = unknown."""
    kv_key: str = ""
    """The engine's key of the KV of the last generation; "" before the first generation."""
    generations: int = 0
    """Those that have begun."""
    cache_length_violations: int = 0
    position_violations: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no operation runs."""
    _history: array[int] = field(default_factory=lambda: array("I"))

    @property
    def history_length(self) -> int:
        """Tokens in the history."""
        return len(self._history)

    @property
    def history(self) -> Sequence[int]:
        """A copy of the history."""
        return self._history[:]

    @property
    def is_busy(self) -> bool:
        """Whether an operation runs on the session."""
        return bool(self.operation)

    def idle_s(self, now: float) -> float:
        """Seconds since the last operation ended; 0 during an operation."""
        return 0.0 if self.is_busy else max(0.0, now - self.used_mono)

    def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens, all or none, and return the new length.

        Raises InvalidArgument for an id outside the vocabulary or for too many ids in one call,
        CapacityExhausted for a history that would be too long.
        """
        if len(token_ids) > MAX_PROMPT_TOKENS:
            raise InvalidArgument(
                f"token_ids holds {len(token_ids)} ids and one call may append "
                f"{MAX_PROMPT_TOKENS}; append the rest with further calls",
                param="token_ids",
            )
        check_vocabulary(token_ids, self.facts.vocab_size)
        length = self.history_length + len(token_ids)
        if length > MAX_HISTORY_TOKENS:
            raise CapacityExhausted(
                f"the history would have {length} tokens and may have {MAX_HISTORY_TOKENS}: "
                f"generate, which cuts it to its window, or begin a new session"
            )
        self._history.extend(token_ids)
        return length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the history that it has from another node."""
        self._history.extend(token_ids)

    def truncate(self, max_tokens: int) -> int:
        """Cut the history to sink + window if `max_tokens` more need it; return the dropped count.

        A budget above the window's reserve may still end at the full context.
        """
        dropped = self.window.excess(self.history_length, max_tokens)
        del self._history[self.window.sink_tokens : self.window.sink_tokens + dropped]
        return dropped

    def commit(self, token_id: int) -> None:
        """Add one generated token. Raises InvariantBroken when no model could have selected it."""
        if not 0 <= token_id < self.facts.vocab_size:
            raise InvariantBroken(
                "vocabulary",
                f"the engine committed token {token_id} of a vocabulary of {self.facts.vocab_size}",
            )
        self._history.append(token_id)

    def check_monotone(self, before: int, committed: int) -> None:
        """Check that an operation added only committed tokens. Raises InvariantBroken."""
        if self.history_length != before + committed:
            raise InvariantBroken(
                "position",
                f"the history had {before} tokens, {committed} were committed, "
                f"it has {self.history_length}",
            )

    def fail(self, broken: InvariantBroken) -> None:
        """Give the session up; its history is freed, its counters stay readable."""
        self.failure = broken.message
        if broken.kind == "cache_length":
            self.cache_length_violations += 1
        else:
            self.position_violations += 1
        self._history = array("I")


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument for the first id outside the vocabulary."""
    if not token_ids or (max(token_ids) < vocab_size and min(token_ids) >= 0):
        return
    index, bad = next(
        (index, token_id)
        for index, token_id in enumerate(token_ids)
        if not 0 <= token_id < vocab_size
    )
    raise InvalidArgument(
        f"token_ids[{index}] is {bad}, outside the vocabulary of {vocab_size} ids "
        f"(0..{vocab_size - 1}); nothing was appended",
        param="token_ids",
    )
