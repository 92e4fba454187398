"""The line in front of an engine by its definition: everything is looked through at each question.

What `kakeya.engine.queue.queue` decides with heaps and sums is what this decides without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kakeya.core.errors import DeadlineExceeded, KakeyaError, MemoryRefused
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import (
    AGED_S,
    CLASSES,
    FLOOR_TURNS,
    INPUT_WEIGHT,
    PATIENCE_S,
    SPECULATIVE,
    Account,
    GenerationClaim,
    first,
    may_hold,
    may_pass,
)
from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import Admitted, QueueRow, QueueTicket


class LinearShares:
    """What clients used, by looking at all of them."""

    def __init__(self) -> None:
        self._classes = [LinearPeers() for _ in range(CLASSES)]
        self._users: dict[Account, LinearPeers] = {}

    def arrive(self, client: str, priority: int, user: str = "") -> Account:
        """A generation of this client's user waits from now on."""
        priority = min(max(priority, 0), CLASSES - 1)
        owner = self._classes[priority].arrive(client, lambda: Account(client, priority))
        if not user:
            return owner
        users = self._users.setdefault(owner, LinearPeers())
        return users.arrive(user, lambda: Account(client, priority, owner=owner))

    def begin(self, account: Account) -> None:
        """A waiting generation runs from now on, chosen by the shares."""
        for peers, one in self._both(account):
            peers.begin(one)

    def set_aside(self, account: Account) -> None:
        """A running generation waits from now on."""
        for _, one in self._both(account):
            one.running -= 1
            one.waiting += 1

    def leave(self, account: Account, *, was_running: bool) -> None:
        """A generation is over."""
        for peers, one in self._both(account):
            peers.leave(one, was_running=was_running)

    def _both(self, account: Account) -> Iterable[tuple[LinearPeers, Account]]:
        if account.owner is not None:
            yield self._users[account.owner], account
        yield self._classes[account.priority], account.owner or account


class LinearPeers:
    """Accounts that are fair to each other."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._level = 0

    def arrive(self, name: str, opened: Callable[[], Account]) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = opened()
        if not account.waiting:
            others = [one.used for one in self._present() if one is not account]
            account.used = max(account.used, self._level, min(others, default=0))
        account.waiting += 1
        return account

    def begin(self, account: Account) -> None:
        self._level = max(self._level, self._least(account))
        account.waiting -= 1
        account.running += 1

    def leave(self, account: Account, *, was_running: bool) -> None:
        if was_running:
            account.running -= 1
        else:
            account.waiting -= 1
        if not self._present():
            # Nobody is there to be fair to: the next ones begin anew.
            self._accounts, self._level = {}, 0

    def _present(self) -> list[Account]:
        return [one for one in self._accounts.values() if one.waiting or one.running]

    def _least(self, chosen: Account) -> int:
        """What the waiting one used that used least: the chosen one's at most."""
        waiting = (one.used for one in self._present() if one.waiting)
        return min(waiting, default=chosen.used)


def next_place(
    claims: Sequence[QueueRow], turn: int, now_s: float, fits: Callable[[QueueRow], bool]
) -> QueueRow:
    """Who runs next; where there is no room for it yet, nobody goes before it but who may pass.

    `turn` counts the places given so far.
    """
    if turn % FLOOR_TURNS == FLOOR_TURNS - 1:
        by_age = sorted(claims, key=lambda claim: claim.number)
        for claim in by_age:
            if may_hold(claim, now_s):
                return claim
        for claim in by_age:
            if now_s - claim.arrived_s >= AGED_S and fits(claim):
                return claim
    return first(claims)


def makes_place(
    claim: GenerationClaim,
    running: Sequence[QueueRow],
    now_s: float,
    kept: GenerationClaim | None = None,
) -> list[QueueRow]:
    """Who of those that run may be set aside for a claim, in this order; never `kept`.

    All that are less urgent, the youngest of the least urgent class first. Where there is none:
    the youngest of the client that runs most, when it runs several in the claim's class or a less
    urgent one and the claim's client, which waited long enough, runs none.
    """
    below = [one for one in running if one.priority > claim.priority and one is not kept]
    if below:
        return sorted(below, key=lambda one: (-one.priority, -one.number))
    client = claim.account.client
    by_client: dict[str, list[QueueRow]] = {}
    for one in running:
        by_client.setdefault(one.account.client, []).append(one)
    if client in by_client or now_s - claim.arrived_s < PATIENCE_S:
        return []
    most = max(by_client.values(), key=len, default=[])
    peers = [one for one in most if one.priority == claim.priority and one is not kept]
    return [max(peers, key=lambda one: one.number)] if len(peers) > 1 else []


