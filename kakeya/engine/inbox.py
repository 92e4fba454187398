"""The inbox of the model thread: generations, work to do between two steps, and the end.

First come, first served. The inbox also knows since when the thread has been at one piece of work,
so that another thread can tell whether it still moves.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

from kakeya.engine.queue.rows import QueueTicket

_Answer = TypeVar("_Answer")
Item: TypeAlias = "QueueTicket | Callable[[], None] | None"
"""A generation; work, with a failure that is its caller's; or None to stop the thread."""


class Inbox:
    """Filled by any thread, read by the model thread alone; `timer` counts seconds.

    `read_s` is when it was last looked into, or an item last taken.
    """

    __slots__ = ("_began_s", "_items", "_timer", "read_s")

    def __init__(self, timer: Callable[[], float]) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._timer = timer
        self._began_s: float | None = None
        self.read_s = 0.0

    def submit(self, ticket: QueueTicket) -> None:
        """Queue a generation; thread-safe."""
        self._items.put(ticket)

    def call(self, work: Callable[[], _Answer]) -> Future[_Answer]:
        """Queue work; its answer or failure goes to the future. Thread-safe."""
        answer: Future[_Answer] = Future()

        def perform() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except Exception as failure:  # noqa: BLE001 - handed to the caller
                answer.set_exception(failure)

        self._items.put(perform)
        return answer

    def stop(self) -> None:
        """Queue the end; thread-safe."""
        self._items.put(None)

    def items(self, *, is_idle: bool, most_s: float | None = None) -> Iterator[Item]:
        """Everything that is there; the thread that has nothing else to do waits for the first.

        It waits at most `most_s`, and then has other work; None = however long.
        """
        self.read_s = self._timer()
        self._began_s = None if is_idle else self.read_s
        is_waited_for = is_idle
        while is_waited_for or not self._items.empty():
            try:
                item = self._items.get(timeout=most_s if is_waited_for else None)
            except queue.Empty:
                self._began_s = self.read_s = self._timer()
                return
            is_waited_for = False
            self._began_s = self.read_s = self._timer()
            yield item

    def silent_s(self) -> float:
        """How long the thread has been at one piece of work; 0 while it waits. Thread-safe."""
        began_s = self._began_s
        return 0.0 if began_s is None else max(0.0, self._timer() - began_s)
