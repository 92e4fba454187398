"""A tap on the layers of a network of mlx-lm: their outputs in the forwards made under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kakeya.core.errors import ConfigError


class LayerTap:
    """Takes outputs of some layers. Raises ConfigError for a network without these layers.

    The networks of mlx-lm (llama, qwen3 and their kin) run through a list of layers, each called
    with the rows [B, L, H] first, which it returns in the same form.
    """

    def __init__(self, network: nn.Module, layers: Sequence[int], hidden_size: int) -> None:
        inner = getattr(network, "model", None)
        held = getattr(inner, "layers", None)
        if not isinstance(held, list) or not all(0 <= place < len(held) for place in layers):
            count = len(held) if isinstance(held, list) else 0
            raise ConfigError(
                f"hidden states of the layers {list(layers)} are wanted, and "
                f"{type(network).__module__} has {count} layers that can be tapped"
            )
        self._held: list[Any] = held
        self._layers = tuple(layers)
        self._hidden_size = hidden_size

    @contextmanager
    def open(self) -> Iterator[list[mx.array]]:
        """Forwards within append the output [B, L, H] of each layer, in the order of `layers`.

        One forward at a time. Raises ConfigError afterwards where an output has another form.
        """
        taken: list[mx.array] = []
        whole = list(self._held)
        for place in self._layers:
            self._held[place] = _Tapped(whole[place], taken)
        try:
            yield taken
        finally:
            self._held[:] = whole
        for output in taken:
            if getattr(output, "ndim", 0) != 3 or output.shape[-1] != self._hidden_size:
                raise ConfigError(
                    f"a tapped layer gave {getattr(output, 'shape', type(output).__name__)}, "
                    f"hidden states are [B, L, {self._hidden_size}]"
                )


class _Tapped:
    """Stands in the place of a layer during a forward."""

    def __init__(self, layer: nn.Module, taken: list[mx.array]) -> None:
        self._layer = layer
        self._taken = taken

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the layer takes them
        output = self._layer(*given, **named)
        self._taken.append(output)
        return output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._layer, name)