class LinearLine:
    """As `Line`, of jobs that begin from nothing."""

    def __init__(self, room: KvRoom, pace: Pace, *, places: int) -> None:
        self._room = room
        self._pace = pace
        self._places = places
        self._shares = LinearShares()
        self.waiting: list[QueueRow] = []
        self.parked: list[QueueRow] = []
        self._arrivals = self._entries = 0
        self._held: QueueRow | None = None
        self._aged: QueueRow | None = None
        self._aged_until_s = 0.0

    def arrive(self, ticket: QueueTicket, running: Sequence[QueueRow], now_s: float) -> None:
        job = ticket.job
        self._room.check_fits(job)
        self._arrivals += 1
        row = QueueRow(
            ticket=ticket,
            account=self._shares.arrive(job.client, job.priority, job.user),
            number=self._arrivals,
            arrived_s=now_s,
            work_s=self._pace.prefill_s(0, len(job.token_ids) - 1),
            expires_s=math.inf if job.deadline_s is None else now_s + job.deadline_s,
        )
        try:
            self._check_deadline(row, running, now_s)
        except DeadlineExceeded:
            self._shares.leave(row.account, was_running=False)
            raise
        self.waiting.append(row)

    def gone(
        self, running: Sequence[QueueRow], now_s: float
    ) -> list[tuple[QueueRow, KakeyaError | None]]:
        left: list[tuple[QueueRow, KakeyaError | None]] = []
        for row in self.waiting:
            if row.ticket.cancelled:
                left.append((row, None))
            elif now_s >= row.expires_s and row.run is None:
                left.append((row, DeadlineExceeded(f"after {now_s - row.arrived_s:.1f} s")))
            else:
                try:
                    if row.run is not None:
                        self._check_deadline(row, running, now_s)
                    self._room.check_fits(row.ticket.job)
                except (DeadlineExceeded, MemoryRefused) as refusal:
                    left.append((row, refusal))
        return left

    def next_entry(self, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        if not self.waiting:
            return None

        def fits(row: QueueRow) -> bool:
            return self._plan(row, running, now_s) is not None

        if self._held not in self.waiting:
            self._held = None
        chosen = self._held or next_place(self.waiting, self._entries, now_s, fits)
        if self._entries % FLOOR_TURNS == FLOOR_TURNS - 1 and may_hold(chosen, now_s):
            self._held = chosen
        entry = self._plan(chosen, running, now_s)
        urgent = first(self.waiting)
        if entry is None and chosen is self._held and may_pass(urgent, chosen, running):
            return self._plan(urgent, running, now_s)
        if (
            entry is not None
            and chosen.priority != SPECULATIVE
            and chosen is not first(self.waiting)
        ):
            self._aged, self._aged_until_s = chosen, now_s + AGED_S
        return entry

    def enter(self, row: QueueRow) -> None:
        self._entries += 1
        self.waiting.remove(row)
        if row in self.parked:
            self.parked.remove(row)
        self._shares.begin(row.account)

    def charge(self, row: QueueRow) -> None:
        row.charged = row.prompt_left
        row.account.pay(INPUT_WEIGHT * row.charged)

    def refund(self, row: QueueRow) -> None:
        row.account.pay(-INPUT_WEIGHT * min(row.charged, row.prompt_left))
        row.charged = 0

    def park(self, row: QueueRow) -> None:
        self.waiting.append(row)
        self.parked.append(row)
        self._shares.set_aside(row.account)

    def leave(self, row: QueueRow) -> None:
        self.waiting.remove(row)
        if row in self.parked:
            self.parked.remove(row)
        self._shares.leave(row.account, was_running=False)

    def ended(self, row: QueueRow) -> None:
        if row is self._aged:
            self._aged = None
        self._shares.leave(row.account, was_running=True)

    def _plan(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        lacks_bytes = self._room.lacks(row, row.ticket.job, row.length)
        lacks_place = len(running) >= self._places
        if lacks_bytes <= 0 and not lacks_place:
            return Admitted(row=row)
        held = self._room.held_bytes
        droppable = [
            one
            for one in reversed(self.parked)
            if one is not row and one.length and (one.priority >= row.priority or not running)
        ]
        parks: list[QueueRow] = []
        gain = sum(map(held, droppable))
        kept = self._aged if now_s < self._aged_until_s else None
        for victim in makes_place(row, running, now_s, kept):
            if lacks_bytes <= gain and (parks or not lacks_place):
                break
            parks.append(victim)
            gain += held(victim)
        if lacks_bytes > gain or (lacks_place and not parks):
            return None
        drops: list[QueueRow] = []
        lacks_bytes -= sum(held(one) - self._room.kv_bytes(one.length) for one in parks)
        for one in (*reversed(parks), *droppable):
            if lacks_bytes <= 0:
                break
            drops.append(one)
            lacks_bytes -= self._room.kv_bytes(one.length)
        return Admitted(row=row, parks=tuple(parks), drops=tuple(drops))

    def _check_deadline(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> None:
        if row.expires_s == math.inf:
            return
        order = _order(row)
        ahead = [one for one in self.waiting if _order(one) < order]
        stretch = self._pace.stretch if any(not one.is_prefilling for one in running) else 1.0
        before_s = sum(one.work_s for one in ahead)
        before_s += sum(one.work_s for one in running if _order(one) < order)
        free = self._places - sum(one.priority <= row.priority for one in running)
        place_s = max(0, len(ahead) + 1 - free) * self._pace.place_every_s(self._places)
        expected_s = max(before_s * stretch, place_s) + row.work_s * stretch
        expected_s += self._pace.step_s
        if now_s + expected_s > row.expires_s:
            raise DeadlineExceeded(f"the first token is expected in {expected_s:.3g} s")


def _order(row: QueueRow) -> tuple[int, float, int]:
    return row.priority, row.arrived_s + row.work_s, row.number
