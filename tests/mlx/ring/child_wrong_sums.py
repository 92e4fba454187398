"""An engine of which rank 1 of a ring group has sums that are off behind the first piece of each
prompt, as a faulty link may give them: `FAULT` is times=F, noise=S, lost=SHARE or own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kakeya.node.engine_main import main

if __name__ == "__main__":
    kind, _, size = sys.argv.pop(1).partition("=")
    is_16_bit = os.environ.get("WEIGHTS") == "16 bit"

    from kakeya.mlx.numerics.blas import preload_blas

    preload_blas(1)
    import mlx.core as mx

    import kakeya.mlx.loader
    from kakeya.mlx.ring.follower import FollowerModel

    if is_16_bit:  # as on a GPU: a CPU widens them
        kakeya.mlx.loader._to_float32 = lambda _: None  # type: ignore[attr-defined]
    summed, repeat, pieces = mx.distributed.all_sum, FollowerModel.repeat, [0]

    def wrong(x: mx.array, **more: object) -> mx.array:
        whole = summed(x, **more)
        if pieces[0] < 2 or not mx.issubdtype(x.dtype, mx.floating):
            return whole
        match kind:
            case "times":
                return whole * float(size)
            case "noise":
                spread = mx.std(whole) * float(size)
                return whole + (mx.random.normal(x.shape) * spread).astype(x.dtype)
            case "lost" | "own":  # the sum is made all the same: the other rank waits for it
                kept = int(x.shape[-1] * (1 - float(size or 1)))
                return mx.where(mx.arange(x.shape[-1]) < kept, whole, x)
            case _:
                return whole

    def counted(model: FollowerModel, call: Sequence[object]) -> None:
        pieces[0] += call[0] in ("prefill", "begin")
        repeat(model, call)

    mx.distributed.all_sum = wrong
    FollowerModel.repeat = counted  # type: ignore[method-assign]
    main()
