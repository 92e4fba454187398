"""Prompts in virtual time: long pieces in parts, beside steps of others, and shared forwards."""

from __future__ import annotations

import pytest

from kakeya.core.errors import DeadlineExceeded
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.model import CHUNK_LIMIT_S, PART_S
from kakeya.engine.queue.policy import FLOOR_TURNS, ROUND_S
from kakeya.engine.steps.prefilling import MOST_TOKENS
from kakeya.generation.request import GenerationPriority
from tests.engine.virtual_rig import STEP_S, TOKEN_S, HashForward, VirtualRig, expected

PIECE = 256
LAYERS = 30


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 100 for at in range(length)]


def large(**changes: object) -> VirtualRig:
    """A model whose pieces take much longer than others can wait."""
    values = {"prefill_chunk_tokens": PIECE, "prefill_grid": ((0, PIECE),)}
    return VirtualRig(**{**values, "prefill_parts": LAYERS, **changes})  # type: ignore[arg-type]


def sharing(**changes: object) -> VirtualRig:
    return large(shares_pieces_from=16, **changes)


def test_streams_go_on_between_the_layers_of_a_long_piece() -> None:
    rig = large()
    stream = rig.submit(token_ids=prompt(5), max_tokens=400)
    long = rig.submit(0.2, token_ids=prompt(2000), max_tokens=2)
    rig.run()
    assert max(stream.gaps_s) <= ROUND_S + STEP_S + 1e-9
    assert long.at_s[0] - 0.2 <= 2000 * TOKEN_S * (1 + STEP_S / ROUND_S) * 1.3
    assert stream.tokens == expected(stream.job.token_ids, 400)
    assert long.tokens == expected(long.job.token_ids, 2)


def test_a_prompt_gets_half_of_the_time_where_steps_are_long() -> None:
    step_s = 4 * ROUND_S
    rig = large(forward_costs_s={1: step_s})
    rig.model.step_s = step_s
    stream = rig.submit(token_ids=prompt(5), max_tokens=60)
    long = rig.submit(0.5, token_ids=prompt(1500), max_tokens=2)
    rig.run()
    assert max(stream.gaps_s) <= 2 * step_s + PART_S
    assert long.at_s[0] - 0.5 <= 2.5 * 1500 * TOKEN_S


def test_a_prompt_waits_for_few_steps_of_less_urgent_streams_and_these_go_on() -> None:
    step_s = 4 * ROUND_S
    rig = large(forward_costs_s={1: step_s})
    rig.model.step_s = step_s
    stream = rig.submit(token_ids=prompt(5), max_tokens=60, priority=GenerationPriority.BATCH)
    long = rig.submit(0.5, token_ids=prompt(1500), max_tokens=2, priority=GenerationPriority.NORMAL)
    rig.run()
    assert long.at_s[0] - 0.5 <= 1.3 * 1500 * TOKEN_S + 3 * step_s
    assert max(stream.gaps_s) <= 5 * step_s + PART_S
    assert stream.tokens == expected(stream.job.token_ids, 60)


def test_a_person_waits_for_few_steps_of_a_batch_though_no_step_was_probed() -> None:
    step_s = 6 * ROUND_S
    rig = large(forward_costs_s={})
    rig.model.step_s = step_s
    batch = rig.submit(token_ids=prompt(5), max_tokens=30, priority=GenerationPriority.BATCH)
    person = rig.submit(2.0, token_ids=prompt(500), max_tokens=2)
    rig.run()
    # The step that it comes in, and that of its first token.
    assert person.at_s[0] - 2.0 <= 500 * TOKEN_S + 2 * step_s
    assert batch.tokens == expected(batch.job.token_ids, 30)


def test_a_person_waits_for_no_step_of_a_batch_where_a_chunk_goes_by_age() -> None:
    """The batch's prompts have parts of half of a round, and one of its rows decodes."""
    step_s = 3 * ROUND_S
    rig = large(prefill_parts=10, forward_costs_s={1: step_s})
    rig.model.step_s = step_s
    batch = [
        rig.submit(token_ids=prompt(length, at), max_tokens=40, priority=GenerationPriority.BATCH)
        for at, length in enumerate((5, 2000, 2000))
    ]
    persons = [rig.submit(1.0 + at, token_ids=prompt(400, at), max_tokens=1) for at in range(4)]
    rig.run()
    part_s = PIECE * TOKEN_S / 10
    by_age_s = 400 * TOKEN_S / (FLOOR_TURNS - 1) + part_s
    for at, person in enumerate(persons):
        # The unit that it comes in, and the step of its first token.
        most_s = 400 * TOKEN_S + by_age_s + 2 * step_s
        assert person.at_s[0] - (1.0 + at) <= most_s
    assert all(one.tokens == expected(one.job.token_ids, 40) for one in batch)


