"""One generation on the model thread, as a generator of steps: frames, and launches between them.

    prefill   the part of the history that no KV covers, kept here or taken from blocks, in chunks
              on a fixed grid that is finer behind a long context and at the request's cuts, all
              but the last token; a frame each, so a cancellation is noticed in between; blocks are
              exported on the way
    first     a plain step alone, told at once: nothing else is launched or drafted before; where
              its logits are known, the token is told even before the step is done
    flight    plain steps in a pipeline: the next row is launched before this one is read
    quiet     nothing in flight; the last committed token is pending

From flight, a draft is entered confirm-first: the row in flight is read, and only when it equals
the first drafted token are the others verified. From quiet, a block is verified at once. Drafts
that are not verified are scored against the tokens of plain decoding, for free.

The caller of the generator computes pieces of the prompt and launches plain steps, so that many
sequences can share a forward: `steps` yields a `PromptPiece` or a `Launch`, and goes on once that
was done; `frames` is `steps` of a sequence that is alone.

Law, checked after each step: the KV holds `committed - 1` tokens, plus the row in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kakeya.core.errors import InvariantBroken, NotFound
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.draft.decoder import Commit, Decoding
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.processors.grammar import GrammarMatcher, Grammars
from kakeya.decoding.processors.processors import processors_of
from kakeya.engine.adapters.slots import EngineAdapters, SlottedAdapter
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import Model, SequenceState
from kakeya.engine.steps.drafting import NOTHING, Drafting, RemoteBooks
from kakeya.engine.steps.prompt import Prompt, PromptPiece
from kakeya.generation.frames import (
    Done,
    EngineFrame,
    HistoryLogits,
    KvImported,
    StopReason,
    Tokens,
    Usage,
)
from kakeya.generation.request import DecodeJob, Sampling


@dataclass(slots=True)
class Violations:
    """Laws that did not hold, counted over the engine's life."""

    cache_length: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTools:
    """Tools that all sequences of an engine share."""

    slots: KvSlots
    controller: DraftController
    books: RemoteBooks
    violations: Violations
    max_draft_rows: int
    timer: Callable[[], float] = time.perf_counter
    adapters: EngineAdapters | None = None
    grammars: Grammars | None = None


@dataclass(slots=True, eq=False)
class Launch:
    """A plain step that is due: of `token`, or, for None, of the token that the step before it will
    select.

    `is_shared` says afterwards that other sequences were in the same forward; `keeps_logits`: see
    `SequenceState.launch`. The token that it selects `is_needed` before the next step is launched.
    """

    state: SequenceState
    token: int | None
    is_shared: bool = False
    keeps_logits: bool = False
    is_needed: bool = False

    def alone(self) -> None:
        """Launch it in a forward of its own."""
        self.state.launch(self.token, keeps_logits=self.keeps_logits)


Step: TypeAlias = EngineFrame | PromptPiece | Launch


