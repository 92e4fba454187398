"""Who computes when, in virtual time: prompts between steps, places, parking, deadlines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import DeadlineExceeded, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.decoding.control.controller import DraftController
from kakeya.engine.queue.policy import AGED_S, PATIENCE_S, ROUND_S, SPARE_RATIO
from kakeya.generation.request import DraftSource
from tests.engine.virtual_rig import CHUNK_S, STEP_S, TOKEN_S, VirtualRig, expected

BLOCK = KV_BLOCK_TOKENS


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 100 for at in range(length)]


def test_streams_go_on_while_a_long_prompt_comes_in() -> None:
    rig = VirtualRig(places=9)
    streams = [rig.submit(token_ids=prompt(5, at), max_tokens=900) for at in range(8)]
    long = rig.submit(1.0, token_ids=prompt(4000), max_tokens=4)
    rig.run()
    for stream in streams:
        assert max(stream.gaps_s) <= max(CHUNK_S, ROUND_S) + STEP_S + 1e-9
        assert stream.tokens == expected(stream.job.token_ids, 900)
    assert long.tokens == expected(long.job.token_ids, 4)
    # And it gets nearly all of the time that the streams can miss.
    assert long.at_s[0] - 1.0 <= 4000 * TOKEN_S * (1 + STEP_S / CHUNK_S) * 1.1


def test_rows_that_only_wait_for_the_step_they_share_are_no_units_of_their_own() -> None:
    rig = VirtualRig(places=8)
    looks = 0
    holds = rig.scheduler.limits.holds

    def look() -> bool:
        nonlocal looks
        looks += 1
        return holds()

    rig.scheduler.limits.holds = look  # type: ignore[method-assign]
    streams = [rig.submit(token_ids=prompt(5, at), max_tokens=100) for at in range(8)]
    rig.run()
    assert all(stream.tokens == expected(stream.job.token_ids, 100) for stream in streams)
    # A unit for each prompt and each end, and one for each step of all.
    assert looks <= 100 + 3 * len(streams)


def test_what_nobody_waits_for_hardly_slows_who_decodes_or_comes() -> None:
    """A prefix that is warmed ahead gives way within a chunk, and goes on once they are done."""

    def run(*, beside: bool) -> tuple[float, float, list[int]]:
        rig = VirtualRig(places=4)
        told = rig.submit(2.0, token_ids=prompt(400), max_tokens=600)
        if beside:
            warm = rig.submit(token_ids=prompt(6000), max_tokens=0, priority=5)
        rig.run()
        if beside:
            assert warm.is_over
            assert not warm.tokens
        return told.at_s[0], told.at_s[-1], told.tokens

    alone, beside = run(beside=False), run(beside=True)
    assert beside[0] - alone[0] <= 2 * CHUNK_S + 400 * TOKEN_S / SPARE_RATIO
    assert beside[1] - 2.0 <= (alone[1] - 2.0) * (1 + 1.5 / SPARE_RATIO) + 2 * CHUNK_S
    assert beside[2] == alone[2]


def test_what_nobody_waits_for_goes_on_though_somebody_always_decodes() -> None:
    rig = VirtualRig(places=4)
    stream = rig.submit(token_ids=prompt(5), max_tokens=4000)
    warm = rig.submit(0.1, token_ids=prompt(20 * 32), max_tokens=0, priority=5)
    rig.run()
    assert warm.prefill_at_s[-1] < stream.at_s[-1]
    assert warm.prefill_at_s[-1] <= 0.1 + 20 * CHUNK_S * (SPARE_RATIO + 2)


def test_a_prompt_is_computed_at_full_speed_while_nobody_decodes() -> None:
    rig = VirtualRig()
    long, longer = (rig.submit(token_ids=prompt(size), max_tokens=2) for size in (1000, 2000))
    rig.run()
    assert long.prefill_at_s[-1] == pytest.approx(999 * TOKEN_S, abs=300 * TOKEN_S)
    assert longer.prefill_at_s[-1] <= 2998 * TOKEN_S + 4 * STEP_S + 1e-9


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    rig = VirtualRig()
    long = rig.submit(token_ids=prompt(4000), max_tokens=2)
    short = rig.submit(0.5, token_ids=prompt(64), max_tokens=2)
    rig.run()
    assert short.at_s[0] <= 0.5 + 3 * CHUNK_S + 2 * STEP_S + CHUNK_S + 1e-9
    assert long.tokens == expected(long.job.token_ids, 2)


def test_a_long_prompt_gets_its_turn_though_short_ones_never_end() -> None:
    rig = VirtualRig()
    long = rig.submit(token_ids=prompt(1500), max_tokens=2)
    shorts = [rig.submit(0.06 * at, token_ids=prompt(65, at), max_tokens=1) for at in range(200)]
    rig.run()
    assert long.at_s[0] < shorts[-1].at_s[0]


def test_first_words_do_not_wait_for_a_long_chunk() -> None:
    rig = VirtualRig(prefill_chunk_tokens=128)
    stream = rig.submit(token_ids=prompt(5), max_tokens=100)
    long = rig.submit(0.1, token_ids=prompt(2000), max_tokens=2)
    short = rig.submit(0.3, token_ids=prompt(20), max_tokens=2)
    rig.run()
    spoken_s = short.at_s[0] - short.prefill_at_s[-1]
    assert spoken_s <= 2 * STEP_S + 1e-9
    assert stream.tokens == expected(stream.job.token_ids, 100)
    assert long.tokens == expected(long.job.token_ids, 2)


@pytest.mark.parametrize("at_s", [0.2, 1.3], ids=["in its prompt", "in its answer"])
def test_an_urgent_one_parks_a_less_urgent_one_which_loses_nothing(at_s: float) -> None:
    rig = VirtualRig(places=1)
    batch = rig.submit(token_ids=prompt(1000), max_tokens=200, priority=4)
    urgent = rig.submit(at_s, token_ids=prompt(100, 9), max_tokens=20, priority=0)
    rig.run()
    assert urgent.done is not None
    assert batch.done is not None
    assert urgent.at_s[-1] < at_s + 100 * TOKEN_S + 22 * STEP_S + CHUNK_S
    assert urgent.tokens == expected(urgent.job.token_ids, 20)
    assert batch.tokens == expected(batch.job.token_ids, 200)
    assert rig.model.prefilled == 999 + 99
    assert batch.done.usage.forwards == 200


def test_a_limit_of_sequences_holds_for_later_ones_and_never_exceeds_that_of_the_start() -> None:
    rig = VirtualRig(places=4)
    rig.scheduler.limit_running(1)
    first = rig.submit(token_ids=prompt(100), max_tokens=400)
    second = rig.submit(0.2, token_ids=prompt(100, 9), max_tokens=4)
    rig.run()
    assert first.at_s[-1] < second.at_s[0], "one at a time"
    rig.scheduler.limit_running(64)
    many = [rig.submit(token_ids=prompt(9, at), max_tokens=90) for at in range(5)]
    rig.run()
    assert sorted(one.at_s[0] for one in many)[4] > min(one.at_s[-1] for one in many)
    assert sorted(one.at_s[0] for one in many)[3] < min(one.at_s[-1] for one in many)


def test_equals_do_not_park_each_other() -> None:
    rig = VirtualRig(places=1)
    first = rig.submit(token_ids=prompt(100), max_tokens=400)
    second = rig.submit(0.2, token_ids=prompt(100, 9), max_tokens=4)
    rig.run()
    assert first.at_s[-1] < second.at_s[0]


def test_a_client_with_nothing_running_gets_a_place_of_one_that_has_them_all() -> None:
    rig = VirtualRig(places=2)
    many = [rig.submit(token_ids=prompt(9, at), max_tokens=900, client="a") for at in range(6)]
    one = rig.submit(0.1, token_ids=prompt(9, 77), max_tokens=50, client="b")
    rig.run()
    assert one.at_s[0] < 0.1 + PATIENCE_S + 0.5
    for told in (*many, one):
        assert told.tokens == expected(told.job.token_ids, told.job.max_tokens)


@pytest.mark.parametrize("places", [1, 8])
def test_a_flood_of_urgent_ones_does_not_starve_a_normal_one(places: int) -> None:
    """Its turn comes by age, and the place that it then gets is not taken from it at once."""
    rig = VirtualRig(places=places)
    flood = [
        rig.submit(0.01 + at * 0.1, token_ids=prompt(200, at), max_tokens=10, priority=0)
        for at in range(220)
    ]
    normal = rig.submit(1.0, token_ids=prompt(300, 77), max_tokens=50, client="b")
    speculative = rig.submit(1.0, token_ids=prompt(300, 78), max_tokens=0, priority=5, client="c")
    rig.run()
    assert normal.tokens == expected(normal.job.token_ids, 50)
    assert normal.at_s[-1] < 1.0 + 3 * AGED_S
    assert speculative.done is not None
    assert max(told.at_s[-1] for told in flood) > 1.0 + 4 * AGED_S


def test_a_parked_one_whose_kv_went_is_told_that_it_can_go_on() -> None:
    rig = VirtualRig(places=1, kv_bytes=4 * BLOCK)
    batch = rig.submit(token_ids=prompt(300), max_tokens=200, priority=4)
    rig.submit(0.5, token_ids=prompt(600, 9), max_tokens=100, priority=0)
    rig.run()
    assert isinstance(batch.error, MemoryRefused)
    assert batch.error.retry_after_s is not None
    assert batch.tokens == expected(batch.job.token_ids, 200)[: len(batch.tokens)]


def test_a_parked_one_that_is_given_up_leaves_and_its_kv_is_kept() -> None:
    rig = VirtualRig(places=1)
    batch = rig.submit(token_ids=prompt(300), max_tokens=200, priority=4, kv_key="k")
    rig.submit(0.5, token_ids=prompt(600, 9), max_tokens=100, priority=0)
    rig.cancel(0.8, batch)
    rig.run()
    assert rig.slots.kept_tokens("k") >= 300
    assert rig.scheduler.limits.room.parked_bytes == 0


def test_one_whose_deadline_passes_in_the_queue_ends_and_is_never_computed() -> None:
    rig = VirtualRig(places=1)
    rig.submit(token_ids=prompt(100), max_tokens=400)
    late = rig.submit(0.2, token_ids=prompt(100, 9), max_tokens=4, deadline_s=0.5)
    rig.run()
    assert isinstance(late.error, DeadlineExceeded)
    assert late.error.retryable
    assert rig.model.opened == 1


def test_one_that_is_parked_in_its_prompt_is_told_when_it_cannot_keep_its_deadline() -> None:
    rig = VirtualRig(places=1)
    late = rig.submit(token_ids=prompt(1000), max_tokens=5, priority=4, deadline_s=3.0)
    early = rig.submit(
        0.1, token_ids=prompt(200), max_tokens=5, priority=4, deadline_s=20.0, client="b"
    )
    told: list[float] = []
    rig.check = lambda: told.append(rig.now_s) if late.error is not None and not told else None
    for at in range(4):
        rig.submit(0.2 + 0.01 * at, token_ids=prompt(1000, at), max_tokens=400, priority=0)
    rig.run()
    assert isinstance(late.error, DeadlineExceeded)
    assert "the first token is expected in" in late.error.message
    assert late.error.retry_after_s is not None
    assert told[0] < 1.0
    assert not late.tokens
    assert early.tokens == expected(early.job.token_ids, 5)


def test_one_that_is_parked_in_its_prompt_and_can_keep_its_deadline_does() -> None:
    rig = VirtualRig(places=1)
    batch = rig.submit(token_ids=prompt(1000), max_tokens=5, priority=4, deadline_s=3.0)
    rig.submit(0.2, token_ids=prompt(500, 9), max_tokens=100, priority=0)
    rig.run()
    assert batch.tokens == expected(batch.job.token_ids, 5)
    assert batch.at_s[0] < 3.0


def test_one_that_was_parked_behind_its_first_token_has_no_deadline_any_more() -> None:
    rig = VirtualRig(places=1)
    batch = rig.submit(token_ids=prompt(1000), max_tokens=100, priority=4, deadline_s=1.2)
    urgent = rig.submit(1.1, token_ids=prompt(1000, 9), max_tokens=400, priority=0)
    rig.run()
    assert batch.at_s[0] < 1.2 < urgent.at_s[-1] < batch.at_s[-1]
    assert batch.tokens == expected(batch.job.token_ids, 100)


def test_one_that_is_cancelled_in_the_queue_is_never_computed() -> None:
    rig = VirtualRig(places=1)
    rig.submit(token_ids=prompt(100), max_tokens=400)
    given_up = rig.submit(0.2, token_ids=prompt(100, 9), max_tokens=4)
    rig.cancel(0.4, given_up)
    rig.run()
    assert rig.model.opened == 1
    assert not given_up.tokens


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimate() -> None:
    rig = VirtualRig()
    rig.submit(token_ids=prompt(2000), max_tokens=10)
    hopeless = rig.submit(0.5, token_ids=prompt(3900, 9), max_tokens=4, deadline_s=2.0)
    easy = rig.submit(0.5, token_ids=prompt(200, 9), max_tokens=4, deadline_s=2.0)
    rig.run()
    assert isinstance(hopeless.error, DeadlineExceeded)
    assert "expected in 5." in hopeless.error.message
    assert hopeless.error.retry_after_s is not None
    assert easy.error is None
    assert rig.model.opened == 2


def test_a_deadline_before_a_single_step_is_refused_though_nobody_is_there() -> None:
    rig = VirtualRig()
    hopeless = rig.submit(token_ids=prompt(1), deadline_s=STEP_S / 2)
    easy = rig.submit(token_ids=prompt(1), deadline_s=STEP_S * 2)
    rig.run()
    assert isinstance(hopeless.error, DeadlineExceeded)
    assert easy.done is not None


def test_one_that_is_cancelled_in_the_queue_leaves_it_before_the_next_step() -> None:
    rig = VirtualRig(places=1)
    rig.submit(token_ids=prompt(5), max_tokens=100)
    given_up = rig.submit(0.1, token_ids=prompt(100, 9), max_tokens=4)
    rig.cancel(0.2, given_up)
    seen: list[tuple[float, int]] = []
    rig.check = lambda: seen.append((rig.now_s, rig.scheduler.load().waiting))
    rig.run()
    assert any(waiting for at_s, waiting in seen if at_s < 0.2)
    assert not any(waiting for at_s, waiting in seen if at_s > 0.2 + STEP_S)


def test_prefill_only_leaves_its_kv_and_no_token() -> None:
    rig = VirtualRig()
    warmed = rig.submit(token_ids=prompt(300), max_tokens=0, priority=5, kv_key="k")
    rig.run()
    assert warmed.done is not None
    assert not warmed.tokens
    assert rig.slots.kept_tokens("k") == 299


class Eager(DraftController):
    """Verifies every draft whole, and notes what each forward is said to have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def rows(self, draft, *, wait_s=0.0):
        return len(draft.tokens)

    def observe_forward(self, rows, seconds):
        self.seen.append((rows, seconds))


