"""The KV bound of an engine grows as its sequences need it, by what the agent can lend."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import KvRefused, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.queue.queue import LACK_S
from kakeya.engine.queue.room import AHEAD_TOKENS, STEP_TOKENS
from kakeya.generation.frames import KvWant
from tests.engine.virtual_rig import CHUNK_S, STEP_S, VirtualRig, expected
from tests.laws import law

BLOCK = KV_BLOCK_TOKENS  # bytes, at one byte a token
FIRST = 8 * BLOCK


class Ledger:
    """Lends a rig's engine what it has, as an agent does: the wished bytes, else the needed."""

    def __init__(self, rig: VirtualRig, *, most: int, free: int, delay_s: float = 0.001) -> None:
        self.rig, self.free, self.delay_s = rig, free, delay_s
        self.asked: list[KvWant] = []
        rig.scheduler.limits.room.most_bytes = most
        rig.wants = self.want

    def want(self, frame: KvWant) -> None:
        self.asked.append(frame)
        self.rig.at(self.rig.now_s + self.delay_s, lambda: self.answer(frame))

    def answer(self, frame: KvWant) -> None:
        sizes = (frame.wished_bytes, frame.needed_bytes)
        size = next((size for size in sizes if size <= self.free), 0)
        self.free -= size
        limits = self.rig.scheduler.limits

        def set_bounds() -> None:
            limits.room.free_bytes = self.free
            limits.set(0, 0, limits.room.budget_bytes + size)
            limits.wants_answered()

        self.rig.scheduler.call(set_bounds)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 100 for at in range(length)]


def rig_with(*, most: int, free: int, **more: float) -> tuple[VirtualRig, Ledger]:
    rig = VirtualRig(kv_bytes=FIRST, context_tokens=1 << 20)
    return rig, Ledger(rig, most=most, free=free, **more)


def test_a_sequence_that_is_longer_than_the_bound_begins_once_it_was_raised() -> None:
    rig, ledger = rig_with(most=100 * BLOCK, free=100 * BLOCK)
    told = rig.submit(token_ids=prompt(5000), max_tokens=20)
    rig.run()
    assert told.tokens == expected(told.job.token_ids, 20)
    assert [want.needed_bytes for want in ledger.asked] == [20 * BLOCK - FIRST]
    assert ledger.asked[0].wished_bytes == 20 * BLOCK - FIRST + STEP_TOKENS


def test_a_sequence_that_never_fits_is_refused_at_once_with_both_numbers() -> None:
    rig, ledger = rig_with(most=16 * BLOCK, free=16 * BLOCK)
    rig.scheduler.limits.room.free_bytes = 4 * BLOCK
    told = rig.submit(token_ids=prompt(5000), max_tokens=20)
    rig.run()
    assert isinstance(told.error, KvRefused)
    assert told.error.retry_after_s is None
    assert "4096 tokens at most, and 2048 now" in told.error.message
    assert not ledger.asked
    assert rig.model.prefilled == 0


def test_a_sequence_that_does_not_fit_now_is_refused_before_work_until_a_later_try() -> None:
    rig, ledger = rig_with(most=100 * BLOCK, free=6 * BLOCK)
    told = rig.submit(token_ids=prompt(5000), max_tokens=20)
    rig.run()
    assert isinstance(told.error, KvRefused)
    assert told.error.retry_after_s is not None
    assert f"{100 * BLOCK} tokens at most, and {14 * BLOCK} now" in told.error.message
    assert len(ledger.asked) == 1
    assert rig.model.prefilled == 0


def test_a_smaller_sequence_may_ask_right_after_a_larger_one_was_refused() -> None:
    rig, _ = rig_with(most=100 * BLOCK, free=6 * BLOCK)
    large = rig.submit(token_ids=prompt(5000), max_tokens=20)
    small = rig.submit(0.01, token_ids=prompt(2500), max_tokens=20)
    rig.run()
    assert isinstance(large.error, KvRefused)
    assert small.tokens == expected(small.job.token_ids, 20)


