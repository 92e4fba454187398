"""A time is believed of a quiet machine only, and a slice is never longer than a forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.mlx.findings import Findings, FindingsFile, Sharing, Speeds, decode_findings
from kakeya.mlx.findings import encode_findings as encoded
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.model import MlxModel
from kakeya.mlx.probe import (
    AGREEING,
    ATTEMPTS,
    LUCKY_IN,
    QUIET_S,
    REACH,
    ROWS,
    SLICE_S,
    SPREAD,
    SpeedProbe,
    Timing,
    believed_s,
    believed_sizes,
)
from tests.mlx.random_models import write_model

QUIET = [Timing(0.1, 0.1), Timing(0.102, 0.102), Timing(0.101, 0.101)]
FOUND = Findings(
    are_blocks_tried=True,
    sharing=Sharing(in_slabs=True, prefix_from=512, pieces_from=16),
    speeds=Speeds(forwards_s={1: 0.07, 16: 0.15}, pieces_s={64: 0.25}, context_s=1e-6),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_model(tmp_path_factory.mktemp("model"), "llama")), "m")


class VirtualClock:
    """Each look at it passes `wall_s`, of which the process gets `share`."""

    def __init__(self, wall_s: float, share: float = 1.0) -> None:
        self.wall_s, self.share = wall_s, share
        self.looks = 0

    def __call__(self) -> Timing:
        self.looks += 1
        return Timing(self.wall_s * self.looks, self.wall_s * self.looks * self.share)


def test_the_times_of_a_quiet_machine_are_believed() -> None:
    assert believed_s(QUIET, on_cpu=True) == 0.101


def test_a_forward_that_was_disturbed_does_not_count() -> None:
    assert believed_s([*QUIET, Timing(0.08, 0.04)], on_cpu=True) == 0.101


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_busy_machine_is_not_believed(share: float) -> None:
    busy = [Timing(each.wall_s, share * each.wall_s) for each in QUIET]
    assert believed_s(busy, on_cpu=True) is None


def test_two_threads_of_which_one_was_taken_away_are_not_believed() -> None:
    timings = [Timing(0.1, 0.2), Timing(0.1, 0.2), Timing(0.1, 0.11)]
    assert believed_s(timings, on_cpu=True) is None


def test_one_forward_beside_which_another_thread_computed_rules_out_no_other() -> None:
    assert believed_s([*QUIET, Timing(0.4, 0.8)], on_cpu=True) == 0.101


def test_a_gpu_takes_no_processor_time() -> None:
    assert believed_s([Timing(0.1, 0.001)] * 3, on_cpu=False) == 0.1


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=8))
def test_a_believed_time_was_seen_several_times(walls: list[float]) -> None:
    found = believed_s([Timing(wall, wall) for wall in walls], on_cpu=True)
    near = [wall for wall in walls if found and found / SPREAD <= wall <= found * SPREAD]
    assert found is None or len(near) >= AGREEING


def factors(least: float, most: float, *, few: int, many: int) -> st.SearchStrategy[list[float]]:
    """So many times, as factors of the true one."""
    return st.lists(st.floats(least, most), min_size=few, max_size=many)


def believed_factor(walls: list[float], order: Random) -> float | None:
    order.shuffle(walls)
    return believed_s([Timing(wall, 0.0) for wall in walls], on_cpu=False)


@given(
    factors(1, SPREAD, few=AGREEING, many=10),
    factors(1, 10, few=0, many=30),
    st.randoms(use_true_random=False),
)
def test_a_few_undisturbed_times_are_believed_among_any_others(undisturbed, others, order) -> None:
    found = believed_factor(undisturbed + others, order)
    assert found is not None
    assert 1 <= found <= SPREAD


@given(
    factors(1, SPREAD, few=1, many=AGREEING),
    factors(1, 10, few=0, many=40),
    st.randoms(use_true_random=False),
)
def test_a_machine_that_is_rarely_quiet_is_not_believed_to_be_slow(rare, others, order) -> None:
    found = believed_factor(rare + others, order)
    assert found is None or 1 <= found <= REACH * min(rare)


@given(
    factors(1, SPREAD, few=0, many=AGREEING - 1),
    st.floats(SPREAD * REACH * 1.01, 10).flatmap(
        lambda least: factors(least, least * 1.01, few=5, many=40)
    ),
    st.randoms(use_true_random=False),
)
def test_disturbances_that_are_equally_loud_do_not_outvote_the_truth(rare, loud, order) -> None:
    assert not rare or believed_factor(rare + loud, order) is None


@given(st.data(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_lucky_times_do_not_block_a_belief(data, lucky, order) -> None:
    times = lucky * LUCKY_IN
    usual = data.draw(factors(1, 1.02, few=times - lucky, many=times - lucky))
    fast = data.draw(factors(1.02 / REACH * 1.01, 1, few=lucky, many=lucky))
    disturbed = data.draw(factors(1, 10, few=0, many=20))
    found = believed_factor(usual + fast + disturbed, order)
    assert found is not None
    assert 1.02 / REACH <= found <= 1.02


def test_one_row_that_seems_dearer_than_two_is_not_believed() -> None:
    timings = {1: [Timing(0.4, 0.4)] * 3, 2: QUIET}
    assert believed_sizes(timings, on_cpu=True) == {}
    assert believed_sizes({2: QUIET, 4: [Timing(0.4, 0.4)] * 3}, on_cpu=True) == {2: 0.101, 4: 0.4}


def test_all_sizes_are_measured(model: LoadedModel) -> None:
    probe = SpeedProbe(model, 96, clock=VirtualClock(0.01))
    assert set(probe.slices()) == {QUIET_S}
    assert set(probe.speeds.forwards_s) == set(ROWS)
    assert probe.speeds.pieces_s
    assert probe.speeds.tokens_per_second >= 99
    assert probe.speeds.prefill_tokens_per_second(64) == pytest.approx(6400)


def test_a_slice_times_one_forward(model: LoadedModel) -> None:
    clock = VirtualClock(0.01)
    before = 0
    for _ in SpeedProbe(model, 96, clock=clock).slices():
        assert clock.looks - before <= 2
        before = clock.looks


def test_sizes_that_would_take_too_long_are_left_out(model: LoadedModel) -> None:
    probe = SpeedProbe(model, 96, clock=VirtualClock(SLICE_S * 0.6))
    for _ in probe.slices():
        pass
    assert set(probe.speeds.forwards_s) == {1}
    assert len(probe.speeds.pieces_s) == 1


def test_a_busy_machine_is_asked_again_ever_more_seldom_and_then_no_more(
    model: LoadedModel,
) -> None:
    probe = SpeedProbe(model, 96, clock=VirtualClock(0.01, share=0.5))
    pauses = [pause_s for pause_s in probe.slices() if pause_s > QUIET_S]
    assert len(pauses) == ATTEMPTS
    assert pauses == sorted(set(pauses))
    assert probe.speeds == Speeds()


def test_times_of_earlier_attempts_still_count(model: LoadedModel) -> None:
    class Noisy:
        """One forward in four is undisturbed, and no two disturbances are alike."""

        looks, now_s = 0, 0.0

        def __call__(self) -> Timing:
            number, is_end = divmod(self.looks, 2)
            self.looks += 1
            if is_end:
                self.now_s += 0.01 * (1 + (number if number % 4 else 0))
            return Timing(self.now_s, self.now_s)

    probe = SpeedProbe(model, 96, clock=Noisy())
    pauses = [pause for pause in probe.slices() if pause > QUIET_S]
    assert probe.speeds.forwards_s
    assert 0 < len(pauses) < ATTEMPTS


def test_a_context_for_which_there_is_no_room_is_not_made_up(model: LoadedModel) -> None:
    asked: list[int] = []

    def has_room(size: int) -> bool:
        asked.append(size)
        return False

    probe = SpeedProbe(model, 96, has_room=has_room, clock=VirtualClock(0.01))
    for _ in probe.slices():
        pass
    assert len(asked) == 1
    assert probe.speeds.context_s == 0


def test_findings_read_back() -> None:
    assert decode_findings(encoded(FOUND)) == FOUND
    assert decode_findings(encoded(Findings())) == Findings()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        encoded(FOUND)[:-2],
        encoded(FOUND).replace(b'"format": 2', b'"format": 0'),
        encoded(FOUND).replace(b"0.07", b"-1"),
        encoded(FOUND).replace(b"0.07", b'"x"'),
        encoded(FOUND).replace(b"in_slabs", b"on_slabs"),
        encoded(FOUND).replace(b'"pieces_from": 16', b'"pieces_from": "x"'),
    ],
)
def test_damaged_findings_are_none(data: bytes, model: LoadedModel, tmp_path: Path) -> None:
    file = FindingsFile(tmp_path, model)
    file.write(FOUND)
    assert file.read() == FOUND
    next(tmp_path.glob("*.json")).write_bytes(data)
    assert file.read() == Findings()


def test_findings_are_of_these_weights(model: LoadedModel, tmp_path: Path) -> None:
    FindingsFile(tmp_path / "found", model).write(FOUND)
    other = load(str(write_model(tmp_path / "other", "llama")), "m")
    assert FindingsFile(tmp_path / "found", other).read() == Findings()


def test_a_load_begins_with_the_findings_of_the_one_before(
    model: LoadedModel, tmp_path: Path
) -> None:
    first = MlxModel(model, 0.0, False, findings=tmp_path)
    assert first.facts.batch_rows > 1
    assert first.facts.tokens_per_second == 0
    FindingsFile(tmp_path, model).write(FOUND)
    second = MlxModel(model, 0.0, False, findings=tmp_path)
    assert second.facts.forward_costs_s == {1: 0.07, 16: 0.15}
    assert second.facts.batch_rows > 1
    assert list(second.chores()) == []


def test_findings_of_speed_change_no_bits_of_the_same_load(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(probe: SpeedProbe) -> Iterator[float]:
        probe.speeds = FOUND.speeds
        yield QUIET_S

    monkeypatch.setattr(SpeedProbe, "slices", measured)
    loaded = MlxModel(model, 0.0, False, findings=tmp_path)
    before = loaded.facts
    for _ in loaded.chores():
        pass
    after = loaded.facts
    assert after.tokens_per_second > before.tokens_per_second
    assert (after.prefill_grid, after.prefill_chunk_tokens) == (
        before.prefill_grid,
        before.prefill_chunk_tokens,
    )
    assert after.kv_exactness == before.kv_exactness


def test_what_is_known_is_kept_while_the_rest_cannot_be_believed(model):
    known = Speeds(forwards_s={1: 0.5})
    probe = SpeedProbe(model, 96, known=known, clock=VirtualClock(0.01, share=0.5))
    for _ in probe.slices():
        assert probe.speeds.forwards_s == {1: 0.5}
    assert probe.speeds.pieces_s == {}
