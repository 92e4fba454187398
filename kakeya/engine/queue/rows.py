"""A generation in an engine: the ticket that was submitted, and its row in queue and batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kakeya.core.errors import KakeyaError
from kakeya.decoding.processors.grammar import GrammarMatcher
from kakeya.engine.model import PromptForward
from kakeya.engine.queue.policy import GenerationClaim
from kakeya.engine.steps.prompt import PromptPiece
from kakeya.engine.steps.sequence import Launch, SequenceRun, Step
from kakeya.generation.frames import EngineFrame
from kakeya.generation.kv import PageRef
from kakeya.generation.request import DecodeJob


@dataclass(slots=True, eq=False)
class QueueTicket:
    """One submitted generation; `grammar` is a new matcher for that of its job. `cancel` may be
    called from any thread."""

    job: DecodeJob
    on_frame: Callable[[EngineFrame], None]
    on_error: Callable[[KakeyaError], None]
    grammar: GrammarMatcher | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _on_cancel: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        """End it before its next step; the tokens that it committed stay in its KV."""
        self._cancelled.set()
        self._on_cancel()

    def when_cancelled(self, call: Callable[[], None]) -> None:
        """Call this on the thread that cancels it; at once if it is cancelled already."""
        self._on_cancel = call
        if self.cancelled:
            call()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()


@dataclass(slots=True, eq=False, kw_only=True)
class PieceWork:
    """A forward over pieces of these rows' prompts that is begun and not done.

    Rows may leave it: `is_shared` if it was begun with several. It was expected to take
    `expected_s`, a part of it `part_s`, and took `took_s` so far.
    """

    rows: list[QueueRow]
    is_shared: bool
    expected_s: float
    forward: PromptForward = field(init=False)
    part_s: float = 0.0
    took_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class QueueRow(GenerationClaim):
    """A generation from its arrival to its end.

    `run` is there once it has begun, and while it is parked too. `piece` of its prompt is due, and
    `work` the forward that computes it. `launch` is a plain step that is due and waits for the step
    of the batch. `whole_bytes` is its KV at its longest.
    """

    ticket: QueueTicket
    run: SequenceRun | None = None
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))
    piece: PromptPiece | None = None
    work: PieceWork | None = None
    launch: Launch | None = None
    placed_s: float = 0.0
    chunk_ended_s: float = 0.0
    """When its last part was done."""
    whole_bytes: int = 0
    lacks_since_s: float | None = None
    """Since when it is parked because there is no memory for its next tokens."""
    headroom: int = 0
    """Tokens that it can still make within the room that is set aside for it."""
    pages: tuple[PageRef, ...] | None = None
    """Pages lent for its KV while it is parked, () = the agent has none; `asked_s` is when the
    engine asked for them."""
    asked_s: float | None = None
    asks: int = 0
    is_stowed: bool = False
    """Whether its KV lies in these pages."""
    has_drafts: bool = False
    is_prefilling: bool = False
    has_first_token: bool = False
    mark_s: float = 0.0
    mark_tokens: int = 0
    """From when, and behind how many tokens, its speed is measured."""
    told_s: float = 0.0
    """The first estimate that it was told, 0 = none; `told_at_s` is when."""
    told_at_s: float = 0.0
    is_over: bool = False

    @property
    def length(self) -> int:
        """Tokens with KV."""
        return 0 if self.run is None else self.run.length

    @property
    def made(self) -> int:
        """Tokens of its answer with KV."""
        return max(0, self.length + 1 - len(self.ticket.job.token_ids))

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt that are to be computed."""
        return max(0, len(self.ticket.job.token_ids) - 1 - self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A row that gets a place: first `parks` are parked for it, then `drops` lose their KV.

    `needs_bytes` are missing for it, and to be asked for before anything else.
    """

    row: QueueRow
    needs_bytes: int = 0
    parks: tuple[QueueRow, ...] = ()
    drops: tuple[QueueRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of the model thread; parked sequences count as waiting.

    `batch_rows` took part in the last shared forward: 0 = none was yet, 1 = it failed, and
    sequences take turns.
    """

    running: int
    waiting: int
    batch_rows: int = 0
