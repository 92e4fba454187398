"""A shared prefix is read once, and gives the result of each row's own attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from kakeya.mlx.batch.batch import forward_together, launch_together, why_by_turns
from kakeya.mlx.batch.cache import Stretch
from kakeya.mlx.batch.places import PlaceAssignment
from kakeya.mlx.batch.shared_prefix import (
    LEAST_TOKENS,
    STEP_TOKENS,
    PrefixGroup,
    RowRun,
    attend,
    compare,
    runs,
)
from kakeya.mlx.batch.shared_prefix_probe import SHARES_FROM, shares_from
from kakeya.mlx.batch.slabs import LayerSlab, Seat
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.numerics import attention
from kakeya.mlx.verifier import MlxVerifier
from tests.mlx.random_models import write_model

STEM = [(7 * at) % 50 for at in range(LEAST_TOKENS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny one whose context is long enough for the probe."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_model(folder, "llama", changes={"max_position_embeddings": 8192})
    loaded = load(str(folder), "llama")
    assert not why_by_turns(loaded)
    return loaded


def sequence(model: LoadedModel, *pieces: list[int]) -> MlxVerifier:
    state = MlxVerifier(model)
    for piece in pieces:
        state.prefill(piece)
    return state


def seated(*states: MlxVerifier) -> list[Seat]:
    """The seats of these, in one slab, in this order."""
    assignment = PlaceAssignment()
    assignment.shares_from = 1
    assignment.arrange(states)
    seats = [state.seat for state in states if state.seat is not None]
    assert len(seats) == len(states)
    return seats


@dataclass
class At:
    """A place, as `runs` sees it."""

    place: int
    group: PrefixGroup | None
    shared_tokens: int
    is_compared: bool = True


GROUPS = (PrefixGroup(), PrefixGroup(), None)


@st.composite
def rows_of_a_slab(draw: st.DrawFn) -> list[At]:
    places = sorted(draw(st.sets(st.integers(0, 11), min_size=1)))
    seats = [At(place, draw(st.sampled_from(GROUPS)), draw(st.integers(0, 9))) for place in places]
    for seat in seats:
        seat.shared_tokens = 0 if seat.group is None else seat.shared_tokens
    return seats


@settings(max_examples=150)
@given(seats=rows_of_a_slab(), least=st.one_of(st.none(), st.integers(1, 20)))
def test_rows_share_only_what_is_alike_in_all_and_where_it_pays(
    seats: list[At], least: int | None
) -> None:
    found = runs(seats, shares_from=least)
    assert [at for run in found for at in range(run.start, run.end)] == list(range(len(seats)))
    for run in found:
        rows = seats[run.start : run.end]
        assert [row.place - rows[0].place for row in rows] == list(range(len(rows)))
        if run.shared:
            assert least is not None
            assert (len(rows) - 1) * run.shared >= least
            assert len({row.group for row in rows}) == 1
            assert run.shared == min(row.shared_tokens for row in rows)
    for one, two in pairwise(found):
        touch = seats[two.start - 1].place + 1 == seats[two.start].place
        assert one.shared or two.shared or not touch  # one call, where nothing is gained by two


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(2, 5),
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    shared=st.integers(1, 40),
    more=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    kind=st.sampled_from((mx.float32, mx.float16)),
    in_powers=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_of_kin_is_that_of_each_row(
    rows: int,
    groups: int,
    each: int,
    shared: int,
    more: list[int],
    kind: mx.Dtype,
    in_powers: bool,
    seed: int,
) -> None:
    mx.random.seed(seed)
    first, capacity, width = 2, 64, 8
    lengths = [shared + extra for extra in more[:rows]]  # in front of what is appended
    longest = max(lengths) + 1
    keys, values = (
        mx.random.normal((first + rows + 1, groups, capacity, size)).astype(kind)
        for size in (width, 6)
    )
    for row in range(1, rows):
        keys[first + row, :, :shared] = keys[first, :, :shared]
        values[first + row, :, :shared] = values[first, :, :shared]
    queries = mx.random.normal((rows, groups * each, 1, width)).astype(kind)
    seen = mx.arange(longest) <= mx.array(lengths)[:, None]
    places = slice(first, first + rows)
    expected = mx.fast.scaled_dot_product_attention(
        queries,
        keys[places, :, :longest],
        values[places, :, :longest],
        scale=0.3,
        mask=seen[:, None, None],
    )
    with patch.object(attention, "is_cpu", return_value=in_powers):
        found = attend(
            queries,
            LayerSlab(keys, values),
            places,
            shared=shared,
            longest=longest,
            scale=0.3,
            mask=None if len(set(lengths)) == 1 else seen[:, None, None, shared:],
        )
    assert found.shape == expected.shape
    assert found.dtype == kind
    assert mx.allclose(found, expected, atol=1e-5 if kind == mx.float32 else 5e-3).item()


def test_whose_kv_begins_alike_are_kin(model: LoadedModel) -> None:
    other = [3, *STEM[1:]]
    seats = seated(
        sequence(model, STEM, [1] * 70),
        sequence(model, STEM, [1] * 70 + [2]),
        sequence(model, STEM, [2]),
        sequence(model, other, [1]),
        sequence(model, other, [2]),
        sequence(model, STEM[:-1], [2]),
    )
    families = [seat.group for seat in seats]
    assert families[0] is families[1] is families[2]
    assert families[3] is families[4] is not families[0]
    assert families[5] not in families[:5]
    # The first is compared with nobody, and says how much there is to agree with.
    whole = (len(STEM) + 70) // STEP_TOKENS * STEP_TOKENS
    assert [seat.shared_tokens for seat in seats[:5]] == [
        whole,
        whole,
        len(STEM),
        len(STEM),
        len(STEM),
    ]


def test_one_bit_somewhere_makes_no_kin(model: LoadedModel) -> None:
    for layer in range(len(model.make_cache())):
        for part in ("keys", "values"):
            one, two = sequence(model, STEM), sequence(model, STEM)
            held = getattr(two.cache[layer], part)
            held[0, 0, 17, 0] = held[0, 0, 17, 0] * 1.0000002
            first, second = seated(one, two)
            assert first.group is not second.group


def test_what_is_rolled_back_and_written_anew_is_alike_no_more(model: LoadedModel) -> None:
    one, two = sequence(model, STEM), sequence(model, STEM)
    seats = seated(one, two)
    assert [seat.shared_tokens for seat in seats] == [len(STEM), len(STEM)]
    assert two.trim(10)
    two.verify([1, 2, 3])
    assert two.seat is seats[1]
    assert [run.shared for run in runs(seats, shares_from=1)] == [len(STEM) - 10]


def test_who_moves_takes_its_kin_along_and_finds_more(model: LoadedModel) -> None:
    assignment = PlaceAssignment((300, 400, 1000))
    assignment.shares_from = 1
    states = [sequence(model, STEM, [at] * 20) for at in range(4)]
    halves = states[:2], states[2:]
    for rows in halves:
        assignment.arrange(rows)
    one, two = ({row.seat.group for row in rows if row.seat} for rows in halves)
    assert len(one) == len(two) == 1
    assert one != two  # nobody has compared them
    while states[0].length < 300:
        for rows in halves:
            launch_together(model, rows, [1] * 2, assignment)
            for row in rows:
                row.collect()
    assignment.arrange(states)
    seats = [row.seat for row in states if row.seat]
    assert len({seat.slab for seat in seats}) == 1
    assert len({seat.group for seat in seats}) == 1
    assert [run.shared for run in runs(seats, shares_from=1)] == [len(STEM)]


def test_kin_select_what_they_would_alone(model: LoadedModel) -> None:
    def states() -> list[MlxVerifier]:
        return [sequence(model, STEM, [at] * (3 * at + 1)) for at in range(4)]

    taken = []
    for least in (None, 1):
        assignment, rows = PlaceAssignment(), states()
        assignment.shares_from = least
        launch_together(model, rows, [7] * 4, assignment)
        for _ in range(20):
            launch_together(model, rows, [None] * 4, assignment)
            taken.append([row.collect() for row in rows])
        seats = [row.seat for row in rows if row.seat]
        assert [run.shared for run in runs(seats, shares_from=least)] == [len(STEM) if least else 0]
    assert taken[:20] == taken[20:]


def test_families_beside_each_other_attend_each_to_their_own(model: LoadedModel) -> None:
    def states() -> list[MlxVerifier]:
        stems = (STEM, STEM, None, [3, *STEM[1:]], [3, *STEM[1:]])
        tails = ([1], [1, 2, 3], [5] * 300, [2] * 90, [4] * 60)
        both = zip(stems, tails, strict=True)
        return [sequence(model, *([stem] if stem else []), tail) for stem, tail in both]

    together = states()
    seats = seated(*together)
    found = runs(seats, shares_from=1)
    assert [(run.start, run.end, run.shared) for run in found] == [
        (0, 2, len(STEM)),
        (2, 3, 0),
        (3, 5, len(STEM)),
    ]
    row = mx.array([7, 8, 9, 10, 11], dtype=mx.int32)
    logits = forward_together(model, together, row)
    for at, state in enumerate(states()):
        assert mx.allclose(logits[at], state.step(row[at : at + 1])[0], atol=1e-4).item()


@pytest.mark.parametrize("window", [None, 1, 4, 8, 9, 100])
@pytest.mark.parametrize("shared", [0, 5])
def test_each_row_sees_its_window(window: int | None, shared: int) -> None:
    """Rows of a group too: behind a window no row sees the shared prefix."""
    lengths = [5, 8, 7]
    mx.random.seed(1)
    keys, values = (mx.random.normal((4, 2, 16, 8)) for _ in range(2))
    for row in (2, 3):
        keys[row, :, :shared] = keys[1, :, :shared]
        values[row, :, :shared] = values[1, :, :shared]
    queries = mx.random.normal((3, 4, 1, 8))
    stretch = Stretch(1, RowRun(0, 3, shared), lengths, mx.array(lengths))
    slab = LayerSlab(keys, values)
    found = stretch.attend(scaled_dot_product_attention, queries, slab, 0.3, window, None)
    for row, length in enumerate(lengths):
        held = (part[row + 1 : row + 2, :, : length + 1] for part in (keys, values))
        mask = create_causal_mask(1, length, window_size=window)
        alone = mx.fast.scaled_dot_product_attention(
            queries[row : row + 1], *held, scale=0.3, mask=mask
        )
        assert mx.allclose(found[row : row + 1], alone, atol=1e-5).item()


class Comparisons:
    """How often a slab went to compare, counted where it calls for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        patch.setattr("kakeya.mlx.batch.slabs.compare", self._compare)

    def _compare(self, *given: Any) -> None:
        self.count += 1
        compare(*given)


