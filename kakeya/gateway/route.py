"""The route of a dialect: a body in, the answer out, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

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
from kakeya.gateway.session_hint import session_of
from kakeya.gateway.turn import BEGUN
from kakeya.generation.model import ServedModel
from kakeya.generation.waiting import WaitTeller
from kakeya.text.tools.answer import Part

_Read = tuple[Reply, Mapping[str, object], CoordinatorFields, str, str]
Keep = Callable[[Reply, Sequence[GenerationJob], ClientProfile], Sequence[GenerationJob]]
"""Has the generations of a reply outlive this node, or go on with those of another."""
Detour = Callable[[Reply, Mapping[str, object], str, Scope, Receive, Send], Awaitable[bool]]
"""Answers a request with its body and its share in another way; False = it does not."""


class GenerationRoute:
    """The ASGI application behind the path of a dialect."""

    def __init__(
        self,
        dialect: Dialect,
        generations: Generations,
        detour: Detour | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._dialect = dialect
        self._generations = generations
        self._detour = detour
        self._keep = keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        generations = self._generations
        headers = Headers(scope=scope)

        def read(whole: Mapping[str, object]) -> _Read:
            body, fields = take_fields(whole)
            share = share_of(client_of(scope) or fields.client, scope)
            return self._dialect(body, share), whole, fields, share, session_of(body, headers)

        reply, whole, fields, share, session = await read_request(
            scope, receive, generations.limits, read
        )
        if self._detour and await self._detour(reply, whole, share, scope, receive, send):
            return
        asked = generations.preparation.settled(fields.applied(reply.asked, scope), session, scope)
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
                prepared = self._prepared(reply, asked, model, scope, wait, profile)
                if params.stream:
                    await self._stream(reply, prepared, client, use)
                else:
                    await self._whole(reply, prepared, client, send, use)

    async def _prepared(
        self,
        reply: Reply,
        asked: Request,
        model: ServedModel | RelayedModel,
        scope: Scope,
        wait: WaitTeller,
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        jobs = await self._generations.prepare(reply, asked, model, scope, wait)
        return self._keep(reply, jobs, profile) if self._keep else jobs

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
        try:
            jobs = await prepared
            opening = reply.opening()
            async with aclosing(self._parts(jobs)) as parts:
                async for answer, part in parts:
                    if not use.has_begun:
                        use.begin()
                    written = b"" if part is BEGUN else reply.part(answer, part)
                    if written or part is BEGUN:
                        await client.send_event(opening + written)
                        opening = b""
        except KakeyaError as error:
            if not client.is_started:
                raise
            await client.end(reply.failure(error))
            return
        except asyncio.CancelledError:
            if client.is_started and not client.has_left:
                await client.end(reply.failure(stopping()))
            raise
        await client.end(opening + reply.closing([job.answer for job in jobs]))
