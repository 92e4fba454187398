"""The urgency that a request asks for, and its caller and user, for fair shares.

priority        ours: 0 urgent, 1 normal, 2 batch
service_tier    OpenAI's: "priority", "default" or "auto", "flex"
user, safety_identifier
                the user that the caller asks for: its users divide its share
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from starlette.types import Scope

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.http.body import integer, refuse, text
from kakeya.generation.caller import ASKABLE
from kakeya.generation.request import GenerationPriority

SHARE_PARAMS = frozenset({"priority", "service_tier", "user", "safety_identifier"})
_LONG_NAME = 64
"""Characters: shares are remembered for a while, and names travel with each request."""
_TIERS = {
    "auto": GenerationPriority.NORMAL,
    "default": GenerationPriority.NORMAL,
    "priority": GenerationPriority.URGENT,
    "flex": GenerationPriority.BATCH,
}


def read_priority(body: Mapping[str, object]) -> GenerationPriority:
    """Read the urgency. Raises InvalidArgument, also where two parameters differ."""
    number = integer(body, "priority", ASKABLE[0], ASKABLE[-1], default=None)
    tier = body.get("service_tier")
    if tier is None:
        return GenerationPriority.NORMAL if number is None else GenerationPriority(number)
    if not isinstance(tier, str) or tier not in _TIERS:
        refuse("service_tier", tier, f"one of {', '.join(_TIERS)}")
    if number is not None and tier != "auto" and number != _TIERS[tier]:
        raise InvalidArgument(
            f"priority {number} and service_tier {tier!r} differ; give one of them",
            param="priority",
        )
    return _TIERS[tier] if number is None else GenerationPriority(number)


def read_user(body: Mapping[str, object]) -> str:
    """Read the user that the caller asks for; "" = none. A long name becomes its digest."""
    for name in ("safety_identifier", "user"):
        if body.get(name) is not None and (user := text(body[name], name)):
            return sha256(user.encode()).hexdigest() if len(user) > _LONG_NAME else user
    return ""


def share_of(client: str, scope: Scope) -> str:
    """The share of a request: the caller's, or that of its machine for a caller without a name."""
    caller: str = client or (scope.get("client") or ("",))[0]
    return caller
