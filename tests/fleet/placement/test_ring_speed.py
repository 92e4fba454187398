"""Predicted speeds: what a better link, a faster node and a smaller share change."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.placement.ring_speed import RingCable, RingSpeed, alone, of_pipeline, of_tensor
from tests.fleet.placement.test_ring_plan import model, node
from tests.laws import law

RTTS = st.floats(1e-6, 0.1)
RATES = st.floats(1e5, 1e10)
SPEEDS = st.floats(1e8, 1e12)


def both(ranks: int, cable: RingCable, speed: float) -> list[RingSpeed]:
    nodes = [node(f"mini-{number}", weights_per_s=speed) for number in range(ranks)]
    around = [cable] * ranks
    layers = [12 // ranks] * ranks
    return [of_tensor(model(), nodes, around), of_pipeline(model(), nodes, layers, around)]


@given(st.sampled_from([2, 3, 6]), RTTS, RATES, SPEEDS, st.floats(1, 10))
@law(1800)
def test_a_better_link_or_node_makes_no_group_slower(
    ranks: int, rtt_s: float, rate: float, speed: float, better: float
) -> None:
    cable = RingCable(a="a", b="b", rtt_s=rtt_s, bytes_per_s=rate)
    before = both(ranks, cable, speed)
    for after in (
        both(ranks, replace(cable, rtt_s=rtt_s / better), speed),
        both(ranks, replace(cable, bytes_per_s=rate * better), speed),
        both(ranks, cable, speed * better),
    ):
        for one, other in zip(before, after, strict=True):
            # Sums of floats in the same order only differ where a term does.
            assert other.tokens_per_second >= one.tokens_per_second
            assert other.prefill_tokens_per_second >= one.prefill_tokens_per_second


@given(st.sampled_from([2, 3, 6]), RTTS, RATES, SPEEDS)
@law(1800)
def test_a_pipeline_is_never_faster_than_one_node_and_no_split_gains_more_than_its_ranks(
    ranks: int, rtt_s: float, rate: float, speed: float
) -> None:
    cable = RingCable(a="a", b="b", rtt_s=rtt_s, bytes_per_s=rate)
    one = alone(model(), node(weights_per_s=speed)).tokens_per_second
    tensor, pipeline = both(ranks, cable, speed)
    assert pipeline.tokens_per_second < one
    assert tensor.tokens_per_second < ranks * one
