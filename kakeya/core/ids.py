"""Ids as distinct types, and a random source of new ones."""

from __future__ import annotations

import random
from typing import NewType

NodeId = NewType("NodeId", str)
ModelId = NewType("ModelId", str)
SessionId = NewType("SessionId", str)

NGRAM: ModelId = ModelId("ngram")
"""Reserved on the wire for the model-free prompt-lookup proposer."""
BLOCK_DIFFUSION = "kakeya_block_diffusion"
"""`model_type` in the config.json of a drafter that fills blocks of masks."""
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
"""`model_type` of the models that make embeddings."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def draw_id(prefix: str, rng: random.Random, length: int = 12) -> str:
    """Draw `prefix-xxxxxxxxxxxx` without letters that are easily confused."""
    return prefix + "-" + "".join(rng.choice(_ALPHABET) for _ in range(length))
