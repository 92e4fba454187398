"""The queue of requests for a lease, and the decision on one of them at this moment.

    by swap   a resident goes as it has a place in the same role, and no place is left
    to fit    a resident goes as its bytes are needed, and the request is more urgent than the
              resident, or has waited long enough

All functions are pure. The arbiter walks the queue in order of urgency and adds up the claims of
the requests ahead. So no request is overtaken by an equal, and a request that needs nothing of
these claims proceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya.core import errors
from kakeya.core.units import format_bytes
from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.plan import Ask, Reason, ResidentEviction
from kakeya.memory.arbiter.policy import (
    PressureLevel,
    Rules,
    ShrinkTenant,
    fit,
    fit_key,
    may_displace,
    shrinkable_bytes,
    ticket_rank,
    turn_end_mono,
    yields_to,
)
from kakeya.memory.arbiter.resident import LeaseId, Resident, ResidentKey, State

_EVER_S = 1e9


@dataclass(slots=True)
class LoadTicket:
    """A request in the queue, or the place of a refused one. Its number becomes that of its
    lease."""

    lease: LeaseId
    ask: Ask
    asked_mono: float
    place_mono: float
    """The time of its place: before `asked_mono` where the request came again."""
    kept_until_mono: float | None = None
    """The end of a kept place; None = the request is in the queue."""
    is_stuck: bool = False
    """Whether it waits for residents to drain, or for bytes that others hold."""
    stuck_since_mono: float | None = None
    """The begin of such a wait that has a limit; None = it does not wait so."""
    stuck_s: float = 0.0
    """Seconds of earlier waits of this kind, with waits for its turn between."""

    def go_first(self) -> None:
        """Stand before all other requests, as the one that waited longest."""
        self.place_mono = -_EVER_S

    def mark(self, now: float, wait: NotYet) -> None:
        """Note whether the request is stuck, and whether that has a limit.

        Uses end: a request with a deadline waits for residents in use until then. The seconds are
        summed up: two requests that overtake each other by age both reach their limit.
        """
        self.is_stuck = wait.is_stuck
        is_limited = wait.is_stuck and not (wait.claims and self.ask.deadline_mono < math.inf)
        if self.stuck_since_mono is not None and not is_limited:
            self.stuck_s += now - self.stuck_since_mono
            self.stuck_since_mono = None
        elif is_limited and self.stuck_since_mono is None:
            self.stuck_since_mono = now

    def limit_mono(self, rules: Rules) -> float | None:
        """The end of its wait, or of its claim to free bytes; None = neither has a limit."""
        since_mono = self.stuck_since_mono
        return None if since_mono is None else since_mono + rules.drain_limit_s - self.stuck_s

    @property
    def is_of_model(self) -> bool:
        """Whether it waits for a model, and not for room or for a lease of memory."""
        return not (self.ask.role.is_room or self.ask.role.is_lent)

    @property
    def has_come_again(self) -> bool:
        """Whether it was refused before, and came again as it was told to."""
        return self.place_mono < self.asked_mono

    def rank(self, now: float, rules: Rules) -> int:
        """Urgency, age included; the lowest rank is the most urgent."""
        return ticket_rank(self.ask.priority, now - self.place_mono, rules)

    def rank_over(self, one: Resident, now: float, rules: Rules) -> int:
        """Its rank for the room of a resident: its age counts when the resident's turn is over."""
        is_held = now < turn_end_mono(one, rules) and self.place_mono > -_EVER_S
        return self.ask.priority.rank if is_held else self.rank(now, rules)


@dataclass(slots=True)
class EarlierClaims:
    """Residents, places of roles and bytes that requests ahead in the queue need."""

    opened: frozenset[ResidentKey] = frozenset()
    """Residents that give leases once more before they drain on."""
    claims: set[ResidentKey] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    keys: set[ResidentKey] = field(default_factory=set)
    held_bytes: int = 0

    def add(self, ask: Ask, wait: NotYet) -> None:
        """Keep what one more request waits for from the requests behind it."""
        self.claims.update(wait.claims)
        if not wait.gives_way:
            self.roles.add(ask.role.name)
        self.keys.add(ask.key)
        self.held_bytes += wait.held_bytes

    def may_go(self, one: Resident) -> bool:
        """Whether a resident may be evicted for the next request."""
        is_open = one.is_open and not (one.leases and one.key in self.opened)
        return is_open and one.key not in self.claims


