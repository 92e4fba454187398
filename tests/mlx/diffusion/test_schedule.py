"""The laws of the passes over a block."""

from hypothesis import given
from hypothesis import strategies as st

from kakeya.mlx.diffusion.schedule import fills, surest

SIZES = st.integers(1, 64)
LOGS = st.lists(st.floats(-50, 0), min_size=1, max_size=24)


@given(SIZES, st.integers(1, 200))
def test_passes_fill_all_masks_evenly_and_never_none(size: int, steps: int) -> None:
    counts = fills(size, steps)
    assert sum(counts) == size
    assert len(counts) == min(size, steps)
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert sorted(counts, reverse=True) == list(counts)


@given(LOGS, st.data(), st.floats(0, 10))
def test_as_many_masks_are_chosen_as_asked_and_only_masks(logs, data, lean) -> None:
    masked = data.draw(
        st.lists(st.integers(0, len(logs) - 1), unique=True, min_size=1), label="masked"
    )
    count = data.draw(st.integers(1, len(masked)), label="count")
    chosen = surest(logs, masked, count, lean)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(masked)
    assert surest(logs, masked[::-1], count, lean) == chosen
    left = set(masked) - set(chosen)
    worst = min(logs[place] - lean * place for place in chosen)
    assert all(logs[place] - lean * place <= worst for place in left)


@given(LOGS, st.data())
def test_a_strong_lean_fills_from_the_left(logs, data) -> None:
    count = data.draw(st.integers(1, len(logs)))
    assert surest(logs, list(range(len(logs))), count, 51.0) == list(range(count))


def test_equally_sure_masks_go_from_the_left() -> None:
    assert surest([-1.0] * 5, [4, 2, 0, 3, 1], 2, 0.0) == [0, 1]
