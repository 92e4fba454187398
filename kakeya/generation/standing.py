"""The state of a draft-only model, as the front doors report it."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.generation.facts import ModelState


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelState:
    """State of a draft-only model."""

    model_id: str
    state: ModelState
    last_error: str = ""
