"""An engine that, as a follower of a ring group, hangs in its call of that number, and beats on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from kakeya.node.engine_main import main

if __name__ == "__main__":
    number = int(sys.argv.pop(1))

    from kakeya.mlx.numerics.blas import preload_blas

    preload_blas(1)
    from kakeya.mlx.ring.follower import FollowerModel

    repeat, left = FollowerModel.repeat, [number]

    def hanging(model: FollowerModel, call: Sequence[object]) -> None:
        left[0] -= 1
        if left[0] <= 0:
            threading.Event().wait()
        repeat(model, call)

    FollowerModel.repeat = hanging  # type: ignore[method-assign]
    main()
