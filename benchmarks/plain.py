"""Models in the process of a benchmark: ours, and as mlx-lm lays it out. Preload the BLAS first."""

from __future__ import annotations

from unittest.mock import patch

import mlx.nn as nn

from kakeya.decoding.control.controller import DraftController
from kakeya.mlx import loader
from kakeya.mlx.model import MlxModel


def known_model(folder: str) -> MlxModel:
    """A model after all that its engine does while it is idle."""
    model = MlxModel(loader.load(folder, "bench"), 0.0, True)
    for _ in model.chores():
        pass
    return model


def known_costs(model: MlxModel) -> DraftController:
    """A controller that begins with the measured costs of a model, if the machine was quiet."""
    controller = DraftController()
    if model.facts.forward_costs_s:
        controller.seed_costs(model.facts.forward_costs_s)
    return controller


def plain_network(folder: str) -> nn.Module:
    """Load a folder's weights, and leave them and the rotations as they are."""
    with patch.object(loader, "is_openblas", return_value=False):
        return loader.load(folder, "baseline").network