@dataclass(frozen=True, slots=True)
class Lend:
    """The resident is loaded: give a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadNow:
    """The model can be loaded after these evictions and shrinks; none of them is in use."""

    evict: tuple[ResidentEviction, ...] = ()
    shrink: tuple[ShrinkTenant, ...] = ()
    asked_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """The request waits.

    `claims` are the residents that it needs to drain, `held_bytes` the free bytes that requests
    behind it must leave. `is_stuck` = it waits for residents to drain, or for bytes that others
    hold, and not just for its turn. `gives_way` = its role is not taken for those behind it.
    """

    claims: tuple[ResidentKey, ...] = ()
    held_bytes: int = 0
    is_stuck: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is refused.

    `keeps` are claims that stay until the request comes again; None = nothing stays.
    """

    error: errors.KakeyaError
    keeps: NotYet | None = None


Verdict = Lend | LoadNow | NotYet | Refuse


@dataclass(frozen=True, slots=True)
class QueueView:
    """The state that a decision reads."""

    ledger: Ledger
    level: PressureLevel
    rules: Rules
    now: float
    is_stopping: bool


def decide(ticket: LoadTicket, ahead: EarlierClaims, view: QueueView) -> Verdict:
    """Decide on a request; refuse it at its deadline, and without one at the limit of its wait.
    With one it waits on for bytes that others hold, and keeps none from requests behind it."""
    ask, now = ticket.ask, view.now
    if view.is_stopping:
        return Refuse(errors.Refused(f"the memory arbiter is shutting down; {ask.key} is not lent"))
    if now >= ask.deadline_mono:
        is_loading = ticket.stuck_since_mono is None
        return Refuse(late(ticket, view) if is_loading else _held(ticket, view))
    verdict = consider(ticket, ahead, view)
    wait = verdict if isinstance(verdict, NotYet) else NotYet()
    ticket.mark(now, wait)
    limit_mono = ticket.limit_mono(view.rules)
    if limit_mono is None or now < limit_mono:
        return verdict
    if ask.deadline_mono < math.inf:
        return NotYet(is_stuck=True, gives_way=True)
    return _stuck(ticket, wait, view)


def keep(ticket: LoadTicket, ahead: EarlierClaims, view: QueueView) -> NotYet | None:
    """The claims of a kept place, until its request comes again; None = none."""
    if view.is_stopping or not ticket.has_come_again:
        return None
    # A request that came again has its claims kept while it is away: the leases of a model come
    # to an end, and the request is served when it is back.
    verdict = consider(ticket, ahead, view)
    match verdict:
        case NotYet():
            return verdict
        case LoadNow():
            given = sum(one.bytes for one in verdict.evict)
            claims = tuple(one.key for one in verdict.evict)
            return NotYet(claims=claims, held_bytes=max(0, ticket.ask.estimate_bytes - given))
        case Lend() | Refuse():
            return None


def consider(ticket: LoadTicket, ahead: EarlierClaims, view: QueueView) -> Verdict:
    """Decide on a request after the requests ahead of it, without its deadline and limit."""
    ask = ticket.ask
    resident = view.ledger.find(ask.key)
    if resident is not None and resident.is_open and ask.key not in ahead.claims:
        return Lend()
    if resident is not None and resident.state is State.LOADING:
        return NotYet()
    if view.level is PressureLevel.CRITICAL and ask.role.yields:
        return Refuse(critical(ask, view.rules))
    if ask.key in ahead.keys:  # loaded for the request ahead, and then for this one too
        return NotYet()
    if resident is not None:  # it leaves, and this request loads it again
        return NotYet(held_bytes=ask.estimate_bytes)
    if ask.role.places is not None and ask.role.name in ahead.roles:
        return NotYet(held_bytes=_more_than(_of_role(ask, view), ask))
    return _consider_load(ticket, ahead, view)


