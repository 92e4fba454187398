"""The model thread of an encoder: one batch after the other, and questions between two of them.

A failed forward ends the jobs that had texts in it, never the thread; a lost device ends the
process. A cancelled job leaves before the next batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kakeya.core.errors import InvariantBroken, KakeyaError
from kakeya.core.log import event
from kakeya.engine.embedding.batches import EmbedJob, EmbedQueue, Waiting
from kakeya.engine.inbox import Inbox
from kakeya.engine.model import MemoryUse
from kakeya.generation.facts import ModelFacts

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class TextEncoder(Protocol):
    """A loaded encoder; every method runs on the model thread, and may raise DeviceLost."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch beyond which a forward takes longer for each of them."""
        ...

    def encode(self, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[bytes]:
        """The vectors of texts, which are not empty, in one forward, of these sizes (0 = whole).

        A vector is little-endian float32.
        """
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now."""
        ...

    def tidy(self) -> None:
        """Give buffers that no array uses back to the system."""
        ...

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        """Bound the memory of the framework, and its unused buffers; None = unchanged."""
        ...


class EncoderWorker:
    """Construct anywhere; `run` is the thread's body."""

    def __init__(self, model: TextEncoder, timer: Callable[[], float] = time.perf_counter) -> None:
        self._model = model
        self._inbox = Inbox(timer)
        self._queue = EmbedQueue(model.batch_tokens)

    @property
    def waiting(self) -> int:
        """Jobs that are not done; read on the model thread."""
        return self._queue.jobs

    def submit(self, texts: Sequence[Sequence[int]], size: int) -> Future[list[bytes]]:
        """Queue texts; their vectors go to the future. Its cancellation drops them. Thread-safe."""
        job = EmbedJob(texts, size)
        self._inbox.call(lambda: self._queue.add(job))
        return job.done

    def call(self, work: Callable[[], _Answer]) -> Future[_Answer]:
        """Run `work` on the model thread between two batches; thread-safe."""
        return self._inbox.call(work)

    def stop(self) -> None:
        """Make `run` return after the current batch; thread-safe."""
        self._inbox.stop()

    def silent_s(self) -> float:
        """How long the thread has been at one piece of work; 0 while it has none. Thread-safe."""
        return self._inbox.silent_s()

    def run(self) -> None:
        """Work until `stop`."""
        while self._accept():
            self._queue.drop_ended()
            if batch := self._queue.next_batch():
                self._compute(batch)

    def _accept(self) -> bool:
        """Take everything from the inbox, waiting where nothing is to be computed; False = stop."""
        for item in self._inbox.items(is_idle=not len(self._queue)):
            if item is None:
                return False
            if callable(item):
                item()
        return True

    def _compute(self, batch: Sequence[Waiting]) -> None:
        try:
            vectors = self._model.encode(
                [one.text for one in batch], [one.job.size for one in batch]
            )
        except Exception as failure:  # noqa: BLE001 - ends these jobs, not the thread
            known = isinstance(failure, KakeyaError)
            event(_log, "a batch failed", level=logging.ERROR, texts=len(batch), why=repr(failure))
            for one in batch:
                one.job.fail(failure if known else InvariantBroken("embedding", repr(failure)))
            return
        for one, vector in zip(batch, vectors, strict=True):
            one.job.give(one.at, vector)
