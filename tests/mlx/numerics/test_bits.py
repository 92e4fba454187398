"""How far apart two ways to compute the same logits may be."""

from __future__ import annotations

import mlx.core as mx

from kakeya.mlx.numerics.bits import ROUNDING, share_off


def test_rounding_in_sixteen_bits_stays_below_the_limit_and_a_wrong_row_does_not() -> None:
    mx.random.seed(3)
    logits = 13.0 * mx.random.normal((2, 4096))
    rounded = logits.astype(mx.float16).astype(mx.float32)
    assert 0 < share_off(rounded, logits) <= ROUNDING
    assert share_off(logits[::-1], logits) > ROUNDING


def test_no_number_is_no_rounding() -> None:
    logits = mx.array([[1.0, 2.0]])
    assert not share_off(logits * float("nan"), logits) <= ROUNDING
