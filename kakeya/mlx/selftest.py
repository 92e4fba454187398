"""A child process that asks whether mlx computes a batch of two as it computes each row alone.

Batched decoding rests on it, and an mlx release once broke it. Prints one JSON object. The agent
never imports mlx, so this runs apart from it: `python -m kakeya.mlx.selftest FOLDER`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from kakeya.mlx.numerics.blas import preload_blas

if TYPE_CHECKING:
    import mlx.core as mx

    from kakeya.mlx.loader import LoadedModel

_PROMPT_TOKENS = 24
_STEPS = 8


def main(folder: str) -> None:
    """Run the test on the model in a folder and print the result."""
    has_blas = preload_blas(1)
    import mlx.core as mx

    from kakeya.mlx.loader import load

    model = load(folder, "selftest")
    vocab_size = int(model.forward(mx.array([[0]]), model.make_cache()).shape[-1])
    rows = [
        [(7919 * place + 131 * row) % vocab_size for place in range(_PROMPT_TOKENS)]
        for row in range(2)
    ]
    together = _decode(model, rows)
    alone = mx.concatenate([_decode(model, [row]) for row in rows])
    result = {
        "mlx": version("mlx"),
        "device": str(mx.default_device().type).removeprefix("DeviceType."),
        "blas": has_blas,
        "same_tokens": bool(mx.all(mx.argmax(together, -1) == mx.argmax(alone, -1)).item()),
        "difference": mx.abs(together - alone).max().item(),
        "scale": mx.abs(alone).max().item(),
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _decode(model: LoadedModel, rows: list[list[int]]) -> mx.array:
    """Read the prompts, then go on greedily. Shapes: B prompts -> logits [B, steps, V] f32."""
    import mlx.core as mx

    cache = model.make_cache()
    logits = model.forward(mx.array(rows), cache)[:, -1]
    found = [logits]
    for _ in range(_STEPS):
        logits = model.forward(mx.argmax(logits, axis=-1)[:, None], cache)[:, -1]
        found.append(logits)
    return mx.stack(found, axis=1).astype(mx.float32)


if __name__ == "__main__":
    main(sys.argv[1])
