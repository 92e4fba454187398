"""The order of generations: pure decisions about places and chunks, for the scheduler to perform.

Two things are shared out: places (which generations run), and chunks of prompts between two steps
of the running batch: a few layers of a piece each. Both go by the same order:

    class    the more urgent priority, always
    share    within a class, clients that used at most EQUAL_TOKENS more than the client that used
             least; within a client that names users, the same of its users
    work     within a share, the prompt that would be done first if it had been alone here

Use is counted in tokens, an output token OUTPUT_WEIGHT times: a prompt when its generation begins,
an output as it is made. Of two clients of a class that always want more, neither gets ahead by
more than EQUAL_TOKENS and the tokens of those that may run at a time (`fair_shares`).

No generation starves. Within a share, a generation goes before all that arrive later than its
prompt takes; and each FLOOR_TURNS-th place, and such a part of the time for chunks, goes by age,
whatever the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""An output token takes a step of its own; tokens of a prompt share forwards."""
CLASSES = 6
"""Priorities 0 to 5."""
SPECULATIVE = CLASSES - 1
"""Work that no client waits for: it may be parked at any time."""
EQUAL_TOKENS = 1024
"""Clients that differ by no more have the same share: the shorter prompt then goes first."""
FLOOR_TURNS = 8
"""Each so many-th place, and one of so many seconds of chunks, goes to the generation that waited
longest."""
AGED_S = 10.0
"""The least wait for a place by age, which goes to the oldest generation that fits. It may not be
parked for so long, or until the next place by age: those that it overtook would park it at once."""
HELD_S = 60.0
"""After such a wait a generation holds the queue: it gets the next place, once there is room."""
PATIENCE_S = 2.0
"""The wait of a client that runs nothing before a client that runs several makes place for it."""
ROUND_S = 0.05
"""Time for prompts between two steps of the running batch: 20 tokens a second look fluent. A
single chunk may be longer."""
SPARE_RATIO = 16
"""Beside other work, a speculative prompt rests so many times as long as its chunks take."""
ClaimT = TypeVar("ClaimT", bound="GenerationClaim")


@dataclass(slots=True, eq=False)
class Account:
    """Use of one client, or of one of its users, in one class, and its generations here.

    `used` is in weighted tokens. `owner` is the account of a user's client, None for a client's.
    """

    client: str
    priority: int
    used: int = 0
    user: str = ""
    waiting: int = 0
    running: int = 0
    owner: Account | None = None

    @property
    def name(self) -> str:
        """Its name in its group: the user's among the users of a client, else the client's."""
        return self.client if self.owner is None else self.user

    @property
    def is_present(self) -> bool:
        """Whether it has a generation here."""
        return bool(self.waiting or self.running)

    def pay(self, tokens: int) -> None:
        """Count weighted tokens; a negative count gives back tokens that were charged ahead."""
        self.used += tokens
        if self.owner is not None:
            self.owner.used += tokens


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationClaim:
    """One generation that waits or runs.

    `number` counts arrivals. `work_s` is the time that the rest of its prompt takes, `charged` the
    tokens that its account paid ahead for it. `served` is the count of chunks when it last got a
    chunk, or its place. `expires_s` is the deadline of its first token; an answer has none, because
    its length is not known.
    """

    account: Account
    number: int
    arrived_s: float
    work_s: float = 0.0
    expires_s: float = math.inf
    charged: int = 0
    served: int = 0

    @property
    def priority(self) -> int:
        """0 is the most urgent."""
        return self.account.priority


# --- the order


def first(claims: Sequence[ClaimT]) -> ClaimT:
    """The claim that is next by class, share and work. `claims` are not empty."""
    if len(claims) == 1:
        return claims[0]
    urgent = min(claim.priority for claim in claims)
    peers = [claim for claim in claims if claim.priority == urgent]
    peers = _equals(peers, [claim.account.owner or claim.account for claim in peers])
    of_users: dict[str, list[ClaimT]] = {}
    for claim in peers:
        if claim.account.owner is not None:
            of_users.setdefault(claim.account.client, []).append(claim)
    turns = [claim for claim in peers if claim.account.owner is None]
    for claims in of_users.values():
        turns += _equals(claims, [claim.account for claim in claims])
    return min(turns, key=done_alone_s)


def _equals(claims: Sequence[ClaimT], accounts: Sequence[Account]) -> list[ClaimT]:
    """The claims of accounts that used at most EQUAL_TOKENS more than the least of them."""
    equal = min(account.used for account in accounts) + EQUAL_TOKENS
    both = zip(claims, accounts, strict=True)
    return [claim for claim, account in both if account.used <= equal]


def done_alone_s(claim: GenerationClaim) -> tuple[float, int]:
    """When its prompt would be done if it were alone here."""
    return claim.arrived_s + claim.work_s, claim.number


# --- places


def next_place(
    claims: Sequence[ClaimT], turn: int, now_s: float, fits: Callable[[ClaimT], bool]
) -> ClaimT:
    """The claim that gets the next place; `turn` counts the places given so far.

    A claim that may hold the queue is chosen whether there is room for it or not.
    """
    if is_turn_of_age(turn):
        by_age = sorted(claims, key=lambda claim: claim.number)
        for claim in by_age:
            if may_hold(claim, now_s):
                return claim
        for claim in by_age:
            if now_s - claim.arrived_s >= AGED_S and fits(claim):
                return claim
    return first(claims)


