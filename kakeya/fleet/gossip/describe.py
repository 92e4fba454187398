"""Asks the node at an address for its card."""

from __future__ import annotations

import grpc.aio

from kakeya.core.errors import InvalidArgument, PeerProtocol, Refused
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.convert import MalformedCard, from_wire, split_cards
from kakeya.wire.calls import call_bytes

DESCRIBE_METHOD = "/kakeya.v1.CapabilityService/GetNodeCapability"


async def ask_card(channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> Card:
    """Return the card in the answer, not checked further.

    Raises the errors of `call_bytes`, and PeerProtocol for an answer that is no card.
    """
    answer = await call_bytes(channel, address, DESCRIBE_METHOD, b"", timeout_s=timeout_s)
    try:
        wires = split_cards(answer)  # GetNodeCapabilityResponse is framed as a batch of one
        if wires:
            return from_wire(wires[0])
    except (MalformedCard, InvalidArgument, Refused) as failure:
        raise PeerProtocol(f"{address} answers with bytes that are no card: {failure}") from failure
    raise PeerProtocol(f"{address} answers without a card")
