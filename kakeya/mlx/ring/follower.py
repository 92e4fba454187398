"""A rank that repeats the calls of rank 0 on its own share of the model and of KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from kakeya.core.errors import PeerProtocol
from kakeya.engine.model import PromptForward
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier

_OF_SEQUENCES: dict[str, Callable[..., object]] = {
    "prefill": MlxVerifier.prefill,
    "launch": MlxVerifier.launch,
    "collect": MlxVerifier.collect,
    "verify": MlxVerifier.verify,
    "trim": MlxVerifier.trim,
    "pretend": MlxVerifier.pretend,
}


class FollowerModel:
    """Objects by the numbers that rank 0 gave them; belongs to the thread that loaded the model."""

    def __init__(self, model: MlxModel) -> None:
        self._model = model
        self._states: dict[int, MlxVerifier] = {}
        self._forwards: dict[int, PromptForward] = {}

    def repeat(self, call: Sequence[object]) -> None:
        """Do one call. Raises PeerProtocol for an unknown one."""
        try:
            self._repeat(list(call))
        except KeyError as unknown:
            raise PeerProtocol(f"rank 0 names {unknown} in {call[0]!r}, and gave no such") from None

    def _repeat(self, call: list[Any]) -> None:
        match call:
            case ["open", at]:
                self._states[at] = self._model.open()
            case ["begin", at, members, pieces, parts]:
                rows = [self._states[member] for member in members]
                self._forwards[at] = self._model.begin_prompts(rows, pieces, parts)
            case ["advance", at]:
                self._forwards[at].advance()
            case ["leave", at, member]:
                self._forwards[at].leave(self._states[member])
            case ["launch_together", members, tokens]:
                self._model.launch_together([self._states[at] for at in members], tokens)
            case ["drop", at]:
                self._states.pop(cast("int", at), None)
                self._forwards.pop(cast("int", at), None)
            case ["tidy"]:
                self._model.tidy()
            case [name, at, *given] if name in _OF_SEQUENCES:
                _OF_SEQUENCES[name](self._states[at], *given)
            case _:
                raise PeerProtocol(f"rank 0 asks for {str(call)[:80]}, which no rank can do")
