"""Generations for HTTP clients, whatever their dialect: from a request to its answer.

    names         the model of a request
    preparation   wait until it serves, text to ids, checks that need the model
    run           decode, text as it settles

The frames of the decode iterator are the only thing waited for per token; the iterator is closed
before the last byte is sent, or as soon as the client leaves.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.backends.relay.relays import RelayedModel
from kakeya.backends.request import Request
from kakeya.core.clock import Clock
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.model_names import ModelNames
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.gateway.answer import Answer
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.connection import Connection, HttpLimits, StreamForm
from kakeya.gateway.http.receipt import note_defaults
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.preparation import Preparation
from kakeya.gateway.recent import RecentRequests
from kakeya.gateway.relayed import RelayedGenerations, RelayedJob
from kakeya.gateway.reply import Reply
from kakeya.gateway.turn import BEGUN, HttpGeneration, next_tokens
from kakeya.generation.fair_bound import FairBound
from kakeya.generation.frames import Tokens
from kakeya.generation.model import ServedModel
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.seam import Precache
from kakeya.text.text import Texts
from kakeya.text.tools.answer import Part
from kakeya.wire import traces

GenerationJob = HttpGeneration | RelayedJob
"""One answer to a request, ready to be generated."""


class Generations:
    """Runs generations for HTTP clients, of all routes."""

    def __init__(
        self,
        names: ModelNames,
        preparation: Preparation,
        *,
        texts: Texts,
        metrics: HttpMetrics,
        limits: HttpLimits,
        clock: Clock,
        rng: random.Random,
        precache: Precache,
        clients: Clients,
    ) -> None:
        self.names = names
        self.preparation = preparation
        self._texts = texts
        self._metrics = metrics
        self._clock = clock
        self.wall = clock.wall
        self._precache = precache
        self._crowd = FairBound(limits.generations, clock.mono)
        self.recent = RecentRequests()
        self._relayed = RelayedGenerations(metrics, self.recent, clock, rng)
        self.clients = clients
        self.limits = limits

    def connection(
        self,
        receive: Receive,
        send: Send,
        wait: WaitTeller | None = None,
        stream: StreamForm | None = None,
    ) -> Connection:
        """Watch over one client; `wait` tells for what it waits, `stream` as for a `Connection`."""
        return Connection(
            receive,
            send,
            clock=self._clock,
            limits=self.limits,
            wait=wait,
            stream=stream,
        )

    def for_client(
        self, asked: Request, client: str, scope: Scope
    ) -> tuple[Request, ClientProfile]:
        """A request, for the model of its client's profile where it names none that there is; and
        the profile."""
        name, profile = self.meant(asked.params.model, client, scope)
        return replace(asked, params=replace(asked.params, model=name)), profile

    def meant(self, name: str, client: str, scope: Scope) -> tuple[str, ClientProfile]:
        """The name of the model that a client means: its profile's, where there is none of the
        name that it gives; and the profile."""
        profile = profile_of(self.names.tasks, client, scope)
        found = self.names.meant(name, profile.spec.model)
        if found != name:
            note_defaults(scope, {"model": found}, f"profiles.{profile.name}")
        return found, profile

    @contextmanager
    def admitted(self, share: str, user: str = "") -> Iterator[None]:
        """Hold a place for a request of this share. Raises QueueFull when all are taken."""
        full = f"{self._crowd.total} generations are running, which is the limit"
        try:
            with self._crowd.member(share, user, full):
                self._metrics.running.set(self._crowd.total)
                yield
        finally:
            self._metrics.running.set(self._crowd.total)

    async def prepare(
        self,
        reply: Reply,
        asked: Request,
        model: ServedModel | RelayedModel,
        scope: Scope,
        wait: WaitTeller,
    ) -> Sequence[GenerationJob]:
        """Prepare a generation for each answer to `asked`, the reply's request once it is settled,
        and set the head of the reply. Raises as `Preparation.jobs` and `Backend.check`."""
        if isinstance(model, RelayedModel):
            owner = share_of(client_of(scope), scope)
            return await self._relayed.prepare(reply, asked, model, scope, owner)
        return await self.preparation.jobs(reply, asked, model, scope, wait)

    def run(self, job: GenerationJob) -> AsyncGenerator[tuple[Answer, Part], None]:
        """Generate; yields each part of the answer as it settles. The caller closes this
        iterator."""
        return self._relayed.run(job) if isinstance(job, RelayedJob) else self._decode(job)

    async def _decode(self, job: HttpGeneration) -> AsyncGenerator[tuple[Answer, Part], None]:
        model_id, answer = job.counted_as, job.answer
        self._metrics.generation_began(model_id, len(job.request.token_ids))
        try:
            async with aclosing(job.decode()) as frames:
                async for frame in frames:
                    if isinstance(frame, Tokens):
                        if answer.completion_tokens == 0:
                            waited_s = self._clock.mono() - job.began_mono
                            self._metrics.first_token(model_id, waited_s)
                            if job.record is not None:
                                job.record.first_token_s = waited_s
                            if job.copied is not None:
                                yield answer, BEGUN
                        job.token_ids.extend(frame.token_ids)
                    for part in answer.take(frame):
                        yield answer, part
                    if answer.finish_reason is not None:
                        if job.copied is not None:
                            job.copied.complete()
                        break
            self._turn_ended(job)
        finally:
            self._metrics.generation_ended(
                model_id,
                answer.completion_tokens,
                is_abandoned=answer.finish_reason is None,
                usage=answer.usage,
            )
            self._remember(job)

    def _remember(self, job: HttpGeneration) -> None:
        record, answer = job.record, job.answer
        if record is None:
            return
        record.ended_s = self._clock.mono() - job.began_mono
        record.ended_at = self._clock.wall()
        record.usage = answer.usage
        record.cuts = tuple(job.request.cuts)
        record.prefill_s = None if answer.usage is None else answer.usage.prefill_s
        record.cached_tokens = answer.cached_tokens
        record.finish_reason = answer.finish_reason or ""
        if isinstance(job.model, RoutedModel):
            record.routes = tuple(job.model.decisions)
            record.node = job.model.served_by
        traces.parts(
            ready_s=record.ready_s,
            prepared_s=record.prepared_s,
            first_token_s=record.first_token_s,
            prefill_s=record.prefill_s,
            ended_s=record.ended_s,
            facts={"gen_ai.request.model": record.model_id, "kakeya.served_by": record.node},
        )
        self.recent.add(record, job.request.token_ids, job.token_ids)

    async def run_all(
        self, jobs: Sequence[GenerationJob]
    ) -> AsyncGenerator[tuple[Answer, Part], None]:
        """Generate several answers at once; yields as `run`. The first failure ends all."""
        found: asyncio.Queue[tuple[Answer, Part] | Exception | None] = asyncio.Queue()

        async def feed(job: GenerationJob) -> None:
            end: Exception | None = None
            try:
                async with aclosing(self.run(job)) as parts:
                    async for one in parts:
                        found.put_nowait(one)
            except Exception as fault:  # noqa: BLE001 - raised where the answers are read
                end = fault
            found.put_nowait(end)

        tasks = [asyncio.create_task(feed(job)) for job in jobs]
        try:
            running = len(tasks)
            while running:
                one = await found.get()
                if isinstance(one, Exception):
                    raise one
                if one is None:
                    running -= 1
                else:
                    yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _turn_ended(self, job: HttpGeneration) -> None:
        """Have what the next request begins with warm, if this one says what it continues."""
        if not job.claim.use.is_empty:
            self._precache.turn_ended(job.claim, functools.partial(next_tokens, job, self._texts))


def profile_of(tasks: TaskRegistry, client: str, scope: Scope) -> ClientProfile:
    """The profile of a request's client."""
    return tasks.profile_of(client, Headers(scope=scope).get("user-agent", ""))
