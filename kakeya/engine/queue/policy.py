"""Who goes next, and who makes place: pure decisions over claims, for the scheduler to perform.

A claim is one generation. Two things are shared out: places (who runs), and the chunks of prompts
between two steps of those that decode. Both go by the same order:

    class    the more urgent priority, always
    share    among these, clients that used about as little as the one that used least; and of its
             users, where a client names some, those that did
    work     among these, whose prompt would be done first if it had been alone since it arrived

What a client used is counted in tokens, an output token OUTPUT_WEIGHT times: a prompt when its
generation begins, an output as it is made (the virtual counters of "Fairness in Serving Large
Language Models", Sheng et al. 2024). A client that comes back is lifted to those that are there:
what it did not use is gone. So between two clients of a class that always want more, neither gets
ahead by more than EQUAL_TOKENS and what may run at a time.

What nobody waits for gets about one part in SPARE_RATIO of the time that others want, in chunks.

Nobody starves: who arrives later than a prompt's own work goes after it, and every FLOOR_TURNS-th
time the order is that of waiting alone, whatever the class. Who got a place so, and not by its
class, keeps it for AGED_S, or until the next one gets one so: it would make place at once for those
that it went before. Who waited for HELD_S holds the line, unless nobody waits for what it makes:
until there is room for it, only those more urgent than it get a place, and these only while one
runs that is less urgent than they are. So what it waits for comes to an end, class by class, and
what is urgent waits for nobody but its equals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""An output token takes a step of its own; those of a prompt share forwards."""
CLASSES = 4
"""Priorities 0 to 3."""
SPECULATIVE = CLASSES - 1
"""What nobody waits for: it makes place at any time."""
EQUAL_TOKENS = 1024
"""Clients whose use differs by no more have the same share: a short prompt then goes first."""
FLOOR_TURNS = 8
"""Each so many-th place and chunk goes to who waited longest."""
AGED_S = 10.0
"""So long somebody must have waited for such a place, which then goes to it where it fits."""
HELD_S = 60.0
"""So long, and it holds the line until there is room for it."""
PATIENCE_S = 2.0
"""A client that runs nothing waits so long before one that runs several makes place."""
ROUND_S = 0.05
"""Of prompts between two steps of those that decode: 20 tokens a second look fluent. A single
chunk may be longer."""
SPARE_RATIO = 16
"""Beside others, a prompt that nobody waits for rests so many times as long as its chunks take."""
ClaimT = TypeVar("ClaimT", bound="GenerationClaim")
Turn: TypeAlias = tuple[float, int]
"""When a claim's prompt would be done if alone, in seconds, and its number: an order of claims."""


@dataclass(slots=True, eq=False)
class Equals:
    """So many accounts that wait, run nothing, and used the same, of those that are fair to each
    other; `shares` keeps them. `heads` is a heap of the first claims of each."""

    used: int
    accounts: int = 0
    is_near: bool = False
    heads: list[Turn] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Account:
    """What one client, or one of its users, used in one class, in weighted tokens, and what it has
    there now."""

    client: str
    priority: int
    used: int = 0
    waiting: int = 0
    running: int = 0
    turns: list[Turn] = field(default_factory=list)
    """Of the claims of a user that wait; `shares` keeps them."""
    equals: Equals | None = None
    """Among which it rests."""
    owner: Account | None = None
    """The client's; None = it is that."""

    def head(self) -> Turn | None:
        """The first of its claims that wait; None = it has none."""
        return self.turns[0] if self.turns else None

    def pay(self, tokens: int) -> None:
        """Count what it used, or does not use after all, in weighted tokens."""
        self.used += tokens
        if self.owner is not None:
            self.owner.used += tokens


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationClaim:
    """One generation that waits or runs.

    `number` counts arrivals. `work_s` is what is left of its prompt, `charged` the part of it that
    its account was charged for ahead. `served` is when it last got a chunk, or else its place,
    counted in chunks. `expires_s` is when its first token must be there. `alone_s` is when its
    prompt would be done if alone, and `need_bytes` the room that it enters with. While it waits,
    none of these changes.
    """

    account: Account
    number: int
    arrived_s: float
    work_s: float = 0.0
    expires_s: float = math.inf
    charged: int = 0
    served: int = 0
    alone_s: float = 0.0
    need_bytes: int = 0

    @property
    def priority(self) -> int:
        """0 is the most urgent."""
        return self.account.priority


def first(claims: Sequence[ClaimT]) -> ClaimT:
    """Whose turn it is, by class, share and work; `claims` are not empty."""
    if len(claims) == 1:
        return claims[0]
    urgent = min(claim.priority for claim in claims)
    peers = [claim for claim in claims if claim.priority == urgent]
    peers = _equals(peers, [claim.account.owner or claim.account for claim in peers])
    by_client: dict[str, list[ClaimT]] = {}
    for claim in peers:
        if claim.account.owner is not None:
            by_client.setdefault(claim.account.client, []).append(claim)
    turns = [claim for claim in peers if claim.account.owner is None]
    for claims in by_client.values():
        turns += _equals(claims, [claim.account for claim in claims])
    return min(turns, key=_done_alone_s)


