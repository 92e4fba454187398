"""A child process that asks whether mlx computes a batch of two as it computes each row alone.

Batched decoding rests on it, and an mlx release once broke it. Prints one JSON object. The agent
never imports mlx, so this runs apart from it: `python -m kakeya.mlx.selftest FOLDER`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from kakeya.mlx.imports import import_without_tokenizers
from kakeya.mlx.numerics.blas import preload_blas

if TYPE_CHECKING:
    import mlx.core as mx

    from kakeya.mlx.loader import LoadedModel

_PROMPT_TOKENS = 24
_STEPS = 8


def main(folder: str) -> None:
    """Run the test on the model in a folder and print the result."""
    has_blas = preload_blas(1)
    import_without_tokenizers()
    import mlx.core as mx

    from kakeya.mlx.loader import load
    from kakeya.mlx.numerics.bits import ROUNDING, share_off

    model = load(folder, "selftest")
    vocab_size = model.vocab_size()
    rows = [
        [(7919 * place + 131 * row) % vocab_size for place in range(_PROMPT_TOKENS)]
        for row in range(2)
    ]
    alone = [_decode(model, [row]) for row in rows]
    chosen = mx.concatenate([tokens for _, tokens in alone])
    together, _ = _decode(model, rows, chosen)
    off = share_off(together, mx.concatenate([logits for logits, _ in alone]))
    result = {
        "mlx": version("mlx"),
        "device": str(mx.default_device().type).removeprefix("DeviceType."),
        "blas": has_blas,
        "share_off": off,
        "is_same": off <= ROUNDING,
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _decode(
    model: LoadedModel, rows: list[list[int]], chosen: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Read the prompts, then go on with the chosen tokens; with None, greedily.

    Shapes: B prompts, chosen [B, steps] -> logits [B, steps + 1, V] f32, chosen. Both ways are
    compared on the same tokens: rounding decides between two that are nearly equally likely.
    """
    import mlx.core as mx

    cache = model.make_cache()
    logits = model.forward(mx.array(rows), cache)[:, -1]
    found = [logits]
    taken = []
    for step in range(_STEPS):
        tokens = mx.argmax(logits, axis=-1) if chosen is None else chosen[:, step]
        taken.append(tokens)
        logits = model.forward(tokens[:, None], cache)[:, -1]
        found.append(logits)
    return mx.stack(found, axis=1).astype(mx.float32), mx.stack(taken, axis=1)


if __name__ == "__main__":
    main(sys.argv[1])
