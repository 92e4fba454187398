"""A thread that puts proposal requests on the wire, so that the thread that decodes need not.

Packing a prefix and starting a call cost some hundred microseconds, a good part of a step of a
small model. While the model computes, this thread has the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument
from kakeya.v1 import distributed_pb2 as pb

Call: TypeAlias = "grpc.Future[pb.ProposeBlockResponse]"


class PendingDraft:
    """One request on its way; made by `Sender.send`."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self.block_size = block_size
        self.began_mono = clock.mono()
        self.arrived_mono: float | None = None
        self._clock = clock
        self._ended = threading.Event()
        self._call: Call | None = None
        self._refused: InvalidArgument | ValueError | None = None
        self._abandoned = False

    def wait(self, seconds: float) -> bool:
        """Block until the call has ended, at most so long; whether it has."""
        return self._ended.wait(seconds)

    def result(self) -> pb.ProposeBlockResponse:
        """The answer of a call that has ended. Raises the error that it ended with."""
        if self._refused is not None:
            raise self._refused
        if self._call is None or self.arrived_mono is None:
            raise grpc.FutureTimeoutError
        return self._call.result(timeout=0)

    def abandon(self) -> None:
        """Give the call up; the server drops it if it has not begun."""
        self._abandoned = True
        if self._call is not None:
            self._call.cancel()

    def begin(self, start: Callable[[], Call]) -> None:
        """Start the call, unless it was given up meanwhile; on the sender's thread."""
        if self._abandoned:
            return
        try:
            call = start()
        except (InvalidArgument, ValueError) as refusal:  # ValueError: the channel is closed
            self._refused = refusal
            self._end(None)
            return
        self._call = call
        if self._abandoned:
            call.cancel()
        call.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self.arrived_mono = self._clock.mono()
        self._ended.set()


class Sender:
    """Starts calls on a thread of its own, which begins with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, pending: PendingDraft, start: Callable[[], Call]) -> None:
        """Have `start` called soon; `pending` gets the call that it returns."""
        self.run(partial(pending.begin, start))

    def run(self, job: Callable[[], None]) -> None:
        """Have `job` done soon; it raises nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread; requests that were handed in before are still started."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(1.0)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