def _equals(claims: Sequence[ClaimT], accounts: Sequence[Account]) -> list[ClaimT]:
    """Those whose account used about as little as the one that used least."""
    equal = min(account.used for account in accounts) + EQUAL_TOKENS
    both = zip(claims, accounts, strict=True)
    return [claim for claim, account in both if account.used <= equal]


def is_turn_of_age(turn: int) -> bool:
    """Whether a place or chunk goes to who waited longest; `turn` counts those given so far."""
    return turn % FLOOR_TURNS == FLOOR_TURNS - 1


def may_hold(claim: GenerationClaim, now_s: float) -> bool:
    """Whether a claim has waited so long that others wait until there is room for it."""
    return claim.priority != SPECULATIVE and now_s - claim.arrived_s >= HELD_S


def may_pass(
    claim: GenerationClaim, held: GenerationClaim, running: Iterable[GenerationClaim]
) -> bool:
    """Whether a claim may get a place before the one that holds the line.

    While one runs that is less urgent than the claim, the other waits for that one anyway.
    """
    return claim.priority < held.priority and any(one.priority > claim.priority for one in running)


def next_chunk(claims: Sequence[ClaimT], turn: int) -> ClaimT:
    """Whose chunk is computed next; `turn` counts the chunks computed so far."""
    if is_turn_of_age(turn):
        return min(claims, key=lambda claim: (claim.served, claim.number))
    return first(claims)


def makes_place(
    claim: GenerationClaim,
    running: Sequence[ClaimT],
    now_s: float,
    kept: GenerationClaim | None = None,
) -> list[ClaimT]:
    """Who of those that run may be set aside for a claim, in this order; never `kept`.

    All that are less urgent, the youngest of the least urgent class first. Where there is none:
    the youngest of the client that runs most, when it runs several in the claim's class or a less
    urgent one and the claim's client, which waited long enough, runs none.
    """
    client = claim.account.client
    has_none = now_s - claim.arrived_s >= PATIENCE_S and all(
        one.account.client != client for one in running
    )
    return victims(claim.priority, running, kept, has_none=has_none)


def victims(
    priority: int, running: Sequence[ClaimT], kept: GenerationClaim | None, *, has_none: bool
) -> list[ClaimT]:
    """See `makes_place`: for a claim of a class, whose client runs none and waited long enough."""
    below = [one for one in running if one.account.priority > priority and one is not kept]
    if below:
        return sorted(below, key=lambda one: (-one.priority, -one.number))
    if not has_none:
        return []
    by_client: dict[str, list[ClaimT]] = {}
    for one in running:
        by_client.setdefault(one.account.client, []).append(one)
    most = max(by_client.values(), key=len, default=[])
    peers = [one for one in most if one.priority == priority and one is not kept]
    return [max(peers, key=lambda one: one.number)] if len(peers) > 1 else []


def weakest(running: Sequence[ClaimT]) -> ClaimT:
    """Who ends when those that run outgrow what there is: never the oldest of the most urgent."""
    return max(running, key=lambda one: (one.priority, one.number))


def has_rested(next_s: float, rested_s: float) -> bool:
    """Whether a prompt that nobody waits for may go on beside others, with a chunk of `next_s`,
    `rested_s` after its last one."""
    return rested_s >= SPARE_RATIO * next_s


def is_chunk_due(chunks: int, spent_s: float, next_s: float, *, somebody_is_mute: bool) -> bool:
    """Whether another chunk is computed before those that decode take their next step.

    `chunks` were computed since their last one, in `spent_s`; the next takes `next_s`. A long one
    also waits for those whose prompts are done to say their first word.
    """
    if spent_s + next_s <= ROUND_S:
        return True
    return chunks == 0 and not somebody_is_mute


@dataclass(frozen=True, slots=True)
class AheadOfClaim:
    """How many that wait go before a claim by class and work, and what of their prompts is left,
    in seconds."""

    count: int = 0
    work_s: float = 0.0


def first_token_s(
    claim: GenerationClaim,
    ahead: AheadOfClaim,
    running: Iterable[GenerationClaim],
    *,
    free_places: int,
    place_every_s: float,
    stretch: float,
) -> float:
    """When a claim's first token can be expected, in seconds from now.

    Prompts that go before it and its own, `stretch` times as long as alone because of those that
    decode meanwhile; not before it gets a place, of which one falls vacant `place_every_s`.
    """
    order = (claim.priority, *_done_alone_s(claim))
    before_s = ahead.work_s
    before_s += sum(one.work_s for one in running if (one.priority, *_done_alone_s(one)) < order)
    place_s = max(0, ahead.count + 1 - free_places) * place_every_s
    return max(before_s * stretch, place_s) + claim.work_s * stretch


def _done_alone_s(claim: GenerationClaim) -> tuple[float, int]:
    return claim.arrived_s + claim.work_s, claim.number
