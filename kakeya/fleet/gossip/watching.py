"""Watches a fleet from a program that is no node: its cards, and each change of them.

A node tells its view over `FleetService.Watch`. Where the call breaks, the watch goes on at the
same node or at another one of the view, and tells the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kakeya.core.clock import Clock
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerError, PeerUnavailable, Refused
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card, is_dialable
from kakeya.fleet.cards.convert import MalformedCard, from_wire
from kakeya.v1.fleet_pb2 import WatchRequest, WatchResponse
from kakeya.wire.calls import calling

if TYPE_CHECKING:
    from kakeya.v1.fleet_pb2_grpc import FleetServiceAsyncStub

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Between two tries of all addresses; doubled each time."""
_PASSING = (PeerError, Refused, DeadlineExceeded)
"""Ends of a call after which the watch goes on."""
_BODY_ONLY = frozenset(("wire", "digest", "key", "announced_at", "anchor", "incarnation"))
"""Fields of a card that a new body of the same content changes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """The fleet as the watched node sees it now, and what is new in it since the last change.

    `cards` are those of all live nodes, the watched node's first; `suspects` the ids of those that
    do not answer it. `changed` holds new cards and those with new content, `gone` the last cards
    of nodes that left or fell silent. While `problem` is not "", no node answers and the rest is
    what was known before.
    """

    cards: tuple[Card, ...]
    suspects: frozenset[NodeId]
    changed: tuple[Card, ...] = ()
    gone: tuple[Card, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _View:
    cards: Mapping[NodeId, Card]
    suspects: frozenset[NodeId]


async def watch_cards(
    address: str,
    connect: Callable[[str], Awaitable[FleetServiceAsyncStub]],
    *,
    may_move: bool,
    timeout_s: float,
    clock: Clock,
) -> AsyncGenerator[FleetChange, None]:
    """Yield the fleet, then each change of it, without end.

    `may_move`: another node of the fleet may tell it where this one does not answer. A node has
    `timeout_s` for its first view. Raises the failure of the first call, and later ones that
    waiting does not mend, such as Denied.
    """
    told: _View | None = None
    where, tries = address, 0
    is_lost = False
    while True:
        try:
            with calling(where):
                async with aclosing(_views(await connect(where), where, timeout_s)) as views:
                    async for view in views:
                        tries = 0
                        change = _change(told, view)
                        if told is None or is_lost or change.changed or _is_other(change, told):
                            yield change
                        told, is_lost = view, False
            failure: KakeyaError = PeerUnavailable(f"{where} ended the watch: the node stops")
        except _PASSING as problem:
            failure = problem
        if told is None:
            raise failure
        if not is_lost:
            is_lost = True
            yield FleetChange(
                cards=tuple(told.cards.values()), suspects=told.suspects, problem=failure.message
            )
        addresses = _addresses(address, told) if may_move else (address,)
        turn, at = divmod(tries, len(addresses))
        if at == 0:
            await clock.sleep(min(FIRST_PAUSE_S * 2**turn, LONGEST_PAUSE_S))
        where, tries = addresses[at], tries + 1


async def _views(
    stub: FleetServiceAsyncStub, where: str, timeout_s: float
) -> AsyncGenerator[_View, None]:
    """The whole view of a node after each of its messages."""
    cards: dict[NodeId, Card] = {}
    is_whole = False
    call = stub.Watch(WatchRequest())  # has no end; keepalive notices a node that is gone
    try:
        while True:
            try:
                message = await asyncio.wait_for(call.read(), None if is_whole else timeout_s)
            except TimeoutError as failure:
                raise DeadlineExceeded(f"{where}: no view in {timeout_s:g} s") from failure
            if not isinstance(message, WatchResponse):
                return
            for wire in message.cards:
                try:
                    card = from_wire(wire)
                except MalformedCard:
                    continue  # of a later version
                cards[card.node_id] = card
            for node_id in message.gone:
                cards.pop(NodeId(node_id), None)
            if not message.more:
                is_whole = True
                yield _View(dict(cards), frozenset(map(NodeId, message.suspects)))
    finally:
        call.cancel()


def _change(told: _View | None, view: _View) -> FleetChange:
    before = told.cards if told is not None else {}
    return FleetChange(
        cards=tuple(view.cards.values()),
        suspects=view.suspects,
        changed=tuple(
            card
            for node_id, card in view.cards.items()
            if node_id not in before or _content(before[node_id]) != _content(card)
        ),
        gone=tuple(card for node_id, card in before.items() if node_id not in view.cards),
    )


def _is_other(change: FleetChange, told: _View) -> bool:
    return bool(change.gone) or change.suspects != told.suspects


def _content(card: Card) -> tuple[object, ...]:
    return tuple(getattr(card, one.name) for one in fields(card) if one.name not in _BODY_ONLY)


def _addresses(first: str, told: _View) -> tuple[str, ...]:
    """The addresses to try: the first, then those of the nodes that were live."""
    others = (card.grpc_address for card in told.cards.values())
    return tuple(dict.fromkeys((first, *filter(is_dialable, others))))
