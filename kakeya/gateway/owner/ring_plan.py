"""GET /api/v1/ring/plan: the ring group that a model would have now. Nothing is started.

model    a name that a node of the fleet knows, or a folder on this machine
nodes    labels or ids of the nodes to use, with commas between them; all live ones
split    tensor or pipeline; the faster one
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kakeya.core.errors import InvalidArgument
from kakeya.dispatch.peers.ring_survey import RingSurvey
from kakeya.fleet.placement.ring import RingSplit

PATH = "/api/v1/ring/plan"
_PARAMETERS = ("model", "nodes", "split")


class RingPlanRoute:
    """The endpoint."""

    def __init__(self, survey: RingSurvey) -> None:
        self._survey = survey

    def route(self) -> Route:
        """The served path."""
        return Route(PATH, self.answer)

    async def answer(self, request: Request) -> Response:
        """Plan a group. Raises InvalidArgument, NotFound."""
        asked = request.query_params
        for name in asked:
            if name not in _PARAMETERS:
                raise InvalidArgument(
                    f"{name[:80]!r} is no parameter here; there are {', '.join(_PARAMETERS)}",
                    param=name[:80],
                )
        model = asked.get("model", "")
        if not model:
            raise InvalidArgument(
                "model is missing; give the name of a model, or its folder", param="model"
            )
        outlook = await self._survey.plan(
            model,
            named=[name for name in asked.get("nodes", "").split(",") if name],
            split=_split(asked.get("split", "")),
        )
        return JSONResponse(outlook.to_json())


def _split(said: str) -> RingSplit | None:
    if said not in ("", *RingSplit):
        raise InvalidArgument(
            f"split is {said[:80]!r}; it is {' or '.join(RingSplit)}", param="split"
        )
    return RingSplit(said) if said else None
