"""A rank of a ring group that repeats the calls of rank 0 on its own share of the model and of KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kakeya.core.errors import PeerProtocol
from kakeya.engine.model import PromptForward
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier


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
        states, forwards = self._states, self._forwards
        match call:
            case ["launch", at, token]:
                states[at].launch(token)
            case ["launch_together", members, tokens]:
                self._model.launch_together([states[at] for at in members], tokens)
            case ["collect", at]:
                states[at].collect()
            case ["verify", at, tokens]:
                states[at].verify(tokens)
            case ["trim", at, count]:
                states[at].trim(count)
            case ["prefill", at, tokens]:
                states[at].prefill(tokens)
            case ["begin", at, members, pieces, parts]:
                rows = [states[member] for member in members]
                forwards[at] = self._model.begin_prompts(rows, pieces, parts)
            case ["advance", at]:
                forwards[at].advance()
            case ["leave", at, member]:
                forwards[at].leave(states[member])
            case ["open", at]:
                states[at] = self._model.open()
            case ["pretend", at, length]:
                states[at].pretend(length)
            case ["drop", at]:
                states.pop(cast("int", at), None)
                forwards.pop(cast("int", at), None)
            case ["tidy"]:
                self._model.tidy()
            case _:
                raise PeerProtocol(f"rank 0 asks for {str(call)[:80]}, which no rank can do")
