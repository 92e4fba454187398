"""An engine, or a rank, that checks nothing and does nothing between requests, to measure several
on few cores; its threads stay in the class of their process."""

from __future__ import annotations

from collections.abc import Generator

from kakeya.node import engine_main

if __name__ == "__main__":
    from kakeya.mlx.numerics.blas import preload_blas

    preload_blas(1)  # before mlx is imported, or prompts take ten times as long
    from kakeya.mlx import model
    from kakeya.mlx.findings import Sharing

    def unchecked(_: object) -> Generator[None, None, Sharing]:
        yield
        return Sharing(turns_reason="each sequence runs alone here")

    model.sharing_check = unchecked  # type: ignore[attr-defined]
    model.MlxModel.chores = lambda self: iter(())  # type: ignore[method-assign]
    engine_main.compute_in_bulk = lambda: False  # type: ignore[attr-defined]
    engine_main.main()
