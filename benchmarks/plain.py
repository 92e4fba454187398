"""A network as mlx-lm lays it out, for baselines in our process. Preload the BLAS first."""

from __future__ import annotations

from unittest.mock import patch

import mlx.nn as nn

from kakeya.mlx import loader


def plain_network(folder: str) -> nn.Module:
    """Load a folder's weights, and leave them and the rotations as they are."""
    with patch.object(loader, "is_openblas", return_value=False):
        return loader.load(folder, "baseline").network
