"""GET and DELETE /v1/responses/{id}, and POST /v1/responses/{id}/cancel.

A response is one that the node keeps for later requests, one that was made, or is being made, in
the background, or one that was streamed, by any node, of which a copy is held. A stream of the
latter two goes on from ?starting_after=NUMBER.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kakeya.core.errors import InvalidArgument, NotFound, Unsupported
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.jobs import viewer_of
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.background import BackgroundResponses, body_of
from kakeya.gateway.openai.responses.resumed import ResumableResponses
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.openai.share_params import share_of


class StoredResponses:
    """GET: the ASGI application behind the path; DELETE, and POST .../cancel."""

    def __init__(
        self,
        store: ResponseStore,
        background: BackgroundResponses,
        resumable: ResumableResponses,
    ) -> None:
        self._store = store
        self._background = background
        self._resumable = resumable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show a response, or stream its events. Raises NotFound and InvalidArgument."""
        request = Request(scope)
        is_stream = request.query_params.get("stream", "false") != "false"
        response_id = scope["path_params"]["response_id"]
        job = self._background.find(response_id, viewer_of(scope))
        if job is not None:
            if is_stream:
                await self._background.follow(job, _after(request), receive, send)
            else:
                await send_json(send, 200, body_of(job))
            return
        body, missing = b"", None
        try:
            body = self._store.body(response_id, share_of(client_of(scope), scope))
        except NotFound as unknown:
            missing = unknown
        if body and not is_stream:
            await send_json(send, 200, body)
            return
        after = _after(request) if is_stream else None
        if await self._resumable.show(response_id, after, scope, receive, send):
            return
        raise missing or Unsupported(
            "stream is not supported for a response of which no node holds a copy: it was not "
            "streamed, is older than ten minutes, or was asked for with resumable false",
            param="stream",
        )

    async def delete(self, request: Request) -> Response:
        """Forget a response. Raises NotFound."""
        scope, response_id = request.scope, request.path_params["response_id"]
        job = self._background.find(response_id, viewer_of(scope))
        if job is not None:
            await self._background.forget(job)
        else:
            was_copied = await self._resumable.forget(response_id, scope)
            try:
                self._store.delete(response_id, share_of(client_of(scope), scope))
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
            self._store.body(response_id, share_of(client_of(scope), scope))
            raise InvalidArgument(
                f"{response_id} was made at once; only a response that was created with "
                "background=true can be cancelled"
            )
        body = body_of(await self._background.cancel(job))
        return Response(body, media_type="application/json")


def _after(request: Request) -> int:
    said = request.query_params.get("starting_after", "-1")
    if said != "-1" and not (said.isdecimal() and said.isascii() and len(said) < 10):
        raise InvalidArgument(
            f"starting_after is {said[:20]!r}; it must be the sequence_number of an event",
            param="starting_after",
        )
    return int(said)
