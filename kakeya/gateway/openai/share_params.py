"""The urgency that a request asks for, and its caller and user, for fair shares.

priority        ours: urgent, high, normal, low, batch; or 0 urgent, 1 normal, 2 batch
service_tier    OpenAI's: "priority", "default" or "auto", "flex"
user, safety_identifier
                the user that the caller asks for: its users divide its share
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from starlette.types import Scope

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.http.fields import Field, choice_field, table, text_field, value_field
from kakeya.generation.caller import PRIORITIES, PRIORITY_NUMBERS, priority_of
from kakeya.generation.request import GenerationPriority

_LONG_NAME = 64
"""Characters: shares are remembered for a while, and names travel with each request."""
_TIERS = {
    "auto": GenerationPriority.NORMAL,
    "default": GenerationPriority.NORMAL,
    "priority": GenerationPriority.URGENT,
    "flex": GenerationPriority.BATCH,
}


def priority_field(name: str) -> Field[GenerationPriority | None]:
    """A priority, by its name or number; None = absent."""
    schema = {"enum": [*PRIORITIES, *range(len(PRIORITY_NUMBERS))]}
    return value_field(name, lambda said: None if said is None else priority_of(said, name), schema)


_PRIORITY = priority_field("priority")
_TIER = choice_field("service_tier", tuple(_TIERS))
USERS = (text_field("safety_identifier"), text_field("user"))
SHARE_PARAMS = table(_PRIORITY, _TIER, *USERS)


def read_priority(body: Mapping[str, object]) -> GenerationPriority:
    """Read the urgency. Raises InvalidArgument, also where two parameters differ."""
    asked, tier = _PRIORITY.read(body), _TIER.read(body)
    if tier is None:
        return GenerationPriority.NORMAL if asked is None else asked
    if asked is not None and tier != "auto" and asked is not _TIERS[tier]:
        raise InvalidArgument(
            f"priority {asked.name.lower()} and service_tier {tier!r} differ; give one of them",
            param="priority",
        )
    return _TIERS[tier] if asked is None else asked


def read_user(body: Mapping[str, object]) -> str:
    """Read the user that the caller asks for; "" = none. A long name becomes its digest."""
    return next((name_of(user) for field in USERS if (user := field.read(body))), "")


def name_of(said: str) -> str:
    """The name by which a caller or user is known; a long one becomes its digest."""
    return sha256(said.encode()).hexdigest() if len(said) > _LONG_NAME else said


def share_of(client: str, scope: Scope) -> str:
    """The share of a request: the caller's, or that of its machine for a caller without a name."""
    caller: str = client or (scope.get("client") or ("",))[0]
    return caller
