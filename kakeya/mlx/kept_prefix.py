"""The KV of a text that grows, and sometimes takes another turn: what two texts share is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.verifier import MlxVerifier


class KeptPrefix:
    """One text; `tokens` are those with KV. Belongs to the model thread."""

    def __init__(self, model: LoadedModel, prefill_chunk_tokens: int) -> None:
        self._model = model
        self._chunk = prefill_chunk_tokens
        self.state = MlxVerifier(model)
        self.tokens: list[int] = []

    def follow(self, wanted: Sequence[int]) -> None:
        """Hold the KV of all but the last token of `wanted`, which is not empty.

        Where the state cannot be rolled back that far, it is computed anew.
        """
        wanted = list(wanted)
        shared = min(shared_head(self.tokens, wanted), len(wanted) - 1)
        with self.changing():
            if not self.state.trim(self.state.length - min(shared, self.state.length)):
                self.forget()
            for start in range(self.state.length, len(wanted) - 1, self._chunk):
                self.state.prefill(wanted[start : min(start + self._chunk, len(wanted) - 1)])
        self.tokens = wanted[:-1]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Forget all KV where work on it is broken off: which of it is whole cannot be told."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Hold no KV."""
        sampling = self.state.sampling
        self.state, self.tokens = MlxVerifier(self._model), []
        self.state.select_with(sampling)


def shared_head(held: list[int], wanted: list[int]) -> int:
    """How many leading tokens two lists share; a growing prefix is one slice comparison."""
    size = min(len(held), len(wanted))
    if held[:size] == wanted[:size]:
        return size
    low, high = 0, size
    while low + 1 < high:
        middle = (low + high) // 2
        if held[:middle] == wanted[:middle]:
            low = middle
        else:
            high = middle
    return low