def may_hold(claim: GenerationClaim, now_s: float) -> bool:
    """Whether a claim waited so long that others wait until there is room for it."""
    return claim.priority != SPECULATIVE and now_s - claim.arrived_s >= HELD_S


def may_pass(
    claim: GenerationClaim, held: GenerationClaim, running: Iterable[GenerationClaim]
) -> bool:
    """Whether a claim may get a place before the claim that holds the queue."""
    # The holder waits for the less urgent one that runs anyway, and that one makes place for the
    # claim. So running work ends class by class, and an urgent claim waits for its equals only.
    return claim.priority < held.priority and any(one.priority > claim.priority for one in running)


def parking_order(
    claim: GenerationClaim,
    running: Sequence[ClaimT],
    now_s: float,
    kept: GenerationClaim | None = None,
) -> list[ClaimT]:
    """Running generations that may be parked for a claim, in this order; never `kept`.

    All that are less urgent, the youngest of the least urgent class first. Where there is none,
    and the claim's client runs nothing and waited for PATIENCE_S: of the client that runs most,
    the youngest of the claim's class, if that client runs several of this class.
    """
    below = [one for one in running if one.priority > claim.priority and one is not kept]
    if below:
        return sorted(below, key=lambda one: (-one.priority, -one.number))
    by_client: dict[str, list[ClaimT]] = {}
    for one in running:
        by_client.setdefault(one.account.client, []).append(one)
    if claim.account.client in by_client or now_s - claim.arrived_s < PATIENCE_S:
        return []
    most = max(by_client.values(), key=len, default=[])
    peers = [one for one in most if one.priority == claim.priority and one is not kept]
    return [max(peers, key=lambda one: one.number)] if len(peers) > 1 else []


def weakest(running: Sequence[ClaimT]) -> ClaimT:
    """The generation that is parked first when memory is outgrown: the youngest of the least urgent
    class, so the oldest of the most urgent class always comes to its end."""
    return max(running, key=lambda one: (one.priority, one.number))


# --- chunks of prompts


def next_chunk(
    claims: Sequence[ClaimT], passed_s: float, chunk_s: Callable[[ClaimT], float]
) -> tuple[ClaimT, bool]:
    """The claim that gets the next chunk, and whether it waited longest for one.

    `passed_s` are the seconds of chunks that went past those that waited longest: see `passed`.
    By seconds, and not by number: chunks of less urgent prompts may be several times as long.
    """
    oldest = min(claims, key=lambda claim: (claim.served, claim.number))
    is_due = passed_s >= (FLOOR_TURNS - 1) * chunk_s(oldest)
    chosen = oldest if is_due else first(claims)
    return chosen, chosen is oldest


def passed(passed_s: float, took_s: float, *, is_oldest: bool) -> float:
    """`passed_s` behind another chunk, which `is_oldest` says that it went by age."""
    if is_oldest:
        return max(0.0, passed_s - (FLOOR_TURNS - 1) * took_s)
    return passed_s + took_s


def has_rested(next_s: float, rested_s: float) -> bool:
    """Whether a speculative prompt may go on beside other work, with a chunk that takes `next_s`,
    `rested_s` after its last one."""
    return rested_s >= SPARE_RATIO * next_s


def is_chunk_due(
    chunks: int, spent_s: float, next_s: float, *, round_s: float, is_first_token_due: bool
) -> bool:
    """Whether another chunk is computed before the next step of the running batch.

    `chunks` were computed since its last step, in `spent_s` of `round_s`; the next takes `next_s`.
    A long chunk also waits until generations that are done with their prompts have sent their first
    token.
    """
    if spent_s + next_s <= round_s:
        return True
    return chunks == 0 and not is_first_token_due


def is_turn_of_age(turn: int) -> bool:
    """Whether a place goes by age; `turn` counts those given so far."""
    return turn % FLOOR_TURNS == FLOOR_TURNS - 1


# --- deadlines


def first_token_s(
    claim: GenerationClaim,
    waiting: Iterable[GenerationClaim],
    running: Sequence[GenerationClaim],
    *,
    places: int,
    place_every_s: float,
    stretch: float,
) -> float:
    """Estimate when a claim's first token comes, in seconds from `now`.

    Counted are the prompts that go before it by class and work, and its own, `stretch` times as
    long as alone because of steps between their chunks. Not before it gets a place, of which one
    of all `places` falls vacant each `place_every_s`.
    """
    order = _urgency(claim)
    ahead = [one for one in waiting if _urgency(one) < order]
    before_s = sum(one.work_s for one in ahead)
    before_s += sum(one.work_s for one in running if _urgency(one) < order)
    free_places = places - sum(one.priority <= claim.priority for one in running)
    place_s = max(0, len(ahead) + 1 - free_places) * place_every_s
    return max(before_s * stretch, place_s) + claim.work_s * stretch


def _urgency(claim: GenerationClaim) -> tuple[int, float, int]:
    return claim.priority, *done_alone_s(claim)
