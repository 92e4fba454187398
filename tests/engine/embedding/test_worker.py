"""The model thread of an encoder: vectors to whom they belong, faults to whom they hit."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kakeya.core.errors import InvalidArgument, InvariantBroken
from kakeya.engine.embedding.service import check_texts
from kakeya.engine.embedding.worker import EncoderWorker
from kakeya.engine.model import MemoryUse
from kakeya.generation.facts import ModelFacts

BAD = 13


class Sums:
    """The vector of a text is the sum of its ids; a batch with the id BAD fails."""

    batch_tokens = 8
    facts = ModelFacts(
        model_id="sums",
        model_path="",
        vocab_size=100,
        context_tokens=6,
        eos_token_ids=(),
        vector_size=1,
    )

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []

    def encode(self, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[bytes]:
        self.batches.append(list(texts))
        if any(BAD in text for text in texts):
            raise ValueError("bad luck")
        return [struct.pack("<f", sum(text)) for text in texts]

    def memory(self) -> MemoryUse:
        return MemoryUse(active_bytes=0, peak_bytes=0)

    def tidy(self) -> None:
        return None

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        return None


def sums(vectors: Sequence[bytes]) -> list[float]:
    return [struct.unpack("<f", vector)[0] for vector in vectors]


@contextmanager
def running(worker: EncoderWorker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_jobs_that_wait_share_batches_and_get_their_own_vectors_in_order() -> None:
    model = Sums()
    worker = EncoderWorker(model)
    first = worker.submit([[1, 1], [2], [3, 3]], 0)
    second = worker.submit([[4, 4], [5]], 0)
    with running(worker):
        assert sums(first.result(30)) == [2, 2, 6]
        assert sums(second.result(30)) == [8, 5]
    assert model.batches == [[[3, 3], [1, 1], [5], [2]], [[4, 4]]]


def test_a_fault_ends_the_jobs_of_its_batch_and_no_other() -> None:
    worker = EncoderWorker(Sums())
    whole = worker.submit([[1], [2]], 0)
    broken = worker.submit([[BAD] * 6], 0)
    with running(worker):
        with pytest.raises(InvariantBroken, match="bad luck"):
            broken.result(30)
        assert sums(whole.result(30)) == [1, 2]
        assert worker.call(lambda: worker.waiting).result(30) == 0


def test_a_job_that_was_given_up_is_not_computed() -> None:
    model = Sums()
    worker = EncoderWorker(model)
    gone = worker.submit([[1]], 0)
    stays = worker.submit([[2]], 0)
    assert gone.cancel()
    with running(worker):
        assert sums(stays.result(30)) == [2]
    assert model.batches == [[[2]]]


@pytest.mark.parametrize(
    ("texts", "size", "says"),
    [
        ([], 0, "at least one token"),
        ([[1], []], 0, "at least one token"),
        ([[1] * 7], 0, "7 tokens; sums takes at most 6"),
        ([[100]], 0, "token id 100"),
        ([[1]], 2, "none has 2"),
    ],
)
def test_what_the_model_lacks_never_reaches_it(
    texts: list[list[int]], size: int, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_texts(texts, size, Sums.facts)
