"""The models on the fleet's disks and in this node's memory, and what their owner does with them.

    GET  /api/v1/models          the models here and at peers, as `kakeya models list`
    POST /api/v1/models/pull     fetch one, "from" a node or any, "keep" it from clean-ups; 202
    POST /api/v1/models/stop     end a pull that began here; what came is kept
    POST /api/v1/models/remove   remove one that a pull brought, with "force" a loaded one too
    POST /api/v1/models/load     answered once it is in memory, in its turn
    POST /api/v1/models/unload   it leaves memory, unless it is in use; a request loads it again

A pull goes on without its caller. Its progress, and the models in memory, are in /api/v1/status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kakeya.backends.engines import Engines
from kakeya.backends.terms import terms_within
from kakeya.core.errors import NotFound
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.gateway.http.connection import HttpLimits, read_request
from kakeya.gateway.http.fields import flag_field, refuse_unknown, table, text_field
from kakeya.gateway.openai.generation_params import MODEL
from kakeya.gateway.openapi import BodyRoute
from kakeya.generation.request import GenerationPriority
from kakeya.memory.api import MemoryArbiter
from kakeya.weights.listed import ListedModel, used_at
from kakeya.weights.weights import NodeWeights

_log = logging.getLogger(__name__)
PATH = "/api/v1/models"
_FROM, _KEEP, _FORCE = text_field("from"), flag_field("keep"), flag_field("force")
FIELDS = table(MODEL, _FROM, _KEEP, _FORCE)
REFUSED_S = 1.0
"""A pull that cannot begin says so within this time, mostly; a later failure is in the log."""


@dataclass(frozen=True, slots=True)
class OwnersWish:
    """What the owner wants with a model."""

    model: str
    from_node: str
    keeps: bool
    forces: bool


class ModelFilesRoute:
    """The endpoints."""

    def __init__(self, weights: NodeWeights, engines: Engines, memory: MemoryArbiter) -> None:
        self._weights = weights
        self._engines = engines
        self._memory = memory
        self._pulls: dict[str, asyncio.Task[None]] = {}

    def routes(self, limits: HttpLimits) -> list[Route]:
        """The served paths."""

        def action(name: str, act: Callable[[OwnersWish], Awaitable[int]]) -> Route:
            async def endpoint(request: Request) -> Response:
                """POST: do it with a model."""
                wish = await read_request(request.scope, request.receive, limits, _parse)
                status = await act(wish)
                return JSONResponse({"object": "model", "id": wish.model}, status)

            return BodyRoute(f"{PATH}/{name}", endpoint, FIELDS)

        async def load(wish: OwnersWish) -> int:
            terms = terms_within(limits.ready_s, GenerationPriority.NORMAL)
            async with self._engines.get(wish.model).lend(terms):
                return 200

        return [
            Route(PATH, self.show),
            action("pull", self._pull),
            action("stop", self._stop),
            action("remove", self._remove),
            action("load", load),
            action("unload", self._unload),
        ]

    async def show(self, request: Request) -> Response:
        """GET: the models, and why peers did not tell theirs."""
        listed, silent = await self._weights.listed()
        told = await asyncio.to_thread(lambda: [self._told(one) for one in listed])
        return JSONResponse({"object": "list", "data": told, "silent": dict(silent)})

    def _told(self, one: ListedModel) -> Json:
        body: Json = {"id": one.name, "bytes": one.bytes, "digest": one.digest}
        body |= {"peers": one.peers, "fetching": one.fetching, "path": ""}
        if one.found is not None:
            loaded, configured = self._weights.uses(one.found)
            record = one.found.record
            body |= {
                "path": str(one.found.path),
                "loaded_as": loaded,
                "configured_as": configured,
                "is_pulled": record is not None,
                "is_kept": record is not None and record.keep,
                "used_at": used_at(one.found.path),
            }
        return body

    async def _pull(self, wish: OwnersWish) -> int:
        task = self._pulls.get(wish.model)
        if task is None:
            task = asyncio.create_task(self._fetch(wish), name=f"pull of {wish.model}")
            self._pulls[wish.model] = task
            task.add_done_callback(partial(self._ended, wish.model))
        done, _ = await asyncio.wait((task,), timeout=REFUSED_S)
        for one in done:
            one.result()
        return 202

    async def _fetch(self, wish: OwnersWish) -> None:
        pull = self._weights.pull(wish.model, from_node=wish.from_node, keep=wish.keeps)
        async with aclosing(pull) as states:
            async for _ in states:
                pass

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        del self._pulls[model]
        if not task.cancelled() and (failure := task.exception()):
            event(_log, "pull failed", level=logging.WARNING, model=model, problem=str(failure))

    async def _stop(self, wish: OwnersWish) -> int:
        if (task := self._pulls.get(wish.model)) is None:
            raise NotFound(f"no pull of {wish.model[:80]!r} that began over HTTP is under way")
        task.cancel()
        await asyncio.wait((task,))
        return 200

    async def _remove(self, wish: OwnersWish) -> int:
        await self._weights.remove(wish.model, force=wish.forces)
        return 200

    async def _unload(self, wish: OwnersWish) -> int:
        self._memory.unload(self._engines.get(wish.model).capability, wish.model)
        return 200


def _parse(body: Mapping[str, object]) -> OwnersWish:
    refuse_unknown(body, FIELDS, {})
    return OwnersWish(MODEL.read(body), _FROM.read(body), _KEEP.read(body), _FORCE.read(body))
