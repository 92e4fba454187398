"""Marks for tests that depend on the library under mlx's products."""

from __future__ import annotations

import sys

import pytest

own_arithmetic = pytest.mark.skipif(
    "tests.as_mac.mac" in sys.modules,
    reason="the products of a played Mac are OpenBLAS's, which no Mac has",
)
"""Of tests that compare bits of products computed in ways that are chosen for the library."""
