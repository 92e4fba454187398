"""A rank's share of a network: refusals before anything is loaded, and one selection for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from kakeya.core.errors import ConfigError, InvariantBroken
from kakeya.decoding.processors.edits import LogitEdit
from kakeya.decoding.processors.processors import LogitProcessors
from kakeya.fleet.placement.ring import RingSplit
from kakeya.generation.request import Sampling
from kakeya.mlx.loader import load, read_network
from kakeya.mlx.ring.share import RingShare
from kakeya.mlx.verifier import MlxVerifier
from tests.mlx.random_models import QWEN3_MOE, write_model


class Ranks:
    """A group of that size, in which nothing is sent."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def share(ranks: int, split: RingSplit, layers: Sequence[int] = ()) -> RingShare:
    return RingShare(cast("mx.distributed.Group", Ranks(ranks)), split, layers)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "refused"),
    [
        (9, 3, 2, "9 attention heads, which 2 ranks cannot share equally: .* takes 3 ranks"),
        (9, 3, 4, "9 attention heads"),
        (8, 2, 4, "2 KV heads, which 4 ranks cannot share equally: .* takes 2 ranks"),
        (7, 1, 2, "7 attention heads, .*: no number of ranks can"),
    ],
)
def test_heads_are_shared_equally_or_not_at_all(
    tmp_path: Path, heads: int, kv_heads: int, ranks: int, refused: str
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    network, config = read_network(write_model(tmp_path / "m", "llama", changes=shape))
    with pytest.raises(ConfigError, match=refused):
        share(ranks, RingSplit.TENSOR).take(network, config)


@pytest.mark.parametrize("layers", [(1, 2), (2,), (0, 4), (1, 1, 2)])
def test_layers_of_a_pipeline_are_all_layers(tmp_path: Path, layers: tuple[int, ...]) -> None:
    model = write_model(tmp_path / "m", "qwen3", changes=QWEN3_MOE)
    network, config = read_network(model)
    with pytest.raises(ConfigError, match="cannot be split over 2 ranks"):
        share(2, RingSplit.PIPELINE, layers).take(network, config)


class Counted(RingShare):
    """Agrees with no other rank, and counts."""

    def __init__(self) -> None:
        super().__init__(cast("mx.distributed.Group", Ranks(1)), RingSplit.TENSOR)
        self.agreements = 0

    def take(self, network: nn.Module, config: Mapping[str, Any]) -> None:
        """All of it."""

    def agreed(self, selected: mx.array) -> mx.array:
        self.agreements += 1
        return selected


class Refusing:
    def edits(self, ahead: Sequence[int]) -> list[LogitEdit]:
        raise InvariantBroken("grammar", "nothing may follow")


def test_a_rank_that_refuses_a_selection_takes_part_in_it(tmp_path: Path) -> None:
    """The other ranks wait for it: they know no processors."""
    ring = Counted()
    model = load(str(write_model(tmp_path / "m", "llama")), "m", ring=ring)
    state = MlxVerifier(model)
    state.prefill([3, 4, 5])
    assert ring.agreements == 0
    state.launch(6)
    state.collect()
    state.verify([7, 8])
    assert ring.agreements == 2
    state.select_with(Sampling(), cast("LogitProcessors", Refusing()))
    for refused in (lambda: state.launch(9), lambda: state.verify([9, 10])):
        before = ring.agreements
        with pytest.raises(InvariantBroken):
            refused()
        assert ring.agreements == before + 1
