"""What a card says of a model on the disk of its node, which does not offer to run it now."""

from __future__ import annotations

from typing import NamedTuple

from kakeya.core.ids import ModelId

MAX_ON_DISK, MAX_NAME_BYTES = 16, 64


class DiskModel(NamedTuple):
    """A model that a node gives to others, with the bytes of its files."""

    model_id: ModelId
    bytes: int