def test_a_compared_sequence_costs_no_further_look(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = Comparisons(monkeypatch)
    assignment = PlaceAssignment()
    assignment.shares_from = 1
    states = [sequence(model, STEM, [at]) for at in range(3)]
    for _ in range(3):
        assignment.arrange(states[:2])
    assert comparisons.count == 1
    assignment.arrange(states)
    seats = [state.seat for state in states if state.seat]
    assert comparisons.count == 2
    assert len({seat.group for seat in seats}) == 1
    assert all(seat.is_compared for seat in seats)


def test_who_is_too_short_is_compared_once_it_is_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = Comparisons(monkeypatch)
    assignment = PlaceAssignment((400,))
    assignment.shares_from = 1
    states = [sequence(model, STEM[:-2]) for _ in range(2)]
    for token in STEM[-2:]:
        launch_together(model, states, [token] * 2, assignment)
        for state in states:
            state.collect()
        assert not comparisons.count
    one, two = states
    assignment.arrange(states)
    assert comparisons.count == 1
    assert one.seat
    assert two.seat
    assert one.seat.group is two.seat.group is not None


def test_where_none_may_share_none_is_compared(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = Comparisons(monkeypatch)
    states = [sequence(model, STEM) for _ in range(2)]
    PlaceAssignment().arrange(states)
    assert all(state.seat and not state.seat.is_compared for state in states)
    assert not comparisons.count


def attending(patch: pytest.MonkeyPatch, change: Callable[[mx.array], mx.array]) -> list[int]:
    """Read a shared prefix as it is, and then changed; returns the size of it, call by call."""
    shares: list[int] = []

    def changed(*given: Any, shared: int, **named: Any) -> mx.array:
        shares.append(shared)
        return change(attend(*given, shared=shared, **named))

    patch.setattr("kakeya.mlx.batch.cache.attend_shared", changed)
    return shares


def test_the_probe_allows_it_where_it_gives_the_same(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares = attending(monkeypatch, lambda found: found)
    with mx.stream(mx.cpu):  # elsewhere time decides too
        assert shares_from(model) == SHARES_FROM
    assert set(shares) == {SHARES_FROM}
    assert not caplog.records


@pytest.mark.parametrize(
    "change", [lambda found: found + 1, lambda found: -found, lambda found: found * mx.nan]
)
def test_the_probe_forbids_it_where_it_gives_anything_else(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, change: Callable[[mx.array], mx.array]
) -> None:
    shares = attending(monkeypatch, change)
    assert shares_from(model) is None
    assert shares


def test_the_probe_forbids_it_where_it_fails_and_says_why(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(found: mx.array) -> mx.array:
        raise ValueError(f"no kernel for {found.ndim} axes")

    attending(monkeypatch, fail)
    assert shares_from(model) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert vars(record)["kakeya_fields"] == {
        "model": "llama",
        "reason": "ValueError('no kernel for 4 axes')",
    }


def test_a_context_too_short_to_share_in_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load(str(write_model(tmp_path / "llama", "llama")), "llama")
    assert small.context_tokens < 2 * SHARES_FROM
    shares = attending(monkeypatch, lambda found: found)
    assert shares_from(small) is None
    assert not shares
