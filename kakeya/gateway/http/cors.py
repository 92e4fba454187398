"""What a browser must read before a page of another origin may see an answer (CORS).

Only for origins that the owner lists; a page of the node itself needs none of it. No answer lets
cookies or other credentials of the browser in: a page sends its key as a header.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_ASKED_S = 600
"""How long a browser may remember what it was let, seconds; Chrome caps it at 7200."""
_PRIVATE = "access-control-request-private-network"


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks what a page may send, before it sends it. It never shows a key."""
    headers = Headers(scope=scope)
    is_asking = "origin" in headers and "access-control-request-method" in headers
    return scope["method"] == "OPTIONS" and is_asking


def cors_headers(scope: Scope) -> dict[str, str]:
    """The headers of any answer to a page of a listed origin, a refusal too."""
    return {
        "access-control-allow-origin": Headers(scope=scope)["origin"],
        "access-control-expose-headers": "*",
        "vary": "Origin",
    }


def preflight_headers(scope: Scope) -> dict[str, str]:
    """What a page of a listed origin may send, beside `cors_headers`."""
    headers = Headers(scope=scope)
    asked = headers.get("access-control-request-headers")
    return {
        "access-control-allow-methods": _METHODS,
        # By name: a browser does not take * for Authorization.
        **({"access-control-allow-headers": asked} if asked else {}),
        **({_PRIVATE.replace("request", "allow"): "true"} if _PRIVATE in headers else {}),
        "access-control-max-age": str(_ASKED_S),
    }
