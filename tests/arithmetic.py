"""Marks for tests that depend on the library under mlx's products."""

from __future__ import annotations

import sys
from typing import TypeVar

import pytest

from kakeya.mlx.numerics.blas import blas_name

_Test = TypeVar("_Test")
IS_PLAYED_MAC = "tests.as_mac.mac" in sys.modules


def own_arithmetic(test: _Test) -> _Test:
    """Mark a test that compares bits of products computed in ways that hold for mlx's own library.

    Where OpenBLAS is below mlx (see `conftest.py`) it is skipped; `scripts/test` runs it without.
    """
    is_other = IS_PLAYED_MAC or (sys.platform == "linux" and bool(blas_name()))
    reason = "the products are OpenBLAS's, which takes another way for other numbers of rows"
    return pytest.mark.own_arithmetic(pytest.mark.skipif(is_other, reason=reason)(test))
