"""Answers of backends that are no engines of this node: a request handed on whole, and the parts
that come back, for the replies of every dialect.

A backend gives one answer to one prompt, so further answers to a prompt are requests of their own;
what a prompt costs is counted once. Tokens are those that the backend tells, at the end; 0 where it
tells none. What a request asks for and the backend does not follow is named by x-kakeya-ignored.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.types import Scope

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.relays import RelayedModel
from kakeya.backends.request import CompletionRequest, Request
from kakeya.core.clock import Clock
from kakeya.core.ids import draw_id
from kakeya.gateway.answer import Answer
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.receipt import moved_of, note_ignored, note_record, task_of
from kakeya.gateway.http.request_ids import answer_id
from kakeya.gateway.recent import RecentRequests, RequestRecord
from kakeya.gateway.reply import AnswerHead, Reply
from kakeya.text.tools.answer import Part, ToolCall


class RelayedAnswer(Answer):
    """The answer of a backend."""

    def __init__(self, row: int, draw_call_id: Callable[[], str]) -> None:
        super().__init__(row)
        self._draw_call_id = draw_call_id
        self.told: Finished | None = None
        """The end, and what the backend tells of it."""

    @property
    def reasoning_tokens(self) -> int:
        """As of an `Answer`."""
        return 0 if self.told is None else self.told.reasoning_tokens

    @property
    def stop_string(self) -> str:
        """As of an `Answer`."""
        return "" if self.told is None else self.told.stop_string

    def take(self, part: Part) -> Part:
        """Add a part; returns it, a call with an id and its place among the calls."""
        if isinstance(part, ToolCall):
            call_id = part.call_id or self._draw_call_id()
            part = replace(part, index=len(self.calls), call_id=call_id)
            self.calls.append(part)
        self._parts.append(part)
        return part

    def finish(self, told: Finished) -> None:
        """Take the end."""
        self.told = told
        self.finish_reason = told.reason
        self.completion_tokens = told.completion_tokens
        self.cached_tokens = told.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedJob:
    """One answer to a request, ready to be asked for. `asked` has one prompt."""

    model: RelayedModel
    asked: Request
    reply: Reply
    answer: RelayedAnswer
    counts_prompt: bool
    """Whether it is the first answer to its prompt."""
    began_mono: float
    record: RequestRecord | None  # of the first answer to a request


class RelayedGenerations:
    """Hands requests to backends."""

    def __init__(
        self, metrics: HttpMetrics, recent: RecentRequests, clock: Clock, rng: random.Random
    ) -> None:
        self._metrics = metrics
        self._recent = recent
        self._clock = clock
        self._rng = rng

    async def prepare(
        self, reply: Reply, asked: Request, model: RelayedModel, scope: Scope, owner: str
    ) -> Sequence[RelayedJob]:
        """Check what only the backend can tell, and set the head of the reply. Returns a job for
        each answer to `asked`, the reply's request once it is settled; `owner` is its client.
        Raises as `Backend.check`."""
        began_mono = self._clock.mono()
        if ignored := await model.relay.check(asked):
            note_ignored(scope, ignored)
        reply.head = AnswerHead(
            answer_id=answer_id(scope, reply.id_prefix),
            created_at=int(self._clock.wall()),
            model=model.model_id,
            prompt_tokens=0,
            moved=moved_of(scope),
            task=task_of(scope),
        )
        record = RequestRecord(
            request_id=reply.head.answer_id,
            owner=owner,
            model_id=model.model_id,
            model_path="",
            block_tokens=0,
            conversation="",
            moved=reply.head.moved,
            ready_s=0.0,
            task=reply.head.task,
            relay=model.relay.name,
        )
        note_record(scope, record)
        rows = asked.params.rows
        return [
            RelayedJob(
                model=model,
                asked=one,
                reply=reply,
                answer=RelayedAnswer(row, lambda: "call_" + draw_id("", self._rng, 24)[1:]),
                counts_prompt=row % rows == 0,
                began_mono=began_mono,
                record=None if row else record,
            )
            for row, one in enumerate(_each(asked, model.model_id))
        ]

    async def run(self, job: RelayedJob) -> AsyncGenerator[tuple[Answer, Part], None]:
        """Answer; yields each part as it comes. The caller closes this iterator, which ends the
        work of the backend."""
        relay, answer = job.model.relay, job.answer
        label = f"{relay.kind}/{relay.name}"
        try:
            async with aclosing(relay.answer(job.asked)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        self._finish(job, part)
                        break
                    self._first_part(job, label)
                    yield answer, answer.take(part)
        finally:
            told = answer.told
            self._metrics.generation_began(label, 0 if told is None else told.prompt_tokens)
            self._metrics.generation_ended(
                label, answer.completion_tokens, is_abandoned=told is None
            )
            self._remember(job)

    def _first_part(self, job: RelayedJob, label: str) -> None:
        if not job.answer.has_parts:
            waited_s = self._clock.mono() - job.began_mono
            self._metrics.first_token(label, waited_s)
            if job.record is not None:
                job.record.first_token_s = waited_s

    def _finish(self, job: RelayedJob, told: Finished) -> None:
        job.answer.finish(told)
        if job.counts_prompt:
            head = job.reply.head
            job.reply.head = replace(head, prompt_tokens=head.prompt_tokens + told.prompt_tokens)

    def _remember(self, job: RelayedJob) -> None:
        record, told = job.record, job.answer.told
        if record is None:
            return
        record.ended_at = self._clock.wall()
        record.ended_s = self._clock.mono() - job.began_mono
        record.cached_tokens = job.answer.cached_tokens
        record.finish_reason = job.answer.finish_reason or ""
        record.told = told
        self._recent.add(record, (), ())


def _each(asked: Request, model_id: str) -> Iterator[Request]:
    """The request for each answer: of one prompt, to the model by its own name, with its seed."""
    alone: list[Request] = [asked]
    if isinstance(asked, CompletionRequest):
        alone = [replace(asked, prompts=(prompt,)) for prompt in asked.prompts]
    for one in alone:
        for row in range(asked.params.rows):
            sampling = one.params.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + row) % 2**64)
            params = replace(one.params, model=model_id, rows=1, sampling=sampling)
            yield replace(one, params=params)
