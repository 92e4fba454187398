"""One rank's share of a network, by mlx-lm's own means, and what ranks agree on in a forward.

    tensor     every layer, and of each the same share of heads and of features
    pipeline   some layers: rank 0 has the last ones, so the order of ranks is that of the text's
               way back; each rank has the embedding and the output layer

The token that a forward selects is rank 0's for all ranks, agreed on within the graph of the step,
so that steps stay in a pipeline. Ranks with logits that differ in a bit thus never part, and only
rank 0 samples, edits logits or knows a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.pipeline import PipelineMixin

from kakeya.core.errors import ConfigError
from kakeya.fleet.placement.ring import RingSplit


class RingShare:
    """The place of this process in a group."""

    def __init__(
        self, group: mx.distributed.Group, split: RingSplit, layers: Sequence[int] = ()
    ) -> None:
        """`layers` of each rank of a pipeline, from rank 0 on; () = about equally many."""
        self.group = group
        self.split = split
        self._layers = list(layers)

    @property
    def rank(self) -> int:
        """From 0."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return int(self.group.size())

    def take(self, network: nn.Module, config: Mapping[str, Any]) -> None:
        """Leave of a network what this rank computes; weights that are not read yet stay so.

        Raises ConfigError where the network cannot be split so.
        """
        try:
            if self.split is RingSplit.TENSOR:
                self._shard(network, config)
            else:
                self._pipeline(network)
        except ValueError as refusal:
            raise ConfigError(f"the model cannot be split over {self.size} ranks: {refusal}") from (
                refusal
            )

    def agreed(self, selected: mx.array) -> mx.array:
        """Rank 0's selection, at all ranks. Shape: [L] int32."""
        own = selected if self.rank == 0 else selected * 0
        return mx.distributed.all_sum(own, group=self.group)

    def _shard(self, network: nn.Module, config: Mapping[str, Any]) -> None:
        shard = getattr(network, "shard", None)
        kind = config.get("model_type")
        if shard is None:
            raise ConfigError(
                f"mlx-lm has no tensor split of {kind!r} models; "
                + (
                    "a pipeline is possible: --ring pipeline"
                    if isinstance(getattr(network, "model", None), PipelineMixin)
                    else "it has no pipeline of them either"
                )
            )
        heads = _heads(config)
        for name, count in heads.items():
            if count % self.size:
                raise ConfigError(
                    f"{kind!r} has {count} {name}, which {self.size} ranks cannot share equally: "
                    f"{_possible(list(heads.values()))}"
                )
        shard(self.group)

    def _pipeline(self, network: nn.Module) -> None:
        body = getattr(network, "model", None)
        if not isinstance(body, PipelineMixin):
            raise ConfigError(
                f"mlx-lm has no pipeline of {type(network).__module__.rpartition('.')[2]!r} "
                "models; a tensor split may be possible: --ring tensor"
            )
        body.pipeline(self.group, split=self._layers or None)


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    queries = int(config["num_attention_heads"])
    return {
        "attention heads": queries,
        "KV heads": int(config.get("num_key_value_heads") or queries),
    }


def _possible(counts: Sequence[int]) -> str:
    found = [n for n in range(2, min(counts) + 1) if not any(each % n for each in counts)]
    if not found:
        return "no number of ranks can"
    return f"a tensor split takes {' or '.join(map(str, found))} ranks"
