r"""Changes of the book of leases: pure functions from one book to the next.

    ask -> WAITING -> take each named resource in order -> memory, granted last -> GRANTED
                 \-> REFUSED, all taken resources are given back
    release, withdrawal, death -> removed from the book

All leases take resources in one order, and memory last, so no circle of waits can form. While a
node lives it grants memory (`grant`), as its arbiter finds room. Without a node, each waiting
process settles the queue for all (`settle_alone`): the first lease is not overtaken, so none
starves.

Each function may run again on a book that changed meanwhile; it then finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kakeya.core import errors
from kakeya.core.units import MIB, format_bytes
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import ResidentKey, Role, RolePriority
from kakeya.memory.leases.lease import (
    Book,
    Drain,
    Granter,
    LeaseDenial,
    LeaseState,
    Process,
    ProcessLease,
    Wish,
)

CAPABILITY = "job"
JOB = Role(
    name=CAPABILITY,
    priority=RolePriority(90),
    eviction="not evicted: it ends by itself, or with its holder",
    places=None,
    stay_warm_s=0.0,
    is_lent=True,
)
"""The role of a lease for a node's arbiter. It yields, so that critical pressure refuses new
leases; a granted one is pinned, so that it is never evicted."""
BEAT_S = 5.0
EXPIRE_S = 30.0
"""Six missed beats of a holder that cannot be seen from here."""
OUT_OF_ORDER = (errors.StoreFailed, errors.PeerUnavailable)
"""The store, or the table of processes, does not answer; at the next beat it may."""
_COARSE_BYTES = 16 * MIB
_RULES = Rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSight:
    """The machine as one process sees it at one moment.

    `living` says by lease whether a process of its holder lives; leases that cannot be seen from
    here, or were not looked at, are missing.
    """

    boot: str
    now_mono: float
    living: Mapping[str, bool] = field(default_factory=dict)
    granter_lives: bool | None = None


def waits_on(key: ResidentKey, error: errors.KakeyaError) -> bool:
    """Whether a lease stays in the queue after a refusal by the arbiter: there is no room yet,
    and its node asks again by itself."""
    return key.capability == CAPABILITY and error.retry_after_s is not None


# Holders.


def ask(
    book: Book, wish: Wish, lease_id: str, process: Process, sight: MachineSight
) -> tuple[Book, ProcessLease]:
    """Put a wish at the end of the queue. Raises LeaseRefused while leases are drained."""
    if book.drain is not None and book.drain.boot == sight.boot:
        raise errors.LeaseRefused(
            f"no leases are given: they were drained by `kakeya lease drain` (pid "
            f"{book.drain.pid}); `kakeya lease drain --off` opens them again"
        )
    lease = ProcessLease(
        lease_id=lease_id,
        number=book.next_number,
        wish=wish,
        boot=sight.boot,
        processes=(process,),
        asked_mono=sight.now_mono,
        beat_mono=sight.now_mono,
    )
    granter = book.granter
    if granter is not None and not book.leases:  # from here on its beats count
        granter = replace(granter, beat_mono=sight.now_mono)
    number = book.next_number + 1
    return replace(book.put(lease), next_number=number, granter=granter), lease


def beat(
    book: Book,
    lease: ProcessLease,
    now_mono: float,
    *,
    processes: tuple[Process, ...],
    used_bytes: int,
) -> tuple[Book, ProcessLease]:
    """Note that a holder lives, with its processes and the bytes that they use.

    A lease that the book has lost (a damaged file, an emptied Redis) is written down again: its
    memory is in use in any case.
    """
    known = book.leases.get(lease.lease_id, lease)
    told = replace(known, beat_mono=now_mono, processes=processes, used_bytes=used_bytes)
    restored = replace(book, next_number=max(book.next_number, told.number + 1))
    return restored.put(told), told


# Grants, refusals and ends.


def grant(book: Book, lease_id: str, now_mono: float) -> Book:
    """Grant the memory of a lease, last of all. A lease that has ended meanwhile stays ended."""
    lease = book.leases.get(lease_id)
    if lease is None or lease.state is not LeaseState.WAITING:
        return book
    if lease.missing:
        raise errors.InvariantBroken("memory is granted last", f"{lease_id} lacks {lease.missing}")
    granted = replace(lease, state=LeaseState.GRANTED, granted_mono=now_mono, note="")
    return book.put(granted)


def refuse(book: Book, lease_id: str, no: LeaseDenial) -> Book:
    """Refuse a waiting lease, and give back its resources."""
    lease = book.leases.get(lease_id)
    if lease is None or lease.state is not LeaseState.WAITING:
        return book
    return book.put(replace(lease, state=LeaseState.REFUSED, taken=(), note="", no=no))


def note(book: Book, lease_id: str, text: str) -> Book:
    """Note the reason for which a lease waits."""
    lease = book.leases.get(lease_id)
    if lease is None or lease.state is not LeaseState.WAITING or lease.note == text:
        return book
    return book.put(replace(lease, note=text))


def is_dead(lease: ProcessLease, sight: MachineSight) -> bool:
    """Whether no process of a holder lives."""
    if lease.boot != sight.boot:
        return True
    lives = sight.living.get(lease.lease_id)
    if lives is None:
        return sight.now_mono - lease.beat_mono > EXPIRE_S
    return not lives


def expire(book: Book, sight: MachineSight) -> tuple[Book, tuple[ProcessLease, ...]]:
    """Remove the leases of dead holders and of earlier boots. Returns them beside the book."""
    dead = tuple(one for one in book.leases.values() if is_dead(one, sight))
    book = book.without(*(one.lease_id for one in dead))
    if book.granter is not None and not has_granter(book, sight):
        book = replace(book, granter=None)
    if book.drain is not None and book.drain.boot != sight.boot:
        book = replace(book, drain=None)
    return book, dead


def begin_drain(book: Book, sight: MachineSight, pid: int, now_at: float) -> Book:
    """Give no more leases; waiting ones are refused."""
    for lease in book.of(LeaseState.WAITING):
        no = LeaseDenial(code="lease_refused", message="leases were drained while this one waited")
        book = refuse(book, lease.lease_id, no)
    if book.drain is not None and book.drain.boot == sight.boot:
        return book
    return replace(book, drain=Drain(boot=sight.boot, pid=pid, began_at=now_at))


def end_drain(book: Book) -> Book:
    """Give leases again."""
    return book if book.drain is None else replace(book, drain=None)


# The granter.


def has_granter(book: Book, sight: MachineSight) -> bool:
    """Whether a node grants. A node that hangs still does: its models are in memory."""
    granter = book.granter
    if granter is None or granter.boot != sight.boot:
        return False
    if sight.granter_lives is None:  # it writes no beat while there is no lease
        return not book.leases or sight.now_mono - granter.beat_mono <= EXPIRE_S
    return sight.granter_lives


def become_granter(
    book: Book, node_id: str, process: Process, budget_bytes: int, sight: MachineSight
) -> Book:
    """Enter a node as the granter, unless another one grants."""
    granter = book.granter
    if granter is not None and granter.process != process and has_granter(book, sight):
        return book
    mine = Granter(node_id=node_id, process=process, boot=sight.boot, beat_mono=sight.now_mono)
    return replace(book, granter=mine, budget_bytes=budget_bytes)


def leave_granter(book: Book, process: Process) -> Book:
    """Remove a node that stops. Its budget stays for leases that are settled without it."""
    is_mine = book.granter is not None and book.granter.process == process
    return replace(book, granter=None) if is_mine else book


# The queue.


def queue(book: Book) -> tuple[ProcessLease, ...]:
    """The waiting leases, the first to be served first.

    A class of urgency is worth `Rules.age_s` of waiting. So none waits for ever, and two never
    change places.
    """

    def place(lease: ProcessLease) -> tuple[float, int]:
        return lease.asked_mono + lease.wish.priority.rank * _RULES.age_s, lease.number

    return tuple(sorted(book.of(LeaseState.WAITING), key=place))


def take_resources(book: Book) -> Book:
    """Give free named resources to the waiting leases, in order, and note the other waits."""
    for lease in queue(book):
        while lease.missing:
            wanted = lease.missing[0]
            holder = book.holder_of(wanted)
            if holder is not None:
                book = note(book, lease.lease_id, f"{wanted}, which {named(holder)} has")
                break
            lease = lease.taking(wanted)
            book = book.put(lease)
    return book


def settle_alone(
    book: Book, sight: MachineSight, *, budget_bytes: int, available_bytes: int | None
) -> Book:
    """Serve the queue where no node grants; where one does, only remove dead leases.

    `budget_bytes` is the most that all leases may hold, `available_bytes` the free memory of the
    machine, None = unknown. Both must allow a grant.
    """
    book, _ = expire(book, sight)
    if has_granter(book, sight):
        return book
    book = take_resources(book)
    room = room_bytes(book, budget_bytes, available_bytes)
    for lease in queue(book):
        size = lease.wish.size_bytes
        if size > budget_bytes:
            book = refuse(book, lease.lease_id, too_big(lease, budget_bytes))
        elif lease.missing:
            continue
        elif size <= room:
            book = grant(book, lease.lease_id, sight.now_mono)
            room -= size
        else:
            book = note(book, lease.lease_id, _wants(lease, book, budget_bytes, room))
            room = 0  # later leases do not overtake
    return book


def room_bytes(book: Book, budget_bytes: int, available_bytes: int | None) -> int:
    """The bytes that may be granted: the budget less the held bytes, and at most the machine's
    available bytes less the growth that holders are still entitled to."""
    granted = book.of(LeaseState.GRANTED)
    room = budget_bytes - sum(one.held_bytes for one in granted)
    if available_bytes is not None:
        room = min(room, available_bytes - sum(one.unfilled_bytes for one in granted))
    return room


def too_big(lease: ProcessLease, budget_bytes: int) -> LeaseDenial:
    """The refusal of a lease that is larger than the budget."""
    return LeaseDenial(
        code=errors.MemoryRefused.code,
        message=f"{lease.wish.name} asks for {format_bytes(lease.wish.size_bytes)}; the budget is "
        f"{format_bytes(budget_bytes)}; ask for less, or give the node a larger budget",
    )


def named(lease: ProcessLease) -> str:
    """The name of a lease in sentences."""
    return f"{lease.wish.name} (pid {lease.pid})"


def holders(book: Book) -> str:
    """The holders of memory in words; "" = none."""
    granted = book.of(LeaseState.GRANTED)
    told = (f"{named(one)} holds {format_bytes(one.held_bytes)}" for one in granted)
    return ", ".join(told)


def _wants(lease: ProcessLease, book: Book, budget_bytes: int, room: int) -> str:
    # Coarse, so that the book is not written anew for each page that another program takes.
    free = max(0, room) // _COARSE_BYTES * _COARSE_BYTES
    held = holders(book) or "other programs hold the rest"
    return (
        f"{format_bytes(lease.wish.size_bytes)} of memory: about {format_bytes(free)} of "
        f"{format_bytes(budget_bytes)} are free, {held}"
    )
