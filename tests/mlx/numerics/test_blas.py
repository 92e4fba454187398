"""The layout of weights that is faster follows from the OpenBLAS below mlx."""

from __future__ import annotations

import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("weights", "cores", "threads"),
    [(3_700_000, 8, 1), (134_000_000, 8, 7), (134_000_000, 2, 1), (134_000_000, 1, 1)],
)
def test_a_large_model_gets_all_cores_but_one(weights: int, cores: int, threads: int) -> None:
    assert blas.threads_for(weights, cores) == threads


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("", 4)],
)
@pytest.mark.skipif(sys.platform != "linux", reason="control groups and affinity are Linux's")
def test_a_control_group_bounds_the_cores(quota: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    with patch("os.sched_getaffinity", return_value=set(range(4))):
        assert blas.usable_cores(tmp_path / "cpu.max") == expected
        assert blas.usable_cores(tmp_path / "none") == 4
