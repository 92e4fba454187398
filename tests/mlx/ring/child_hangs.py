"""An engine that, as a follower of a ring group, hangs so many calls behind the first piece of a
prompt with a text, and beats on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from kakeya.node.engine_main import main

if __name__ == "__main__":
    number, text = int(sys.argv.pop(1)), sys.argv.pop(1)

    from kakeya.mlx.numerics.blas import preload_blas

    preload_blas(1)
    from kakeya.mlx.ring.follower import FollowerModel

    repeat, left = FollowerModel.repeat, [number]

    def hanging(model: FollowerModel, call: Sequence[object]) -> None:
        if left[0] < number or text in str(call):
            left[0] -= 1
        if left[0] <= 0:
            threading.Event().wait()
        repeat(model, call)

    FollowerModel.repeat = hanging  # type: ignore[method-assign]
    main()