def late(ticket: LoadTicket, view: QueueView) -> errors.DeadlineExceeded:
    """The refusal of a request without time for its load, with the estimate of the load's end."""
    ask, now = ticket.ask, view.now
    left_s = max(0.0, ask.deadline_mono - ticket.asked_mono)
    resident = view.ledger.find(ask.key)
    if not ticket.is_of_model or (resident is not None and resident.is_open):
        return errors.DeadlineExceeded(
            f"{ask.key} was not lent within the {left_s:.3g} s that the deadline left; allow more "
            "time"
        )
    draining = [one for one in view.ledger.residents if one.state is State.DRAINING]
    if ticket.is_stuck and (held := _in_use(draining)):
        return errors.ModelLoading(
            f"too long: {ask.key} waited for the room of {held}, still in use after the "
            f"{left_s:.3g} s that the deadline left; ask again, or allow more time",
            retry_after_s=view.rules.return_s,
        )
    if resident is not None and resident.state is State.LOADING:
        wait_s = ask.load_s - (now - resident.last_used_mono)
    else:
        wait_s = ask.load_s + max(0.0, ticket.place_mono + view.rules.age_s - now)
    wait_s = max(0.0, wait_s)
    needs = f"{wait_s:.3g} s to load"
    if ask.run_s:
        needs += f" and {ask.run_s:.3g} s to answer"
    return errors.ModelLoading(
        f"too long: {ask.key} is estimated to take {needs}, and the deadline is {left_s:.3g} s; "
        "ask again when it is loaded, which goes on meanwhile, or keep it warm",
        retry_after_s=max(1.0, wait_s),
    )


def critical(ask: Ask, rules: Rules) -> errors.MemoryRefused:
    """The refusal of a load while memory is critical."""
    return errors.MemoryRefused(
        f"memory pressure is critical; refusing to load {ask.key}: role {ask.role.name!r} gives "
        "way to pressure; ask again when it has passed",
        retry_after_s=rules.cooldown_s,
    )


def _stuck(ticket: LoadTicket, wait: NotYet, view: QueueView) -> Refuse:
    """The refusal of a request that waited to the limit for residents to drain."""
    ask, limit_s = ticket.ask, view.rules.drain_limit_s
    if held := _in_use([view.ledger.get(key) for key in wait.claims]):
        error = errors.DrainTimeout(
            f"timeout waiting for {held} to drain: in use for over {limit_s:.3g} s while {ask.key} "
            f"waits for its room; ask again, its place in the queue is kept for "
            f"{view.rules.place_s:.3g} s",
            retry_after_s=view.rules.return_s,
        )
        return Refuse(error, keeps=wait if ticket.has_come_again else None)
    return Refuse(_held(ticket, view))


def _held(ticket: LoadTicket, view: QueueView) -> errors.MemoryRefused:
    """The refusal of a request that waited to its end for bytes that others hold."""
    ask, free_bytes = ticket.ask, max(0, view.ledger.free_bytes)
    return errors.MemoryRefused(
        f"{ask.key} needs {format_bytes(ask.estimate_bytes)}, {format_bytes(free_bytes)} are free "
        f"after a wait of {view.now - ticket.asked_mono:.3g} s, and the rest is held by other "
        "programs or by sessions in use; ask again later",
        retry_after_s=view.rules.drain_limit_s,
    )


def _in_use(residents: Sequence[Resident]) -> str:
    return ", ".join(f"{one.key} (refcount={len(one.leases)})" for one in residents if one.leases)


def _consider_load(ticket: LoadTicket, ahead: EarlierClaims, view: QueueView) -> Verdict:
    ask, ledger = ticket.ask, view.ledger
    swap = _swapped(ask, ahead, view)
    if not isinstance(swap, tuple):
        return swap
    need = ask.estimate_bytes - (ledger.free_bytes - ahead.held_bytes)
    need -= sum(resident.bytes for resident in swap)
    candidates = [
        one
        for one in ledger.residents
        if ahead.may_go(one)
        and one not in swap
        and may_displace(ask.role, one, may_displace_text=ask.may_displace_text)
        and yields_to(one, ticket.rank_over(one, view.now, view.rules), view.now)
        and not (ask.role.is_room and one.leases)
    ]
    taken = fit(need, candidates, ledger.tenants, lambda one: fit_key(one, view.now))
    if taken.short_bytes:
        return _short(ask, view)
    victims = (*swap, *taken.victims)
    if any(victim.leases for victim in victims):
        # They give no new leases from here on, and the load waits until their leases have ended.
        given = sum(victim.bytes for victim in victims)
        claims = tuple(victim.key for victim in victims)
        held = max(0, ask.estimate_bytes - given)
        return NotYet(claims=claims, held_bytes=held, is_stuck=True)
    evict = [_eviction(one, Reason.SWAP) for one in swap]
    evict += [
        _eviction(one, Reason.FIT if one.role.yields else Reason.SWAP) for one in taken.victims
    ]
    return LoadNow(evict=tuple(evict), shrink=taken.shrinks, asked_bytes=max(0, need))


