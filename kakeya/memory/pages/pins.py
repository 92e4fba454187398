"""Blocks, and the pins that keep them: each pin has an owner and ends with it.

    FREE --allocate--> UNPINNED --pin--> PINNED --last unpin--> UNPINNED --evict, free--> FREE

A `Block` is one allocation: pages in a row that come and go together. Each allocation has an object
of its own, so a handle of freed pages can never mean the block that lies there next. A user of a
block opens a `Hold` on it once and counts its pins there, as a file is opened once and read often.
A `PinHolder` may die: an engine, a session, a request. Its end takes back exactly its own pins. A
block is pinned if a hold has pins, so no second count can disagree.

One thread owns all of this; there is no lock, and `pin` and `unpin` are two stores.
"""

from __future__ import annotations

from typing import Protocol

from kakeya.core.errors import InvariantBroken, PageFreed
from kakeya.memory.pages.content import PIN_RULES, ContentPriority, ContentType, Unpinning


class Allocator(Protocol):
    """The user of the pool that allocated a block: `pool.PageOwner`."""

    content: ContentType
    owner: str
    priority: ContentPriority


class Now:
    """The time that all parts of one pool share, in monotonic seconds; the pool moves it."""

    __slots__ = ("s",)

    def __init__(self) -> None:
        self.s = 0.0


class Block:
    """Pages in a row that are allocated and freed together. The pool alone changes it."""

    __slots__ = ("dirty", "first", "holds", "pages", "preparing", "stamp", "tenant", "used_s")

    def __init__(self, first: int, pages: int, stamp: int) -> None:
        self.first = first
        self.pages = pages
        self.stamp = stamp  # never used again, by no block of this pool
        self.tenant: Allocator | None = None  # None: free
        self.preparing: PinHolder | None = None  # fills it; no other holder sees it yet
        self.dirty = False  # waits to be stored elsewhere, and goes last until it is
        self.used_s = 0.0  # when it was allocated, or its last hold ended
        self.holds: tuple[Hold, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether its pages are still its own."""
        return self.tenant is not None

    @property
    def is_pinned(self) -> bool:
        """Whether a pin keeps it; a block that is being prepared counts."""
        if self.preparing is not None:
            return True
        return bool(self.holds) and any(hold.pins > 0 for hold in self.holds)

    @property
    def is_evictable(self) -> bool:
        """Whether its pages may be taken now."""
        return self.tenant is not None and not self.is_pinned

    @property
    def pins(self) -> int:
        """The number of pins of all holders."""
        return sum(hold.pins for hold in self.holds)

    def last_used_s(self) -> float:
        """The time of its last allocation, pin or unpin."""
        if not self.holds:
            return self.used_s
        return max(self.used_s, max(hold.used_s for hold in self.holds))

    def __repr__(self) -> str:
        return f"Block({self.first}+{self.pages}, stamp {self.stamp})"


class Hold:
    """One holder's opened block. As a context manager it pins for as long as the body runs."""

    __slots__ = ("_now", "block", "holder", "pins", "used_s")

    def __init__(self, block: Block, holder: PinHolder, now: Now) -> None:
        self.block = block
        self.holder = holder
        self.pins = 0
        self.used_s = now.s
        self._now = now

    def pin(self) -> None:
        """Keep the block until as many `unpin`. Raises PageFreed."""
        self.pins += 1
        self.used_s = self._now.s

    def unpin(self) -> None:
        """Take one pin back. Raises InvariantBroken when there is none, PageFreed."""
        pins = self.pins
        if pins:
            self.pins = pins - 1
            self.used_s = self._now.s
            return
        raise self._no_pin()

    def renew(self) -> None:
        """Note that the pinned work still goes on."""
        self.used_s = self._now.s

    def close(self) -> None:
        """End the hold with all its pins; harmless when it has ended."""
        self.holder.drop(self.block)

    def __enter__(self) -> Block:
        self.pin()
        return self.block

    def __exit__(self, *_: object) -> None:
        if self.pins > 0:  # 0 when the holder died meanwhile
            self.unpin()

    def _no_pin(self) -> PageFreed | InvariantBroken:
        return InvariantBroken("unpin", f"{self.holder.name} has no pin on {self.block}")


class _EndedHold(Hold):
    """The class of ended holds, so that living ones need not ask each time."""

    __slots__ = ()

    def pin(self) -> None:
        raise self._no_pin()

    def _no_pin(self) -> PageFreed:
        return PageFreed(
            f"{self.holder.name} holds {self.block} no longer: it was freed, or the holder ended"
        )


class PinHolder:
    """An owner of pins that may die. The pool makes and closes it; see `PagePool.holder`."""

    __slots__ = ("_holds", "_now", "is_open", "name", "preparing")

    def __init__(self, name: str, now: Now) -> None:
        self.name = name
        self.is_open = True
        self.preparing: set[Block] = set()
        self._holds: dict[Block, Hold] = {}
        self._now = now

    def hold(self, block: Block) -> Hold:
        """Open a block, or find it open. Raises PageFreed when it was freed, or this holder has
        ended."""
        found = self._holds.get(block)
        if found is not None:
            return found
        if not self.is_open:
            raise PageFreed(f"{self.name} has ended and can hold nothing")
        if block.tenant is None or block.preparing not in (None, self):
            raise PageFreed(f"{block} is not there to be held: it was freed, or is not committed")
        hold = Hold(block, self, self._now)
        self._holds[block] = hold
        block.holds += (hold,)
        return hold

    def drop(self, block: Block) -> None:
        """End the hold on a block, if there is one."""
        hold = self._holds.pop(block, None)
        if hold is not None:
            last_s = self._now.s if hold.pins > 0 else hold.used_s
            block.used_s = max(block.used_s, last_s)  # the time of its last use is kept
            hold.pins = 0
            hold.__class__ = _EndedHold
            block.holds = tuple(other for other in block.holds if other is not hold)

    def holds(self) -> tuple[Hold, ...]:
        """All open holds."""
        return tuple(self._holds.values())

    def drop_all(self) -> int:
        """End every hold; returns the number of pins that ended."""
        pins = sum(hold.pins for hold in self._holds.values())
        for block in tuple(self._holds):
            self.drop(block)
        return pins


def is_scoped(content: ContentType) -> bool:
    """Whether a pin on this content ends with a `with` block, so that a long one is a leak."""
    return PIN_RULES[content].unpinning is Unpinning.SCOPED
