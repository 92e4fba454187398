"""Whether another process really answers under this node's id, before this node gives way.

Old cards and beats of an earlier life can be played back by a member that heard them, and would
look like a second owner. An answer cannot: in a fleet with identities the one that answers must
hold this node's own key.
"""

from __future__ import annotations

from collections.abc import Callable

from kakeya.core.errors import KakeyaError
from kakeya.fleet.card_trust import FleetTrust
from kakeya.fleet.cards import Card
from kakeya.fleet.describe import ask_card
from kakeya.node.membership import FleetSecurity
from kakeya.wire.channels import Channels, is_local

_LIMIT_S = 2.0


async def answers_as(
    own: Card,
    address: str,
    trust: FleetTrust | None,
    *,
    is_plain: Callable[[str], bool] = is_local,
) -> bool:
    """Ask at an address whether a node with the id of `own` and another life is there."""
    security = FleetSecurity(trust, lambda _: own.node_id) if trust else None
    channels = Channels(security=security, is_plain=is_plain)
    try:
        found = await ask_card(channels.get(address), address, timeout_s=_LIMIT_S)
    except KakeyaError:
        return False
    finally:
        await channels.aclose()
    return found.node_id == own.node_id and found.life != own.life
