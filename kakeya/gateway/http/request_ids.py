"""The id of a request: in the headers of its answer, in the log, and in the id of what it made.

Where a request makes an answer with an id (`chatcmpl-...`, `msg_...`), both are the same text.
"""

from __future__ import annotations

import random

from starlette.datastructures import Headers
from starlette.types import Scope

from kakeya.core.ids import draw_id

_KEY = "kakeya.request_id"
_LETTERS = 24
_LONGEST = 128
"""Characters of an id that a client gives its request; a longer one is not echoed."""


def name_request(scope: Scope, rng: random.Random) -> None:
    """Draw the id of a request that has come in."""
    scope[_KEY] = "req_" + draw_id("", rng, _LETTERS)[1:]


def scope_of(answer: str) -> dict[str, object]:
    """The part of a scope that makes its answer have a given id."""
    return {_KEY: answer}


def request_id(scope: Scope) -> str:
    """The id of a request."""
    found: str = scope[_KEY]
    return found


def answer_id(scope: Scope, prefix: str) -> str:
    """The id of the answer that a request makes, with the prefix of its API, as `chatcmpl-`.

    The request has the same id from then on. Called before the answer begins, its headers tell it.
    """
    scope[_KEY] = prefix + request_id(scope)[-_LETTERS:]
    return request_id(scope)


def client_request_id(scope: Scope) -> str:
    """The id that the client gave its request, to find it again; "" = none that can be echoed."""
    given = Headers(scope=scope).get("x-client-request-id", "")
    return given if len(given) <= _LONGEST and given.isascii() and given.isprintable() else ""


def id_headers(scope: Scope) -> dict[str, str]:
    """The headers of an answer that carry ids; `request-id` is what Anthropic's clients read."""
    own, given = request_id(scope), client_request_id(scope)
    asked = {"x-client-request-id": given} if given else {}
    return {"x-request-id": own, "request-id": own, **asked}
