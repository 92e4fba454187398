"""GET and PUT /api/v1/config: what of a node's settings changes while it runs.

allowCloudFallback   whether a cloud may stand in where it is not the first of a task; kept over
                     restarts
reload               true: the file that --config names is read again: its tasks and profiles, and
                     what can change of its manifests of models; the answer names the other keys
                     that differ from the start; a file with a fault is refused with the reason,
                     and nothing changes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kakeya.backends.relay.relays import Relays
from kakeya.core.errors import InvalidArgument
from kakeya.dispatch.registry import TaskRegistry
from kakeya.gateway.http.body import flag
from kakeya.gateway.http.connection import HttpLimits, read_request
from kakeya.gateway.http.fields import IS_FLAG, flag_field, refuse_unknown, table, value_field
from kakeya.gateway.openapi import BodyRoute

PATH = "/api/v1/config"
_GUARD = "allowCloudFallback"
_ALLOWS_CLOUD = value_field(
    _GUARD, lambda said: None if said is None else flag({_GUARD: said}, _GUARD), IS_FLAG
)
_RELOAD = flag_field("reload")
FIELDS = table(_ALLOWS_CLOUD, _RELOAD)


@dataclass(frozen=True, slots=True)
class _Change:
    allows_cloud: bool | None
    reloads: bool


class ConfigRoute:
    """The endpoints."""

    def __init__(self, tasks: TaskRegistry, relays: Relays, limits: HttpLimits) -> None:
        self._tasks = tasks
        self._relays = relays
        self._limits = limits

    def routes(self) -> list[Route]:
        """The served paths."""
        return [Route(PATH, self.show), BodyRoute(PATH, self.change, FIELDS, method="PUT")]

    async def show(self, request: Request) -> Response:
        """GET: the guard, what a reload changes, and the backends by their kind, without
        secrets."""
        return JSONResponse(self._relays.describe() | self._tasks.describe())

    async def change(self, request: Request) -> Response:
        """PUT: change what the body names; the answer is that of GET. Raises InvalidArgument
        and StoreFailed."""
        asked = await read_request(request.scope, request.receive, self._limits, _parse)
        if asked.reloads:
            await self._tasks.reload()
        if asked.allows_cloud is not None:
            await self._tasks.allow_cloud(asked.allows_cloud)
        return await self.show(request)


def _parse(body: Mapping[str, object]) -> _Change:
    refuse_unknown(body, FIELDS, {})
    change = _Change(_ALLOWS_CLOUD.read(body), _RELOAD.read(body))
    if change.allows_cloud is None and not change.reloads:
        raise InvalidArgument(f"nothing is asked for; give {_GUARD}, or reload: true")
    return change