def test_a_long_answer_asks_ahead_and_never_stops_for_it() -> None:
    rig, ledger = rig_with(most=100 * BLOCK, free=100 * BLOCK, delay_s=0.02)
    told = rig.submit(token_ids=prompt(100), max_tokens=6000)
    rig.run()
    assert told.tokens == expected(told.job.token_ids, 6000)
    assert max(told.gaps_s) <= 2 * STEP_S * 1.01
    assert 2 <= len(ledger.asked) <= 6000 // STEP_TOKENS + 1


def test_an_answer_without_memory_keeps_its_kv_and_goes_on_when_there_is_some() -> None:
    rig, ledger = rig_with(most=100 * BLOCK, free=0)
    told = rig.submit(token_ids=prompt(1000), max_tokens=3000)
    rig.at(LACK_S / 2, lambda: setattr(ledger, "free", 50 * BLOCK))
    rig.run()
    assert told.tokens == expected(told.job.token_ids, 3000)
    assert rig.model.prefilled == 999
    assert rig.now_s > LACK_S / 2


def test_an_answer_that_gets_no_memory_ends_with_an_error_that_says_it_can_go_on() -> None:
    rig, _ = rig_with(most=100 * BLOCK, free=0)
    told = rig.submit(token_ids=prompt(1000), max_tokens=3000)
    rig.run()
    assert isinstance(told.error, MemoryRefused)
    assert not isinstance(told.error, KvRefused)
    assert told.error.retry_after_s is not None
    assert told.tokens == expected(told.job.token_ids, 3000)[: len(told.tokens)]
    assert len(told.tokens) > 1000


def test_kept_kv_of_others_stays_where_the_bound_can_be_raised() -> None:
    rig, _ = rig_with(most=100 * BLOCK, free=100 * BLOCK)
    for at in range(4):
        rig.submit(5.0 * at, token_ids=prompt(1000, at), max_tokens=20, kv_key=f"session {at}")
    rig.run()
    assert len(rig.slots.bytes_by_key()) == 4


def test_kept_kv_goes_and_no_time_is_lost_where_it_cannot() -> None:
    rig, ledger = rig_with(most=100 * BLOCK, free=0)
    for at in range(4):
        rig.submit(5.0 * at, token_ids=prompt(1000, at), max_tokens=20, kv_key=f"session {at}")
    rig.run()
    assert 1 <= len(rig.slots.bytes_by_key()) < 4
    assert all(not want.needed_bytes for want in ledger.asked)


def test_two_long_sequences_take_turns_where_memory_is_for_one() -> None:
    rig, _ = rig_with(most=40 * BLOCK, free=32 * BLOCK)
    both = [
        rig.submit(token_ids=prompt(8000, at), max_tokens=200, client=str(at)) for at in range(2)
    ]
    rig.run()
    for told in both:
        assert told.tokens == expected(told.job.token_ids, 200)
    assert rig.model.prefilled == 2 * 7999
    assert rig.now_s >= 2 * 7999 * CHUNK_S / 32


@law(40, part=4)
@given(
    wanted=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 900)), min_size=1, max_size=6),
    most=st.integers(8, 40),
    free=st.integers(0, 32),
    delay_s=st.sampled_from((0.0, 0.003, 0.5)),
)
def test_each_sequence_ends_with_its_tokens_or_a_refusal_within_the_bound_of_the_time(
    wanted: list[tuple[int, int]], most: int, free: int, delay_s: float
) -> None:
    rig, _ = rig_with(most=most * BLOCK, free=min(free, most - 8) * BLOCK, delay_s=delay_s)
    room = rig.scheduler.limits.room

    def check() -> None:
        assert room.lent_bytes + room.parked_bytes <= room.budget_bytes <= room.most_bytes

    rig.check = check
    told = [
        rig.submit(0.01 * at, token_ids=prompt(length, at), max_tokens=more, retries=2)
        for at, (length, more) in enumerate(wanted)
    ]
    rig.run()
    for one in told:
        if one.error is None:
            assert one.tokens == expected(one.job.token_ids, one.job.max_tokens)
        else:
            assert isinstance(one.error, MemoryRefused)
            whole = len(one.job.token_ids) + min(one.job.max_tokens, AHEAD_TOKENS)
            assert whole + BLOCK > FIRST // len(told)