def _swapped(
    ask: Ask, ahead: EarlierClaims, view: QueueView
) -> tuple[Resident, ...] | NotYet | Refuse:
    """The residents to evict because the role has no place left."""
    if ask.role.places is None:
        return ()
    there = _of_role(ask, view)
    over = len(there) + 1 - ask.role.places
    pinned = [one for one in there if one.warmth.is_pinned]
    if len(pinned) >= ask.role.places:
        return Refuse(
            errors.MemoryRefused(
                f"role {ask.role.name!r} is taken by {', '.join(str(one.key) for one in pinned)}, "
                f"which is pinned; unpin it to load {ask.key}"
            )
        )
    movable = [one for one in there if ahead.may_go(one) and not one.warmth.is_pinned]
    if len(movable) < over:
        return NotYet(held_bytes=_more_than(there, ask))
    movable.sort(key=lambda one: (bool(one.leases), fit_key(one, view.now)))
    return tuple(movable[: max(0, over)])


def _of_role(ask: Ask, view: QueueView) -> list[Resident]:
    name = ask.role.name
    return [one for one in view.ledger.residents if one.role.name == name and not one.is_leaving]


def _more_than(there: list[Resident], ask: Ask) -> int:
    """The bytes that a load needs beyond those of the smallest resident that may make place for
    it."""
    return max(0, ask.estimate_bytes - min((one.bytes for one in there), default=0))


def _short(ask: Ask, view: QueueView) -> NotYet | Refuse:
    """Too little can be freed now: wait, or refuse where it can never be enough."""
    ledger = view.ledger
    movable, fixed, lent = 0, 0, 0
    for one in ledger.residents:
        if one.is_leaving:
            continue
        if may_displace(ask.role, one, may_displace_text=ask.may_displace_text):
            movable += one.bytes
        elif one.role.is_lent:
            lent += one.bytes
        else:
            fixed += one.bytes
    if ask.estimate_bytes + fixed > ledger.budget_bytes:
        kept = f", of which {format_bytes(fixed)} cannot be evicted for it" if fixed else ""
        way_out = (
            "lease less, or give the node a larger budget"
            if ask.role.is_lent
            else "choose a smaller model or unload one"
        )
        return Refuse(
            errors.MemoryRefused(
                f"{ask.key} needs {format_bytes(ask.estimate_bytes)}; the budget is "
                f"{format_bytes(ledger.budget_bytes)}{kept}; {way_out}"
            )
        )
    if ask.estimate_bytes + fixed + lent > ledger.budget_bytes:
        return Refuse(_lent(ask, lent, view))
    # Where enough can be freed, only not for this request yet, it waits for its turn: no limit.
    spare = shrinkable_bytes(ledger.tenants)
    is_turn = ask.estimate_bytes <= ledger.free_bytes + movable + spare
    return NotYet(held_bytes=ask.estimate_bytes, is_stuck=not is_turn)


def _lent(ask: Ask, size: int, view: QueueView) -> errors.MemoryRefused:
    """The refusal of a load that has to wait, however long, for lent memory to be returned."""
    held = ", ".join(str(one.key) for one in view.ledger.residents if one.role.is_lent)
    return errors.MemoryRefused(
        f"{ask.key} needs {format_bytes(ask.estimate_bytes)}; of the budget of "
        f"{format_bytes(view.ledger.budget_bytes)}, {format_bytes(size)} are lent to {held}; "
        "ask again when that has ended",
        retry_after_s=view.rules.drain_limit_s,
    )


def _eviction(resident: Resident, reason: Reason) -> ResidentEviction:
    return ResidentEviction(key=resident.key, reason=reason, bytes=resident.bytes)
