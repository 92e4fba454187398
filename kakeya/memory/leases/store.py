"""Stores of the book of leases: one contract for all, and one suite of tests.

    async with store:
        lease = await store.change(lambda book: rules.ask(book, wish, ...))

A change is atomic among all processes: it is decided on the very book that it replaces. So
decisions are pure functions; they run again on the newer book where another process wrote first.
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
        """The place of the book, for people, without passwords."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def read(self) -> Book:
        """Read the book."""
        ...

    async def change(self, decide: Callable[[Book], tuple[Book, Result]]) -> Result:
        """Replace the book by the result of `decide`, and return its second value.

        `decide` may run several times, in another thread, and must be pure. An error that it raises
        leaves the book as it was, and is raised here.
        """
        ...


def changes(before: Book, after: Book) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ids of the lines to be written, and of those to be removed."""
    written = tuple(
        key for key, lease in after.leases.items() if before.leases.get(key) is not lease
    )
    removed = tuple(key for key in before.leases if key not in after.leases)
    return written, removed
