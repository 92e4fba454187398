"""Streams of responses that any node goes on with, after the loss of the node that began them.

A streamed response is copied to another node as it is made (`dispatch/routed/copied`). The events
of a response follow from its tokens alone, one by one, and so do their numbers: a client that has
the events up to a number gets those behind it, whichever node tells them.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from kakeya.core.errors import Conflict
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.routed.copied import AnswerCopies
from kakeya.gateway.generation import GenerationJob, Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.connection import read_body
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.request_ids import scope_of
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.reply import ResponseReply
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.reply import Reply
from kakeya.gateway.route import GenerationRoute
from kakeya.gateway.turn import HttpGeneration


class ResumableResponses:
    """Has streamed responses copied, and goes on with those of lost nodes."""

    def __init__(
        self, generations: Generations, store: ResponseStore, copies: AnswerCopies | None
    ) -> None:
        """`copies` None = no response is copied."""
        self._generations = generations
        self._store = store
        self._copies = copies

    def begin(
        self, reply: Reply, jobs: Sequence[GenerationJob], profile: ClientProfile
    ) -> Sequence[GenerationJob]:
        """Have a response copied, unless its client or its owner says no."""
        body = reply.body if isinstance(reply, ResponseReply) else b""
        is_fit = 0 < len(body) <= self._generations.limits.body_bytes and profile.spec.resumable
        if self._copies is None or not self._copies.is_on or not is_fit:
            return jobs
        (job,) = jobs
        if not isinstance(job, HttpGeneration):
            return jobs
        copy = AnswerCopy(
            answer_id=reply.head.answer_id,
            client=job.request.client,
            model_id=reply.head.model,
            body=body,
            created_at=reply.head.created_at,
            request=job.request,
        )
        return [replace(job, copied=self._copies.begin(copy))]

    async def show(
        self,
        response_id: str,
        after: int | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Stream the events of a response behind the number `after`, -1 = all, and go on with it;
        with None show the response. False = no node holds a copy for this client."""
        copies = self._copies
        share = share_of(client_of(scope), scope)
        copy = await copies.find(response_id, share) if copies is not None else None
        if copy is None:
            return False
        asked = json.loads(copy.body) | {"model": copy.model_id, "stream": after is not None}
        if after is None and not copy.is_complete:
            reply = parse_response(asked, self._store, earlier=())
            body = {**reply.begun(response_id, copy.created_at), "status": "in_progress"}
            await send_json(send, 200, compact(body))
            return True
        route = GenerationRoute(
            lambda body, share: parse_response(body, self._store, share, earlier=()),
            self._generations,
            keep=partial(self._go_on, copy),
        )
        # The edge ends no answer before its request is read.
        await read_body(scope, receive, self._generations.limits)
        again = {**scope, **scope_of(response_id), "method": "POST", "path": "/v1/responses"}
        to_client = send if after is None else _EventsBehind(send, after).send
        await route(again, _body_first(compact(asked), receive), to_client)
        return True

    async def forget(self, response_id: str, scope: Scope) -> bool:
        """Have the copies of a response forgotten; False = there was none."""
        if self._copies is None:
            return False
        return await self._copies.forget(response_id, share_of(client_of(scope), scope))

    def _go_on(
        self,
        copy: AnswerCopy,
        reply: Reply,
        jobs: Sequence[GenerationJob],
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        """The generation of a copy: what says its tokens is that of the node that began it."""
        (job,) = jobs
        if not isinstance(job, HttpGeneration) or self._copies is None:
            raise Conflict(f"{copy.model_id} is not a model of the fleet any more")
        known = copy.request
        request = replace(
            job.request,
            token_ids=known.token_ids,
            max_tokens=known.max_tokens,
            stop_token_ids=known.stop_token_ids,
            sampling=known.sampling,
            cuts=known.cuts,
            grammar=known.grammar,
            top_logprobs=known.top_logprobs,
            deadline_s=None,
        )
        reply.head = replace(
            reply.head, created_at=copy.created_at, prompt_tokens=len(known.token_ids)
        )
        return [replace(job, request=request, copied=self._copies.begin(copy))]


class _EventsBehind:
    """A way to a client that has the events of a stream up to a number."""

    def __init__(self, send: Send, after: int) -> None:
        self._send = send
        self._known = after + 1

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send what the client does not have; comments pass."""
        if self._known and message["type"] == "http.response.body":
            message = {**message, "body": self._new(message.get("body", b""))}
            if not message["body"] and message.get("more_body"):
                return
        await self._send(message)

    def _new(self, body: bytes) -> bytes:
        kept = []
        for event in body.split(b"\n\n"):
            if self._known and event.startswith(b"event:"):
                self._known -= 1
            elif event:
                kept.append(event + b"\n\n")
        return b"".join(kept)


def _body_first(body: bytes, receive: Receive) -> Receive:
    """The messages of a request with a body of its own, up to the departure of its client."""
    left = [body]

    async def next_message() -> MutableMapping[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return next_message
