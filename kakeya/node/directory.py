"""The models that this node decodes with, by name."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import NotFound
from kakeya.runtime.generation import ServedModel


class Models:
    """Finds verifiers; the first one is the default."""

    def __init__(self, verifiers: Sequence[ServedModel]) -> None:
        self._verifiers = tuple(verifiers)

    def get(self, model_id: str) -> ServedModel:
        """Find a model that decodes; "" is the default. Raises NotFound naming the served ids."""
        for model in self._verifiers:
            if model_id in ("", model.model_id):
                return model
        if not self._verifiers:
            raise NotFound("this node decodes with no model; start one with --model ID_OR_PATH")
        served = ", ".join(model.model_id for model in self._verifiers)
        raise NotFound(f"model {model_id!r} is not served here; this node serves {served}")

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        return self._verifiers
