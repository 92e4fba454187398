"""GET / and /page/{file}: the page, as plain files of the package.

No file holds a fact of a node, so that none needs a key; the page asks for a key where the API
does. Its policy lets it load from its own node alone, and run no script but its files.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import kakeya

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_INDEX = "index.html"
_FILES = {
    one.name: one.read_bytes()
    for one in files("kakeya.gateway.dashboard").joinpath("static").iterdir()
    if one.name.partition(".")[2] in _TYPES
}
"""Read before an event loop runs."""


def page_routes() -> list[Route]:
    """The served paths."""

    async def greet(request: Request) -> Response:
        """GET /."""
        if "text/html" in request.headers.get("accept", ""):
            return _file(request, _INDEX)
        return PlainTextResponse(
            f"Kakeya {kakeya.__version__}: language models for agents. All paths: /openapi.json.\n"
            "Models: /v1/models. Is it ready: /readyz. Of the fleet: /api/v1/status.\n",
            headers={"vary": "accept"},
        )

    async def file(request: Request) -> Response:
        """GET /page/{file}."""
        name = request.path_params["file"]
        if name not in _FILES:
            raise HTTPException(404)
        return _file(request, name)

    return [Route("/", greet), Route("/page/{file}", file)]


def _file(request: Request, name: str) -> Response:
    body = _FILES[name]
    tag = f'"{sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag, "vary": "accept"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_TYPES[name.partition(".")[2]])
