from __future__ import annotations

import numpy as np
import pytest

from kakeya.decoding.draft.acceptance import accept_block
from kakeya.decoding.draft.sampling import gumbel, noise_key, probabilities, select
from kakeya.generation.request import Sampling

LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 0.0, -3.0], dtype=np.float32)
CRITICAL_5 = 25.7  # chi-square, 5 degrees of freedom, p = 0.0001
DRAWS = 20_000


def draw(params: Sampling, count: int = DRAWS) -> np.ndarray:
    noise = np.stack([gumbel(params.seed, position, LOGITS.size) for position in range(count)])
    return np.array([select(LOGITS, params, row) for row in noise])


def chi_square(drawn: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(drawn, minlength=expected.size)
    live = expected > 0
    assert counts[~live].sum() == 0
    wanted = expected[live] * len(drawn)
    return float((((counts[live] - wanted) ** 2) / wanted).sum())


@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=1.0, seed=1),
        pytest.param(Sampling(temperature=0.6, seed=2), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.0, top_k=3, seed=3), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.3, top_p=0.8, seed=4), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.9, top_p=0.9, top_k=4, seed=5), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.2, min_p=0.3, seed=6), marks=pytest.mark.slow),
        Sampling(temperature=1.2, top_p=0.95, top_k=4, min_p=0.2, seed=7),
    ],
)
def test_draws_follow_the_models_distribution(params):
    assert chi_square(draw(params), probabilities(LOGITS, params)) < CRITICAL_5


def test_the_chi_square_notices_another_distribution():
    drawn = draw(Sampling(temperature=1.0, seed=1))
    assert chi_square(drawn, probabilities(LOGITS, Sampling(temperature=1.2))) > CRITICAL_5


def test_accepting_what_equals_the_own_sample_keeps_the_distribution():
    """A drafter that always says 3: what is emitted is still the model's, and 3 is accepted as
    often as the model says it."""
    params = Sampling(temperature=1.0, seed=11)
    own = draw(params)
    accepted = [accept_block([3], [token, 0]) for token in own.tolist()]
    emitted = np.array([3 if hit else token for hit, token in zip(accepted, own, strict=True)])
    expected = probabilities(LOGITS, params)
    assert chi_square(emitted, expected) < CRITICAL_5
    assert np.mean(accepted) == pytest.approx(expected[3], abs=0.015)


@pytest.mark.parametrize("temperature", [1e-6, 1e-29, 1e-31, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature):
    """Divided by less than a float32 can carry, every logit would be infinite or no number."""
    params = Sampling(temperature=temperature, top_k=5, top_p=0.9, seed=1)
    assert select(LOGITS, params, gumbel(1, 0, LOGITS.size)) == 3


def test_greedy_takes_the_lowest_of_equal_maxima_and_ignores_noise():
    logits = np.array([0.0, 4.0, 4.0], dtype=np.float32)
    noise = np.array([0.0, 0.0, 100.0], dtype=np.float32)
    assert select(logits, Sampling(), noise) == 1


def test_top_k_1_is_greedy():
    params = Sampling(temperature=1.0, top_k=1, seed=3)
    assert set(draw(params, 50).tolist()) == {3}


def test_a_tiny_top_p_keeps_the_most_likely_token():
    params = Sampling(temperature=1.0, top_p=1e-6, seed=3)
    assert set(draw(params, 50).tolist()) == {3}


def test_a_min_p_of_1_keeps_the_most_likely_token():
    params = Sampling(temperature=1.0, min_p=1.0, seed=3)
    assert set(draw(params, 50).tolist()) == {3}


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 0.9])
def test_min_p_keeps_tokens_by_their_part_of_the_most_likely_one(min_p):
    whole = probabilities(LOGITS, Sampling(temperature=1.5))
    kept = probabilities(LOGITS, Sampling(temperature=1.5, min_p=min_p))
    assert (kept > 0).tolist() == (whole >= min_p * whole.max()).tolist()
    assert kept.sum() == pytest.approx(1)


def test_a_key_depends_on_seed_and_position_only():
    assert noise_key(5, 9) == noise_key(5, 9)
    assert all(0 <= noise_key(seed, 3) < 2**64 for seed in (0, 1, 2**64 - 1, 2**70))


def test_keys_of_neighbours_do_not_repeat():
    keys = {noise_key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200


def test_noise_of_neighbouring_positions_and_seeds_is_uncorrelated():
    noise = np.stack([gumbel(seed, at, 64) for seed in range(20) for at in range(20)])
    correlation = np.corrcoef(noise)
    np.fill_diagonal(correlation, 0)
    assert abs(correlation.mean()) < 0.01
