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
from kakeya.gateway.http.fields import choice_field, integer_field, table, text_field
from kakeya.generation.caller import ASKABLE
from kakeya.generation.request import GenerationPriority

_LONG_NAME = 64
"""Characters: shares are remembered for a while, and names travel with each request."""
_TIERS = {
    "auto": GenerationPriority.NORMAL,
    "default": GenerationPriority.NORMAL,
    "priority": GenerationPriority.URGENT,
    "flex": GenerationPriority.BATCH,
}
_PRIORITY = integer_field("priority", ASKABLE[0], ASKABLE[-1])
_TIER = choice_field("service_tier", tuple(_TIERS))
USERS = (text_field("safety_identifier"), text_field("user"))
SHARE_PARAMS = table(_PRIORITY, _TIER, *USERS)


def read_priority(body: Mapping[str, object]) -> GenerationPriority:
    """Read the urgency. Raises InvalidArgument, also where two parameters differ."""
    number, tier = _PRIORITY.read(body), _TIER.read(body)
    if tier is None:
        return GenerationPriority.NORMAL if number is None else GenerationPriority(number)
    if number is not None and tier != "auto" and number != _TIERS[tier]:
        raise InvalidArgument(
            f"priority {number} and service_tier {tier!r} differ; give one of them",
            param="priority",
        )
    return _TIERS[tier] if number is None else GenerationPriority(number)


def read_user(body: Mapping[str, object]) -> str:
    """Read the user that the caller asks for; "" = none. A long name becomes its digest."""
    for field in USERS:
        if user := field.read(body):
            return sha256(user.encode()).hexdigest() if len(user) > _LONG_NAME else user
    return ""


def share_of(client: str, scope: Scope) -> str:
    """The share of a request: the caller's, or that of its machine for a caller without a name."""
    caller: str = client or (scope.get("client") or ("",))[0]
    return caller
