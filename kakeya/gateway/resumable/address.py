"""The address of a streamed answer: its path and its id.

GET PATH/ID   with Last-Event-ID: ID:NUMBER, the events behind that one; with ?stream=true all
              of them, or those behind ?starting_after=NUMBER; without either the whole answer,
              once it is complete
POST PATH     with Last-Event-ID, and the same body: as GET with it
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.gateway.coordinator_fields import COORDINATOR_FIELDS, take_fields
from kakeya.gateway.http.body import shown
from kakeya.gateway.http.connection import read_body, read_request
from kakeya.gateway.http.fields import Fields, NoOps
from kakeya.gateway.openapi import BodyRoute
from kakeya.gateway.reply import Dialect
from kakeya.gateway.resumable.answers import ResumableAnswers, holder_of
from kakeya.gateway.resumable.events import LastEvent, asked_after, last_event
from kakeya.gateway.route import GenerationRoute


class AnswerAddress:
    """The streamed answers of one path; their ids begin with `prefix`."""

    def __init__(
        self, path: str, prefix: str, dialect: Dialect, resumable: ResumableAnswers
    ) -> None:
        self.path = path
        self._prefix = prefix
        self._dialect = dialect
        self._resumable = resumable

    def routes(self, fields: Fields, no_ops: NoOps) -> Sequence[Route]:
        """The path, for bodies with these fields, and the address of each answer."""
        generations, resumable = self._resumable.generations, self._resumable
        route = GenerationRoute(self._dialect, generations, keep=resumable.begin)
        both = ResumableRoute(route, self)
        return [
            BodyRoute(self.path, both, {**fields, **COORDINATOR_FIELDS}, no_ops),
            Route(self.path + "/{answer_id}", self, methods=["GET"]),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a GET. Raises NotFound and InvalidArgument."""
        answer_id = scope["path_params"]["answer_id"]
        after = asked_after(Request(scope), answer_id)
        copy = await self.find(answer_id, scope)
        await self.show(copy, after, scope, receive, send)

    async def find(self, answer_id: str, scope: Scope) -> AnswerCopy:
        """The copy of an answer of this path. Raises NotFound."""
        if not answer_id.startswith(self._prefix):
            raise NotFound(
                f"{shown(answer_id)} is no answer of {self.path}: their ids begin with "
                f"{self._prefix}"
            )
        return await self._resumable.find(answer_id, holder_of(scope))

    async def show(
        self, copy: AnswerCopy, after: int | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a GET with what there is behind a number; None = with the whole answer."""
        # The edge ends no answer before its request is read.
        await read_body(scope, receive, self._resumable.generations.limits)
        await self._show(copy, after, scope, receive, send)

    async def go_on(self, last: LastEvent, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a POST of a client that has events of its answer. Raises NotFound, and
        InvalidArgument where another request began it."""
        copy = await self.find(last.answer_id, scope)
        limits = self._resumable.generations.limits
        await read_request(scope, receive, limits, partial(_check_same, copy))
        await self._show(copy, last.number, scope, receive, send)

    async def _show(
        self, copy: AnswerCopy, after: int | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        show = self._resumable.show
        await show(copy, self._dialect, self.path, after, scope, receive, send)


class ResumableRoute:
    """The ASGI application behind a path of answers that have an address."""

    def __init__(self, route: ASGIApp, address: AnswerAddress) -> None:
        self._route = route
        self._address = address

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a request, or go on with an answer that was cut off. Raises InvalidArgument."""
        if (last := last_event(scope)) is None:
            return self._route(scope, receive, send)
        return self._address.go_on(last, scope, receive, send)


def _check_same(copy: AnswerCopy, whole: Mapping[str, object]) -> None:
    """Raise InvalidArgument for a request that is not the one of a copy."""
    body, _ = take_fields(whole)
    began: Mapping[str, object] = json.loads(copy.body)
    # The input of a response is held with all that comes before it.
    other = [name for name in began if name != "input" and began[name] != body.get(name)]
    if other:
        raise InvalidArgument(
            f"Last-Event-ID is of {copy.answer_id}, which another request began: its "
            f"{', '.join(other)} differs; send the same body, or leave the header out",
            param="Last-Event-ID",
        )