def test_a_block_is_not_charged_with_the_work_of_others() -> None:
    controller = Eager()
    rig = VirtualRig(controller=controller)
    ngram = (DraftSource(kind="ngram"),)
    told = [
        rig.submit(0.4 * at, token_ids=prompt(200, at), max_tokens=200, draft_sources=ngram)
        for at in range(4)
    ]
    plain = [rig.submit(token_ids=prompt(5, 50 + at), max_tokens=300) for at in range(2)]
    rig.run()
    assert sum(rows > 1 for rows, _ in controller.seen) > 50
    assert all(seconds == pytest.approx(STEP_S) for _, seconds in controller.seen)
    for one in (*told, *plain):
        assert one.tokens == expected(one.job.token_ids, one.job.max_tokens)


JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0, 3),
            "length": st.integers(1, 900),
            "max_tokens": st.integers(1, 120),
            "priority": st.integers(0, 5),
            "client": st.sampled_from("abc"),
            "kv_key": st.sampled_from(["", "", "k", "l"]),
            "cancel_s": st.none() | st.floats(0, 4),
            "deadline_s": st.none() | st.floats(0.01, 4),
        }
    ),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=60)
@given(jobs=JOBS, places=st.integers(1, 4), blocks=st.integers(4, 9))
def test_whatever_comes_all_get_what_they_get_alone_within_the_bound(jobs, places, blocks):
    rig = VirtualRig(places=places, kv_bytes=blocks * BLOCK)
    limits = rig.scheduler.limits

    def check() -> None:
        taken = limits.room.lent_bytes + limits.room.parked_bytes
        assert taken <= rig.slots.budget_bytes
        assert taken + rig.slots.held_bytes <= rig.slots.budget_bytes
        assert rig.scheduler.load().running <= places

    rig.check = check
    told = []
    for at, job in enumerate(jobs):
        told.append(
            rig.submit(
                job["at_s"],
                token_ids=prompt(job["length"], at),
                retries=2,
                **{key: job[key] for key in ("max_tokens", "priority", "client", "kv_key")},
                deadline_s=job["deadline_s"],
            )
        )
        if job["cancel_s"] is not None:
            rig.cancel(job["cancel_s"], told[-1])
    rig.run()
    for one, job in zip(told, jobs, strict=True):
        whole = expected(one.job.token_ids, one.job.max_tokens)
        assert one.tokens == whole[: len(one.tokens)]
        if one.done is not None:
            assert one.tokens == whole
        elif isinstance(one.error, DeadlineExceeded):
            assert job["deadline_s"] is not None
            assert not one.tokens
        else:
            assert one.error is None or one.error.retry_after_s is None
            assert one.error is not None or job["cancel_s"] is not None
    assert limits.room.lent_bytes == limits.room.parked_bytes == 0
    assert all(row.ticket.cancelled for row in rig.scheduler._queue.waiting)
