"""Where the book of leases lies: one contract for every store, and one suite of tests.

    async with store:
        lease = await store.change(lambda book: rules.ask(book, wish, ...))

A change is atomic among all processes: it is decided on the book as it is when it is written. So
decisions are pure functions; where somebody else was first, they run again on the newer book.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

from kakeya.memory.leases.lease import Book

Result = TypeVar("Result")


class LeaseStore(Protocol):
    """One machine's book, between `async with`. Nothing blocks the event loop.

    Every method raises StoreFailed (or PeerUnavailable) while the store cannot be used, and works
    again when it can.
    """

    @property
    def place(self) -> str:
        """Where the book lies, for people: no password in it."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def read(self) -> Book:
        """The book now."""
        ...

    async def change(self, decide: Callable[[Book], tuple[Book, Result]]) -> Result:
        """Replace the book by what `decide` makes of it, and return its result.

        `decide` may run several times, in another thread, and must be pure. What it raises leaves
        the book as it was, and is raised here.
        """
        ...


def changes(before: Book, after: Book) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ids of the lines to be written, and of those to be removed."""
    written = tuple(
        key for key, lease in after.leases.items() if before.leases.get(key) is not lease
    )
    removed = tuple(key for key in before.leases if key not in after.leases)
    return written, removed