class SequenceRun:
    """The life of one generation; made and used on the model thread only. `state` is its KV."""

    def __init__(
        self,
        model: Model,
        tools: SequenceTools,
        job: DecodeJob,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """`grammar` follows that of the job, and is at its beginning."""
        facts = model.facts
        job.check(facts.vocab_size, facts.context_tokens)
        self._tools = tools
        self._job = job
        self._decoding = Decoding(
            job.token_ids,
            max_tokens=max(1, job.max_tokens),
            stop_token_ids=job.stop_token_ids | (grammar.end_ids if grammar else frozenset()),
            context_tokens=facts.context_tokens,
        )
        self._processors = processors_of(job, grammar)
        self._adapter = _enter(tools, job.adapter_id)
        self._lender = tools.adapters
        try:
            content = self._adapter.content if self._adapter else ""
            self._prompt = Prompt(model, tools.slots, job, self._decoding.history, content)
            self.state = self._prompt.state
            self.state.select_with(job.sampling, self._processors, job.top_logprobs)
            self.state.adapt(self._adapter.slot if self._adapter else 0)
            # Last: `finish` and `abandon`, which close its books, need the other fields.
            self._drafting = Drafting(
                job.draft_sources,
                tools.controller,
                tools.books,
                facts.vocab_size,
                job.sampling,
                grammar=grammar,
                states=(facts.states_for, self._states_from) if facts.states_for else None,
            )
        except BaseException:
            self._leave_adapter()
            raise
        self._finished = False
        self._forwards = 0
        self._drafted = self._verified = self._accepted = 0
        self._prefill_s = 0.0
        self._mark_s: float | None = None

    @property
    def length(self) -> int:
        """Tokens with KV."""
        return self.state.length

    def frames(self) -> Iterator[EngineFrame]:
        """Do one step per `next`, alone on the model; the last frame is a Done."""
        for step in self.steps():
            if isinstance(step, PromptPiece | Launch):
                step.alone()
            else:
                yield step

    def steps(self) -> Iterator[Step]:
        """As `frames`, but pieces of the prompt are computed, and plain steps launched, by the
        caller before the next `next`."""
        timer = self._tools.timer
        started = timer()
        if self._job.offer.blocks:
            yield KvImported(tokens=self._prompt.imported_tokens)
        self._drafting.prepare(self._decoding.history)
        yield from self._prompt.computed()
        self._prefill_s = timer() - started
        if self._job.max_tokens:
            yield from self._first_step()
            if self._decoding.finish is None:
                self._drafting.begin(self._decoding.history)
        self._mark_s = timer()
        while self._decoding.finish is None and self._job.max_tokens:
            tokens, comparable_rows = yield from self._step()
            now = timer()
            if comparable_rows and self._mark_s is not None:
                self._tools.controller.observe_forward(comparable_rows, now - self._mark_s)
            self._mark_s = now
            self._check_length()
            yield self._told(tokens)
        done = self._done(timer() - started)
        self.finish()
        yield done

    def resumed(self, mark_s: float | None) -> None:
        """Leave the work of other sequences out of the time of its next step.

        `mark_s` is when its own work begins; None = the device is still busy with others', and the
        next step measures nothing. Neither does it where a row has been in flight meanwhile.
        """
        self._mark_s = None if self.state.in_flight() else mark_s

    def finish(self) -> None:
        """Keep the KV under the job's key. Called by the run itself, or when it is cancelled."""
        if self._finished:
            return
        self._finished = True
        self._drafting.close()
        try:
            while self.state.in_flight():
                self.state.collect()
        finally:
            self._leave_adapter()
        self.state.select_with(Sampling())  # the KV may be kept for long, its processors not
        self._prompt.keep()

    def abandon(self) -> None:
        """Drop the KV: after a fault its content is unknown."""
        self._finished = True
        self._drafting.close()
        self._leave_adapter()

    def _states_from(self, first: int) -> HiddenStates | None:
        """Hidden states from a token on; the row of the last one may not be computed yet."""
        return self.state.hidden_states(first, len(self._decoding.history) - 1)

    def _leave_adapter(self) -> None:
        """Let the slot go, once; `_adapter` stays, since it names the adapter of the KV."""
        if self._lender is not None and self._adapter is not None:
            self._lender.leave(self._adapter)
            self._lender = None

    def _first_step(self) -> Generator[Step, None, None]:
        """Commit the first token and tell of it.

        It waits for nothing else: indexing a long prompt for drafts takes as long as a forward, and
        so does launching another step on devices that make the caller wait. Where the logits are
        known, it does not wait for its own step either; that step is then needed for its KV, and
        only if another token follows.
        """
        last, is_known = self._decoding.history[-1], bool(self._job.offer.logits)
        if is_known:
            known = self.state.selected_from(self._job.offer.logits)
            self._commit((), (known,))
            yield self._told((known,))
            if self._decoding.finish is not None:
                return
        keeps_logits = self._job.offer.wants_logits and self._prompt.is_exact and not is_known
        yield Launch(self.state, last, keeps_logits=keeps_logits)
        self._forwards += 1
        token = self.state.collect()
        if not is_known:
            self._commit((), (token,))
        self._check_length()
        if is_known:
            self.state.take_logprobs(0)  # of the token that was told before
            return
        yield self._told((token,))
        if keeps_logits and (logits := self.state.take_logits()):
            yield HistoryLogits(logits=logits)

    def _step(self) -> Generator[Launch, None, tuple[tuple[int, ...], int]]:
        """Commit at least one token.

        Returns the committed tokens, and the rows of the forward that the step's time is a fair
        sample of; 0 where it is none (the pipeline was filling or running dry, or other sequences
        were in the forward).
        """
        draft, rows = self._choose()
        in_flight = self.state.in_flight() > 0
        if rows == 0:
            token, is_steady = yield from self._plain_step(draft)
            return (token,), 1 if in_flight and is_steady else 0
        if in_flight:
            return self._confirm(draft, rows), 0
        return self._block(draft, draft.tokens[:rows]), rows + 1

    def _choose(self) -> tuple[Draft, int]:
        """The best draft of this moment, and how many of its tokens deserve a row."""
        if not self._drafting.has_offer():
            return NOTHING, 0  # `verifiable_rows` costs too much to be asked at every token
        room = min(self._decoding.room(), self._tools.max_draft_rows)
        if self.state.in_flight() == 0:
            room = min(room, self.state.verifiable_rows() - 1)
        else:
            room = min(room, self.state.verifiable_rows())
        return self._drafting.choose(self._decoding.history, room)

    def _plain_step(self, draft: Draft) -> Generator[Launch, None, tuple[int, bool]]:
        """Commit one token; returns it, and whether a step alone was launched ahead meanwhile."""
        state, decoding = self.state, self._decoding
        is_steady = False
        # A step whose edit depends on the token before it waits for that token.
        is_bound = self._processors is not None and not self._processors.is_constant
        if state.in_flight() == 0:
            yield Launch(state, decoding.history[-1], is_needed=is_bound)
            self._forwards += 1
        if decoding.room() > 0 and not is_bound:
            # Another token is needed after this one: start it before reading this one.
            ahead = Launch(state, None)
            yield ahead
            self._forwards += 1
            is_steady = not ahead.is_shared
        self._drafting.shadow(draft)
        token = state.collect()
        self._commit((), (token,))
        self._drafting.extend((token,))
        return token, is_steady

    def _confirm(self, draft: Draft, rows: int) -> tuple[int, ...]:
        """Read the row in flight; verify the rest of the draft only if it guessed that row."""
        token = self.state.collect()
        self._commit((), (token,))
        self._drafting.extend((token,))
        if token != draft.tokens[0]:
            self._score(draft, offered=1, accepted=0)
            return (token,)
        if self._decoding.finish is not None:
            return (token,)
        block = draft.tokens[1 : min(rows, 1 + self._decoding.room())]
        if not block:
            return (token,)
        return (token, *self._block(draft, block, confirmed=1))

    def _block(self, draft: Draft, block: tuple[int, ...], confirmed: int = 0) -> tuple[int, ...]:
        """Verify `block` after the pending token in one forward; roll the rejected rows back."""
        state, decoding = self.state, self._decoding
        if block:
            self._drafting.ahead(decoding.history, block)
        selected = state.verify((decoding.history[-1], *block))
        self._forwards += 1
        commit = self._commit(block, selected)
        surplus = 1 + len(block) - commit.kept_rows
        if not state.trim(surplus):
            raise InvariantBroken("trim", f"{surplus} verified rows could not be trimmed again")
        self._score(draft, confirmed + len(block), confirmed + commit.accepted)
        self._drafting.extend(commit.tokens)
        return commit.tokens

    def _commit(self, block: Sequence[int], selected: Sequence[int]) -> Commit:
        """Commit what a forward selected, and let the processors follow."""
        commit = self._decoding.commit(block, selected)
        if self._processors is not None:
            self._processors.extend(commit.tokens)
        return commit

    def _told(self, tokens: tuple[int, ...]) -> Tokens:
        """The frame of tokens that were just committed."""
        return Tokens(token_ids=tokens, logprobs=tuple(self.state.take_logprobs(len(tokens))))

    def _score(self, draft: Draft, offered: int, accepted: int) -> None:
        """Count a draft of which `offered` leading tokens met the verifier's own."""
        self._drafted += len(draft.tokens)
        self._verified += offered
        self._accepted += accepted
        self._drafting.verified(draft, offered, accepted)

    def _check_length(self) -> None:
        """Check the law of the module's head against the lengths of the cache layers."""
        state, committed = self.state, len(self._decoding.history)
        expected = committed - 1 + state.in_flight()
        if state.length != expected:
            self._tools.violations.position += 1
            raise InvariantBroken(
                "position", f"KV holds {state.length} tokens, the history asks for {expected}"
            )
        if state.layer_length() != state.length:
            self._tools.violations.cache_length += 1
            raise InvariantBroken(
                "cache_length",
                f"cache layers hold {state.layer_length()} tokens, expected {state.length}",
            )

    def _done(self, total_s: float) -> Done:
        finish = self._decoding.finish if self._job.max_tokens else StopReason.MAX_TOKENS
        if finish is None:
            raise InvariantBroken("finish", "a generation ended without a reason")
        usage = Usage(
            prefill_s=self._prefill_s,
            total_s=total_s,
            cached_tokens=self._prompt.cached_tokens,
            forwards=self._forwards,
            drafted=self._drafted,
            verified=self._verified,
            accepted=self._accepted,
            sources=self._drafting.tallies(),
        )
        return Done(reason=finish, usage=usage)


def _enter(tools: SequenceTools, adapter_id: str) -> SlottedAdapter | None:
    """The adapter to compute with; None for the model alone. Raises NotFound."""
    if not adapter_id:
        return None
    if tools.adapters is None:
        raise NotFound(f"adapter {adapter_id!r} is not loaded: this engine takes no adapters")
    return tools.adapters.enter(adapter_id)
