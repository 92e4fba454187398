"""The route of a dialect: a body in, the answer out, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.backends.relay.relays import RelayedModel
from kakeya.backends.request import Request
from kakeya.core.errors import KakeyaError
from kakeya.dispatch.clients import ClientRequest, RequestLabel
from kakeya.dispatch.profiles import ClientProfile
from kakeya.gateway.answer import Answer
from kakeya.gateway.coordinator_fields import CoordinatorFields, take_fields
from kakeya.gateway.generation import GenerationJob, Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.connection import Connection, read_request
from kakeya.gateway.http.edge import send_json, stopping
from kakeya.gateway.http.receipt import note_left_out, note_task
from kakeya.gateway.http.request_ids import request_id
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.reply import Dialect, Reply
from kakeya.gateway.resumable.events import NONE_YET, NumberedEvents
from kakeya.gateway.session_hint import session_of
from kakeya.gateway.turn import BEGUN, HttpGeneration
from kakeya.generation.model import ServedModel
from kakeya.generation.waiting import WaitTeller
from kakeya.text.tools.answer import Part

Keep = Callable[
    [Reply, Mapping[str, object], Sequence[GenerationJob], ClientProfile], Sequence[GenerationJob]
]
"""Has the generations of a reply to a body outlive this node, or go on with those of another."""
Detour = Callable[[Reply, Mapping[str, object], str, Scope, Receive, Send], Awaitable[bool]]
"""Answers a request with its body and its share in another way; False = it does not."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What a request asks for; `body` is `whole` without the fields."""

    reply: Reply
    whole: Mapping[str, object]
    body: Mapping[str, object]
    fields: CoordinatorFields
    share: str
    session: str


class GenerationRoute:
    """The ASGI application behind the path of a dialect."""

    def __init__(
        self,
        dialect: Dialect,
        generations: Generations,
        detour: Detour | None = None,
        keep: Keep | None = None,
        *,
        after: int = NONE_YET,
    ) -> None:
        """`after` is the number of the last event that clients have of an answer that is kept."""
        self._dialect = dialect
        self._generations = generations
        self._detour = detour
        self._keep = keep
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        generations = self._generations
        headers = Headers(scope=scope)

        def read(whole: Mapping[str, object]) -> _Read:
            body, fields = take_fields(whole)
            share = share_of(client_of(scope) or fields.client, scope)
            reply = self._dialect(body, share)
            return _Read(reply, whole, body, fields, share, session_of(body, headers))

        given = await read_request(scope, receive, generations.limits, read)
        reply, fields, share = given.reply, given.fields, given.share
        if self._detour and await self._detour(reply, given.whole, share, scope, receive, send):
            return
        applied = fields.applied(reply.asked, scope)
        asked = generations.preparation.settled(applied, given.session, scope)
        note_left_out(scope, asked.params.left_out)
        asked, profile = generations.for_client(asked, client_of(scope), scope)
        asked = fields.under_profile(asked, profile, scope)
        model, choice = generations.names.choose(asked.params.model, client_of(scope))
        if choice is not None:
            note_task(scope, choice)
            asked = fields.under_task(asked, choice.spec, scope)
        params, wait = asked.params, WaitTeller(model.waits_for)
        label = RequestLabel(
            request_id=request_id(scope),
            model_id=model.model_id,
            priority=params.priority.name.lower(),
            wait=wait,
        )
        with (
            generations.clients.request(share, params.user, params.cooldown_s, label) as use,
            generations.admitted(share, params.user),
        ):
            async with generations.connection(
                receive, send, wait, reply if params.stream else None
            ) as client:
                prepared = self._prepared(given, asked, model, scope, wait, profile)
                if params.stream:
                    await self._stream(reply, prepared, client, use)
                else:
                    await self._whole(reply, prepared, client, send, use)

    async def _prepared(
        self,
        given: _Read,
        asked: Request,
        model: ServedModel | RelayedModel,
        scope: Scope,
        wait: WaitTeller,
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        jobs = await self._generations.prepare(given.reply, asked, model, scope, wait)
        return self._keep(given.reply, given.body, jobs, profile) if self._keep else jobs

    def _parts(self, jobs: Sequence[GenerationJob]) -> AsyncGenerator[tuple[Answer, Part], None]:
        if len(jobs) == 1:
            return self._generations.run(jobs[0])
        return self._generations.run_all(jobs)

    async def _whole(
        self,
        reply: Reply,
        prepared: Awaitable[Sequence[GenerationJob]],
        client: Connection,
        send: Send,
        use: ClientRequest,
    ) -> None:
        jobs = await prepared
        async with aclosing(self._parts(jobs)) as parts:
            async for _ in parts:
                if not use.has_begun:
                    use.begin()
        body = compact(reply.whole([job.answer for job in jobs]))
        client.finish()
        await send_json(send, 200, body)

    async def _stream(
        self,
        reply: Reply,
        prepared: Awaitable[Sequence[GenerationJob]],
        client: Connection,
        use: ClientRequest,
    ) -> None:
        is_open = False
        try:
            jobs = await prepared
            answers = [job.answer for job in jobs]
            numbered = self._numbered(reply, jobs)
            async with aclosing(self._parts(jobs)) as parts:
                async for answer, part in parts:
                    if not use.has_begun:
                        use.begin()
                    written = b"" if is_open else reply.opening(answers)
                    is_open = True
                    written += b"" if part is BEGUN else reply.part(answer, part)
                    if numbered is not None:
                        written = numbered.write(written)
                    if written:
                        await client.send_event(written)
        except KakeyaError as error:
            if not client.is_started:
                raise
            await client.end(reply.failure(error))
            return
        except asyncio.CancelledError:
            if client.is_started and not client.has_left:
                await client.end(reply.failure(stopping()))
            raise
        last = (b"" if is_open else reply.opening(answers)) + reply.closing(answers)
        await client.end(last if numbered is None else numbered.write(last))

    def _numbered(self, reply: Reply, jobs: Sequence[GenerationJob]) -> NumberedEvents | None:
        """The events of an answer that any node may go on with; None = it is none."""
        if len(jobs) == 1 and isinstance(jobs[0], HttpGeneration) and jobs[0].copied:
            return NumberedEvents(reply.head.answer_id, self._after)
        return None