def test_a_batch_that_none_decodes_beside_leaves_its_prompt_soon_for_a_person() -> None:
    rig = large()
    rig.submit(token_ids=prompt(2000), max_tokens=2, priority=GenerationPriority.BATCH)
    person = rig.submit(0.52, token_ids=prompt(20), max_tokens=1)
    rig.run()
    assert person.at_s[0] - 0.52 <= ROUND_S + 20 * TOKEN_S + STEP_S + PART_S


def test_streams_go_on_though_the_speed_of_prompts_was_not_measured() -> None:
    rig = large(prefill_tokens_per_second=0.0)
    first = rig.submit(token_ids=prompt(300), max_tokens=2)
    rig.run()
    stream = rig.submit(token_ids=prompt(5), max_tokens=400)
    rig.submit(rig.now_s + 0.2, token_ids=prompt(2000), max_tokens=2)
    rig.run()
    assert first.done is not None
    assert max(stream.gaps_s) <= ROUND_S + STEP_S + 1e-9


def test_a_prompt_that_is_cancelled_ends_within_a_part_and_its_kv_is_kept() -> None:
    rig = large()
    long = rig.submit(token_ids=prompt(1000), max_tokens=2, kv_key="k")
    rig.cancel(0.3, long)
    rig.run()
    assert rig.now_s <= 0.3 + CHUNK_LIMIT_S
    assert rig.slots.kept_tokens("k") == PIECE
    again = rig.submit(token_ids=prompt(1000), max_tokens=2, kv_key="k")
    rig.run()
    assert again.tokens == expected(again.job.token_ids, 2)
    assert rig.model.prefilled == 999


def test_a_prompt_that_is_parked_within_a_piece_computes_that_piece_anew() -> None:
    rig = large(places=1)
    batch = rig.submit(token_ids=prompt(1000), max_tokens=20, priority=4)
    urgent = rig.submit(0.4, token_ids=prompt(100, 9), max_tokens=5, priority=0)
    rig.run()
    assert urgent.at_s[0] <= 0.4 + CHUNK_LIMIT_S + 100 * TOKEN_S + 2 * STEP_S
    assert urgent.tokens == expected(urgent.job.token_ids, 5)
    assert batch.tokens == expected(batch.job.token_ids, 20)
    assert rig.model.prefilled == 999 + 99


def test_prompts_that_arrive_together_share_a_forward() -> None:
    rig = sharing()
    told = [rig.submit(token_ids=prompt(60 + at, at), max_tokens=3) for at in range(4)]
    rig.run()
    assert rig.model.shared == [4]
    assert max(one.at_s[0] for one in told) <= 64 * TOKEN_S + 2 * STEP_S
    for one in told:
        assert one.tokens == expected(one.job.token_ids, 3)


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [
        ((17, 16), [1, 1]),
        ((17, 17), [2]),
        ((200, 40), [1, 1]),
        ((257, 257), [1, 1]),
        ((129, 129, 129), [2, 1]),
        ((61, 70, 65, 62, 66), [3, 2]),
    ],
    ids=["too short", "just enough", "of other lengths", "full", "too many", "two groups"],
)
def test_pieces_share_a_forward_where_that_saves_time(
    lengths: tuple[int, ...], shared: list[int]
) -> None:
    rig = sharing(places=8)
    told = [rig.submit(token_ids=prompt(size, at), max_tokens=2) for at, size in enumerate(lengths)]
    rig.run()
    assert sorted(rig.model.shared, reverse=True) == shared
    assert max(rig.model.shared) * min(lengths) <= MOST_TOKENS + len(lengths)
    assert all(one.tokens == expected(one.job.token_ids, 2) for one in told)


def test_a_less_urgent_prompt_takes_no_part_in_a_more_urgent_one_s_forward() -> None:
    rig = sharing()
    urgent = rig.submit(token_ids=prompt(60), max_tokens=1, priority=0)
    other = rig.submit(token_ids=prompt(60, 9), max_tokens=1, priority=4)
    rig.run()
    assert rig.model.shared == [1, 1]
    assert urgent.at_s[0] < other.at_s[0]


def test_a_less_urgent_prompt_takes_no_more_urgent_one_into_its_forward() -> None:
    """Also where it goes by age, since urgent ones follow each other without end."""
    rig = sharing()
    other = rig.submit(token_ids=prompt(60, 9), max_tokens=1, priority=4)
    each_s = 59 * TOKEN_S + STEP_S
    urgent = [
        rig.submit(max(0.0, at * each_s - 0.002), token_ids=prompt(60), max_tokens=1, priority=0)
        for at in range(20)
    ]
    rig.run()
    assert rig.model.shared == [1] * (len(urgent) + 1)
    assert other.at_s[0] < urgent[-1].at_s[0]


