"""GET /openapi.json: what the node serves, told by the tables that serve it.

The paths are those of the router, a body's parameters are the fields that read it, errors are those
of the edge. So it cannot tell of what is not there; what it tells of answers is their type alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import kakeya
from kakeya.core.errors import KakeyaError, NotFound, PeerUnavailable, Unauthenticated
from kakeya.gateway.http.callers import Forbidden
from kakeya.gateway.http.edge import STATUS_BY_ERROR, error_body, error_format
from kakeya.gateway.http.fields import Fields, NoOps, Schema, body_schema
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.reply import EVENT_STREAM, LINE_STREAM

_ANY_ERROR = tuple(sorted(set(STATUS_BY_ERROR.values()) - {499}))  # at 499 the client has left
_PLAIN_ERRORS = (Unauthenticated, Forbidden, NotFound, KakeyaError, PeerUnavailable)
"""Of a request without a body."""
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


class BodyRoute(Route):
    """A path that takes a JSON body, with the fields of that body; `takes_more` = others are no
    error."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., object],
        fields: Fields,
        no_ops: NoOps = MappingProxyType({}),
        *,
        takes_more: bool = False,
        method: str = "POST",
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.fields = fields
        self.no_ops = no_ops
        self.takes_more = takes_more


def document_route(routes: Iterable[Route], *, takes_more: bool) -> Route:
    """The path of the document; `takes_more` = unknown parameters are no error."""
    body = compact(_document(routes, takes_more=takes_more))

    async def document(request: Request) -> Response:
        """The node's OpenAPI document: this one."""
        return Response(body, media_type="application/json")

    return Route("/openapi.json", document)


def _document(routes: Iterable[Route], *, takes_more: bool) -> Mapping[str, object]:
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, path, takes_more=takes_more)
            paths.setdefault(path, {})[method.lower()] = operation
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kakeya", "version": kakeya.__version__},
        "paths": paths,
        "components": {"securitySchemes": keys},
        # Callers of the node's own machine need no key.
        "security": [{}, *({name: []} for name in keys)],
    }


def _operation(route: Route, path: str, *, takes_more: bool) -> Mapping[str, object]:
    asked: dict[str, object] = {}
    statuses: Iterable[int] = sorted(STATUS_BY_ERROR[kind] for kind in _PLAIN_ERRORS)
    answers: dict[str, object] = {"application/json": {}, "text/plain": {}}
    if path.endswith(".png"):
        answers = {"image/png": {}}
    if isinstance(route, BodyRoute):
        is_open = takes_more or route.takes_more
        schema = body_schema(route.fields, route.no_ops, takes_more=is_open)
        body = {"content": {"application/json": {"schema": schema}}, "required": True}
        asked, statuses = {"requestBody": body}, _ANY_ERROR
        answers = {"application/json": {}}
        if "stream" in route.fields:
            stream = LINE_STREAM if error_format(path) == "ollama" else EVENT_STREAM
            answers[stream.decode().partition(";")[0]] = {}
    failed = {
        "description": "an error",
        "content": {"application/json": {"schema": _error_schema(path)}},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ]
    return {
        "parameters": parameters,
        **asked,
        "responses": {
            "200": {"description": "the answer", "content": answers},
            **{str(status): failed for status in statuses},
        },
    }


def _error_schema(path: str) -> Schema:
    example: object = json.loads(error_body("", 400, code="", path=path))
    return _schema_of(example)


def _schema_of(example: object) -> Schema:
    """The schema of what looks like an example, in which null stands for a text or null."""
    if not isinstance(example, dict):
        return {"type": ["string", "null"] if example is None else "string"}
    properties = {name: _schema_of(value) for name, value in example.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
