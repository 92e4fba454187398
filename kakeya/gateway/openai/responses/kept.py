"""GET and DELETE /v1/responses/{id}, and POST /v1/responses/{id}/cancel.

A response is one that the node keeps for later requests, one that was made, or is being made, in
the background, or one of which a copy is held: any node streamed it, or made it in the background.
A stream of the latter two goes on from ?starting_after=NUMBER, or Last-Event-ID.
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kakeya.core.errors import Conflict, InvalidArgument, NotFound, Unsupported
from kakeya.dispatch.job import Job
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.jobs import viewer_of
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.background import (
    BackgroundResponses,
    body_of,
    is_background,
)
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.resumable.address import AnswerAddress
from kakeya.gateway.resumable.answers import ResumableAnswers, holder_of
from kakeya.gateway.resumable.events import asked_after


class StoredResponses:
    """GET: the ASGI application behind the path; DELETE, and POST .../cancel."""

    def __init__(
        self,
        store: ResponseStore,
        background: BackgroundResponses,
        copied: AnswerAddress,
        resumable: ResumableAnswers,
    ) -> None:
        self._store = store
        self._background = background
        self._copied = copied
        self._resumable = resumable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show a response, or stream its events. Raises NotFound and InvalidArgument."""
        response_id = scope["path_params"]["response_id"]
        after = asked_after(Request(scope), response_id)
        job = self._background.find(response_id, viewer_of(scope))
        body, missing = b"", None
        if job is None:
            try:
                body = self._store.body(response_id, holder_of(scope))
            except NotFound as unknown:
                missing = unknown
        if body and after is None:
            await send_json(send, 200, body)
            return
        copy = None
        if job is None:
            copy = await self._copy(response_id, scope, missing)
            job = await self._background.adopt(copy) if is_background(copy) else None
        if job is not None:
            if after is None:
                await send_json(send, 200, body_of(job))
            else:
                await self._background.follow(job, after, receive, send)
        elif copy is not None:
            await self._show(copy, after, scope, receive, send)

    async def _copy(self, response_id: str, scope: Scope, missing: NotFound | None) -> AnswerCopy:
        try:
            return await self._copied.find(response_id, scope)
        except NotFound as unknown:
            if missing is None:
                raise Unsupported(
                    f"stream is not supported for this response: {unknown.message}", param="stream"
                ) from None
            raise NotFound(f"{missing.message}; {unknown.message}") from None

    async def _show(
        self, copy: AnswerCopy, after: int | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Tell of a response by its copy."""
        if copy.ended and after is None:
            await send_json(send, 200, copy.ended)
        elif after is None and not copy.is_complete:
            reply = parse_response(json.loads(copy.body), self._store, earlier=())
            begun = reply.begun(copy.answer_id, copy.created_at)
            status = "queued" if copy.request is None else "in_progress"
            await send_json(send, 200, compact({**begun, "status": status}))
        else:
            await self._copied.show(copy, after, scope, receive, send)

    async def delete(self, request: Request) -> Response:
        """Forget a response. Raises NotFound."""
        scope, response_id = request.scope, request.path_params["response_id"]
        job = self._background.find(response_id, viewer_of(scope))
        if job is not None:
            await self._background.forget(job)
        was_copied = await self._resumable.forget(response_id, holder_of(scope))
        if job is None:
            try:
                self._store.delete(response_id, holder_of(scope))
            except NotFound:
                if not was_copied:
                    raise
        gone = {"id": response_id, "object": "response", "deleted": True}
        return Response(compact(gone), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """End the work for a response. Raises NotFound, InvalidArgument."""
        scope, response_id = request.scope, request.path_params["response_id"]
        job = self._background.find(response_id, viewer_of(scope))
        if job is None:
            job = await self._adopted(response_id, scope)
        body = body_of(await self._background.cancel(job))
        return Response(body, media_type="application/json")

    async def _adopted(self, response_id: str, scope: Scope) -> Job:
        """The job of a response that is not one of this node's, which it takes over."""
        try:
            self._store.body(response_id, holder_of(scope))
        except NotFound as missing:
            copy = await self._copy(response_id, scope, missing)
            if is_background(copy):
                if (job := await self._background.adopt(copy)) is not None:
                    return job
                raise Conflict(
                    f"{response_id} has ended, or node {copy.node_id} makes it: cancel it there"
                ) from None
        raise InvalidArgument(
            f"{response_id} was made at once; only a response that was created with "
            "background=true can be cancelled"
        )