def test_one_that_leaves_a_shared_forward_holds_nobody_up() -> None:
    rig = sharing()
    told = [rig.submit(token_ids=prompt(60, at), max_tokens=3, kv_key=str(at)) for at in range(4)]
    rig.cancel(0.01, told[1])
    rig.run()
    assert rig.model.shared == [4]
    assert rig.slots.kept_tokens("1") == 0
    for one in (told[0], *told[2:]):
        assert one.tokens == expected(one.job.token_ids, 3)


def test_where_a_shared_forward_fails_each_prompt_is_computed_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = sharing()
    honest = HashForward.advance

    def advance(self: HashForward) -> bool:
        if len(self.members) > 1:
            raise RuntimeError("boom")
        return honest(self)

    monkeypatch.setattr(HashForward, "advance", advance)
    told = [rig.submit(token_ids=prompt(60, at), max_tokens=3) for at in range(3)]
    rig.run()
    assert rig.model.shared == [3, 1, 1, 1]
    assert all(one.tokens == expected(one.job.token_ids, 3) for one in told)
    later = [rig.submit(token_ids=prompt(60, at), max_tokens=3) for at in range(2)]
    rig.run()
    assert rig.model.shared == [3, 1, 1, 1, 1, 1]
    assert all(one.error is None for one in later)


def test_a_piece_that_fails_alone_ends_its_own_generation_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = large()
    honest = HashForward.advance

    def advance(self: HashForward) -> bool:
        if any(len(piece) == 70 for _, piece in self.members):
            raise RuntimeError("boom")
        return honest(self)

    monkeypatch.setattr(HashForward, "advance", advance)
    good = rig.submit(token_ids=prompt(60), max_tokens=3)
    bad = rig.submit(token_ids=prompt(71), max_tokens=3)
    rig.run()
    assert bad.error is not None
    assert good.tokens == expected(good.job.token_ids, 3)


def test_speculative_work_shares_no_forward_with_work_that_a_client_waits_for() -> None:
    rig = sharing(kv_bytes=64 * KV_BLOCK_TOKENS)
    warm = rig.submit(token_ids=prompt(60), max_tokens=0, priority=5)
    client = rig.submit(token_ids=prompt(60, 9), max_tokens=2)
    rig.run()
    assert rig.model.shared == [1, 1]
    assert client.tokens == expected(client.job.token_ids, 2)
    assert warm.done is not None


def test_one_whose_company_left_a_forward_that_fails_computes_its_piece_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its piece was filled up for the other: that it was in there by itself says nothing of it."""
    rig = sharing()
    honest = HashForward.advance

    def advance(self: HashForward) -> bool:
        if len(self.pieces) > 1 and len(self.members) == 1:
            raise RuntimeError("boom")
        return honest(self)

    monkeypatch.setattr(HashForward, "advance", advance)
    gone = rig.submit(token_ids=prompt(120), max_tokens=3)
    good = rig.submit(token_ids=prompt(120, 9), max_tokens=3)
    rig.cancel(0.01, gone)
    rig.run()
    assert rig.model.shared == [2, 1]
    assert good.tokens == expected(good.job.token_ids, 3)


def test_prompts_that_shared_forwards_make_no_one_expect_a_long_one_sooner() -> None:
    rig = sharing()
    for _ in range(20):
        for at in range(4):
            rig.submit(rig.now_s, token_ids=prompt(60 + at, at), max_tokens=1)
        rig.run()
    stream = rig.submit(token_ids=prompt(5), max_tokens=400)
    rig.submit(rig.now_s + 0.2, token_ids=prompt(2000), max_tokens=2)
    rig.run()
    assert set(rig.model.shared) == {4, 1}
    assert max(stream.gaps_s) <= ROUND_S + STEP_S + 1e-9


@pytest.mark.parametrize(("deadline_s", "is_refused"), [(2.6, True), (3.8, False)])
def test_the_time_beside_streams_is_learned_and_not_unlearned_without_them(
    deadline_s: float, is_refused: bool
) -> None:
    """A prompt of 1.5 s takes 3.2 s beside steps of 0.2 s, as the engine has seen before."""
    rig = large(forward_costs_s={1: 0.2})
    rig.model.step_s = 0.2
    for alone in (1500, 3000):
        rig.submit(rig.now_s, token_ids=prompt(5), max_tokens=60)
        rig.submit(rig.now_s + 0.5, token_ids=prompt(1500), max_tokens=2)
        rig.run()
        rig.submit(rig.now_s, token_ids=prompt(alone), max_tokens=1)
        rig.run()
    rig.submit(rig.now_s, token_ids=prompt(5), max_tokens=60)
    told = rig.submit(rig.now_s + 0.5, token_ids=prompt(1500), max_tokens=2, deadline_s=deadline_s)
    before = rig.model.prefilled
    rig.run()
    if is_refused:
        assert isinstance(told.error, DeadlineExceeded)
        assert rig.model.prefilled == before + 4, "it is refused before it takes anything"
    else:
        assert told.tokens == expected(told.job.token_ids, 2)
