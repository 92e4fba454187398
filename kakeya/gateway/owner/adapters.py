"""The LoRA adapters of this node, and what its owner does with them, as `kakeya adapters`.

GET  /api/v1/adapters          where each is, how much it is used, and why one is refused
POST /api/v1/adapters/add      "name", "base" and "folder" on this machine, which mlx_lm.lora
                               wrote; "owner", "exact", "replace"
POST /api/v1/adapters/remove   "model", as BASE:NAME; running requests go on with it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kakeya.adapters.files.packed import Precision
from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.manager import AdapterManager
from kakeya.core.errors import InvalidArgument
from kakeya.core.figures import Json
from kakeya.gateway.http.connection import HttpLimits, read_request
from kakeya.gateway.http.fields import Fields, flag_field, refuse_unknown, table, text_field
from kakeya.gateway.openai.generation_params import MODEL
from kakeya.gateway.openapi import BodyRoute

PATH = "/api/v1/adapters"
_NAME, _BASE, _FOLDER = text_field("name"), text_field("base"), text_field("folder")
_OWNER, _EXACT, _REPLACE = text_field("owner"), flag_field("exact"), flag_field("replace")
ADD = table(_NAME, _BASE, _FOLDER, _OWNER, _EXACT, _REPLACE)
REMOVE = table(MODEL)
Body = Mapping[str, object]


class AdapterRoutes:
    """The endpoints."""

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    def routes(self, limits: HttpLimits) -> list[Route]:
        """The served paths."""

        def action(name: str, fields: Fields, act: Callable[[Body], Awaitable[Json]]) -> Route:
            def parse(body: Body) -> Body:
                refuse_unknown(body, fields, {})
                return body

            async def endpoint(request: Request) -> Response:
                """POST: do it with an adapter."""
                wish = await read_request(request.scope, request.receive, limits, parse)
                return JSONResponse(await act(wish))

            return BodyRoute(f"{PATH}/{name}", endpoint, fields)

        return [
            Route(PATH, self.show),
            action("add", ADD, self._add),
            action("remove", REMOVE, self._remove),
        ]

    async def show(self, request: Request) -> Response:
        """GET: the adapters, and the files that were found damaged."""
        stale = await self._adapters.stale()
        told = [
            {**_told(one), **self._place(one), "problem": stale.get(one.model_id, "")}
            for one in self._adapters.records()
        ]
        told += [{"id": name, "problem": why} for name, why in self._adapters.problems().items()]
        return JSONResponse({"object": "list", "data": told})

    async def _add(self, body: Body) -> Json:
        folder = Path(_FOLDER.read(body))
        if not folder.is_absolute():
            raise InvalidArgument(f"folder {str(folder)[:200]!r} is not a whole path of this node")
        record = await self._adapters.register(
            _NAME.read(body),
            _BASE.read(body),
            folder,
            owner=_OWNER.read(body),
            precision=Precision.EXACT if _EXACT.read(body) else Precision.INT8,
            is_replacing=_REPLACE.read(body),
        )
        return _told(record)

    async def _remove(self, body: Body) -> Json:
        return _told(await self._adapters.remove(MODEL.read(body)))

    def _place(self, record: AdapterRecord) -> Json:
        known = self._adapters.describe(record)
        return {"tier": known.tier.name.lower(), "leases": known.leases, "uses": known.uses}


def _told(record: AdapterRecord) -> Json:
    return {
        "id": record.model_id,
        "object": "adapter",
        "base": record.base,
        "owner": record.owner,
        "rank": record.rank,
        "precision": record.precision,
        "bytes": record.packed_bytes,
        "registered_at": record.registered_at,
    }
