"""Streams of answers that any node goes on with, after the loss of the node that began them.

A streamed answer is copied to another node as it is made (`dispatch/routed/copied`). Its events
follow from its tokens alone, one by one, and so do their numbers: a client that has the events up
to a number gets those behind it, whichever node tells them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from kakeya.core.errors import Conflict, NotFound
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.routed.copied import AnswerCopies, CopiedAnswer
from kakeya.gateway.generation import GenerationJob, Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.request_ids import scope_of
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import share_of
from kakeya.gateway.reply import Dialect, Reply
from kakeya.gateway.resumable.events import NONE_YET
from kakeya.gateway.route import GenerationRoute
from kakeya.gateway.turn import HttpGeneration

_OF_THE_BODY = (b"content-encoding", b"content-length")


class ResumableAnswers:
    """Has streamed answers copied, and goes on with those of lost nodes."""

    def __init__(self, generations: Generations, copies: AnswerCopies | None) -> None:
        """`copies` None = no answer is copied."""
        self.generations = generations
        self._copies = copies if copies is not None and copies.is_on else None

    def begin(
        self,
        reply: Reply,
        body: Mapping[str, object],
        jobs: Sequence[GenerationJob],
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        """Have a streamed answer copied, unless its client or its owner says no. `body` is that of
        its request."""
        is_wanted = reply.asked.params.stream and reply.asked.params.is_resumable
        return self.begun(reply, body, jobs, profile) if is_wanted else jobs

    def begun(
        self,
        reply: Reply,
        body: Mapping[str, object],
        jobs: Sequence[GenerationJob],
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        """Have the answer to one prompt copied, unless its owner says no. The events of several
        answers have no order of their own."""
        if self._copies is None or not profile.spec.resumable or len(jobs) != 1:
            return jobs
        (job,) = jobs
        written = _written(body)
        if not isinstance(job, HttpGeneration) or not self.has_room(written):
            return jobs
        copy = AnswerCopy(
            answer_id=reply.head.answer_id,
            client=job.request.client,
            model_id=reply.head.model,
            body=written,
            created_at=reply.head.created_at,
            request=job.request,
            fingerprint=reply.head.fingerprint,
        )
        return [replace(job, copied=self._copies.begin(copy))]

    def has_room(self, body: bytes) -> bool:
        """Whether another node would read such a body."""
        return len(body) <= self.generations.limits.body_bytes

    def hold(self, copy: AnswerCopy) -> CopiedAnswer | None:
        """Have a copy held as it is; None = none is."""
        if self._copies is None or not self.has_room(copy.body):
            return None
        copied = self._copies.begin(copy)
        copied.hold()
        return copied

    def is_made(self, copy: AnswerCopy) -> bool:
        """Whether the node that makes an answer is there."""
        return self._copies is not None and self._copies.is_made(copy)

    async def find(self, answer_id: str, client: str) -> AnswerCopy:
        """The copy of a client's answer. Raises NotFound, which says where it was looked for."""
        if self._copies is None:
            raise NotFound(
                f"no copy of {answer_id[:80]!r} is held: this node neither makes nor keeps copies "
                "(http_resume_mb 0)"
            )
        return await self._copies.find(answer_id, client)

    async def forget(self, answer_id: str, client: str) -> bool:
        """Have the copies of an answer forgotten; False = there was none."""
        return self._copies is not None and await self._copies.forget(answer_id, client)

    async def show(
        self,
        copy: AnswerCopy,
        dialect: Dialect,
        path: str,
        after: int | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Stream the events of an answer of a path behind the number `after`, and go on with it;
        with None send it whole. The request's own body is read. Raises Conflict for an answer that
        ended without any."""
        if copy.ended:
            raise Conflict(f"{copy.answer_id} has no events: it failed or was cancelled")
        asked = json.loads(copy.body) | {"model": copy.model_id, "stream": after is not None}
        route = GenerationRoute(
            dialect,
            self.generations,
            keep=partial(self.go_on, copy),
            after=NONE_YET if after is None else after,
        )
        headers = [one for one in scope["headers"] if one[0] not in _OF_THE_BODY]
        own = {"method": "POST", "path": path, "headers": headers}
        again = {**scope, **scope_of(copy.answer_id), **own}
        await route(again, _body_first(_written(asked), receive), send)

    def go_on(
        self,
        copy: AnswerCopy,
        reply: Reply,
        body: Mapping[str, object],
        jobs: Sequence[GenerationJob],
        profile: ClientProfile,
    ) -> Sequence[GenerationJob]:
        """The generation of a copy: what says its tokens is that of the node that began it."""
        (job,) = jobs
        if not isinstance(job, HttpGeneration) or self._copies is None:
            raise Conflict(f"{copy.model_id} is not a model of the fleet any more")
        if (known := copy.request) is None:
            return self.begun(reply, body, jobs, profile)
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
            reply.head,
            created_at=copy.created_at,
            prompt_tokens=len(known.token_ids),
            fingerprint=copy.fingerprint,
        )
        return [replace(job, request=request, copied=self._copies.begin(copy))]


def holder_of(scope: Scope) -> str:
    """The client by name: a caller may see the copies of its own answers."""
    return share_of(client_of(scope), scope)


def _written(body: Mapping[str, object]) -> bytes:
    try:
        return compact(body)
    except UnicodeEncodeError:  # a client's text may hold halves of characters
        return json.dumps(body).encode()


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
