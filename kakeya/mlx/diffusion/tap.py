"""Hidden states of a verifier for a drafter: tapped, projected by the drafter's weights, kept.

A network of mlx-lm runs through a list of layers; while the tap is open, some of them tell their
outputs. The rows of one sequence are kept until another part of the engine takes them, as many as a
drafter reads. Rows that were computed together with those of other sequences, or elsewhere, are
missed: rows that follow a gap begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kakeya.adapters.files.base import base_fingerprint
from kakeya.core.errors import ConfigError
from kakeya.decoding.draft.states import HiddenStates
from kakeya.mlx.diffusion.network import joined, read_network

_MOST_PARTS = 64
"""Arrays that the rows of one text lie in; more are made one."""


class LayerTap:
    """The tap on some layers of a network. Raises ConfigError for one without these layers."""

    def __init__(self, network: nn.Module, layers: Sequence[int]) -> None:
        held = getattr(getattr(network, "model", None), "layers", None)
        count = len(held) if isinstance(held, list) else 0
        if max(layers) >= count:
            raise ConfigError(
                f"hidden states of the layers {list(layers)} are asked for, and the model has "
                f"{count} layers that can be tapped"
            )
        self._held: list[Any] = held or []
        self._layers = tuple(layers)

    @contextmanager
    def open(self) -> Iterator[list[mx.array]]:
        """Forwards within append the output [B, L, H] of each tapped layer; one at a time."""
        taken: list[mx.array] = []
        whole = list(self._held)
        for place in self._layers:
            self._held[place] = _Tapped(whole[place], taken)
        try:
            yield taken
        finally:
            self._held[:] = whole


class StateTap(LayerTap):
    """The tap on one verifier for the drafter in a folder, which is served as `drafter_id`.

    Raises ConfigError where either is of another kind.
    """

    def __init__(self, network: nn.Module, drafter_id: str, folder: Path) -> None:
        whole = read_network(folder)
        config = whole.config
        super().__init__(network, config.verifier_layers)
        self.drafter_id = drafter_id
        self.fingerprint = base_fingerprint(folder)
        self.width = config.hidden_size
        self.most_rows = 2 * config.window_tokens
        self._project = whole.states
        mx.eval(self._project.parameters())
        self._wide = config.verifier_hidden_size

    def project(self, outputs: list[mx.array]) -> mx.array:
        """What travels of the outputs of one forward, unread. Shape: [B, L, width] float16.

        Raises ConfigError where a layer's output is of another form.
        """
        for output in outputs:
            if getattr(output, "ndim", 0) != 3 or output.shape[-1] != self._wide:
                raise ConfigError(
                    f"a layer of the model gave {getattr(output, 'shape', type(output).__name__)}; "
                    f"{self.drafter_id} reads hidden states [B, L, {self._wide}]"
                )
        projected: mx.array = self._project(joined(outputs)).astype(mx.float16)
        return projected


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


class StateRows:
    """The projected rows of one sequence, of the tokens from `first` on, without a gap."""

    def __init__(self, tap: StateTap) -> None:
        self._tap = tap
        self._parts: list[mx.array] = []
        self.first = self.end = 0

    def add(self, at: int, rows: mx.array) -> None:
        """Take those of tokens from `at` on, in place of any that were there. Shape: [L, width]."""
        self.cut(at)
        if at != self.end or not self._parts:
            self._parts, self.first = [], at
        self._parts.append(rows)
        self.end = at + int(rows.shape[0])
        mx.async_eval(rows)  # type: ignore[no-untyped-call] # else it keeps its whole graph
        if len(self._parts) > _MOST_PARTS:
            self._parts = [mx.concatenate(self._parts)[-self._tap.most_rows :]]
            self.first = self.end - int(self._parts[0].shape[0])

    def cut(self, length: int) -> None:
        """Drop those of tokens from `length` on."""
        while self._parts and self.end > length:
            newest = self._parts.pop()
            begin = self.end - int(newest.shape[0])
            self.end = max(begin, length)
            if self.end > begin:
                self._parts.append(newest[: self.end - begin])

    def read(self, first: int, end: int) -> HiddenStates | None:
        """Those of the tokens `first` to `end` that there are, at most as many as a drafter reads.

        None where there are none.
        """
        end = min(end, self.end)
        first = max(first, self.first, end - self._tap.most_rows)
        if first >= end or not self._parts:
            return None
        rows = mx.concatenate(self._parts)[first - self.first : end - self.first]
        return HiddenStates(
            drafter=self._tap.fingerprint,
            first=first,
            width=self._tap.width,
            data=np.array(rows).astype("<f2", copy=False).tobytes(),
        )
