"""The layout of weights that is faster follows from the OpenBLAS below mlx."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from kakeya.mlx.numerics import blas

_SAID = "OpenBLAS {} NO_LAPACKE DYNAMIC_ARCH NO_AFFINITY {} MAX_THREADS=64, {} threads"


@pytest.mark.parametrize(
    ("name", "is_faster"),
    [
        (_SAID.format("0.3.21", "SkylakeX", 1), True),
        (_SAID.format("0.3.29.dev", "SapphireRapids", 1), True),
        (_SAID.format("0.3.21", "SkylakeX", 2), False),
        (_SAID.format("0.3.13", "SkylakeX", 1), False),
        (_SAID.format("0.3.21", "Haswell", 1), False),
        (_SAID.format("0.3.21", "Zen", 1), False),
        ("Accelerate", False),
        ("", False),
    ],
)
def test_strips_are_for_kernels_that_copy_nothing(name: str, is_faster: bool) -> None:
    with patch.object(blas, "blas_name", return_value=name):
        assert blas.is_strip_faster() == is_faster
