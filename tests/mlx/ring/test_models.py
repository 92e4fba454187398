"""The agent's lists of what can be shared over ranks are those of the installed mlx-lm."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx_lm.models
from mlx_lm.utils import MODEL_REMAPPING

from kakeya.fleet.placement.ring_models import PIPELINE, TENSOR


def test_the_lists_are_those_of_mlx_lm() -> None:
    tensor, pipeline = set(), set()
    for path in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        classes = {
            one.name: one
            for one in ast.parse(path.read_text()).body
            if isinstance(one, ast.ClassDef)
        }
        if "Model" not in classes:
            continue
        network = classes["Model"]
        if any(isinstance(one, ast.FunctionDef) and one.name == "shard" for one in network.body):
            tensor.add(path.stem)
        body = next(
            (
                one.value.func.id
                for one in ast.walk(network)
                if isinstance(one, ast.Assign)
                and ast.unparse(one.targets[0]) == "self.model"
                and isinstance(one.value, ast.Call)
                and isinstance(one.value.func, ast.Name)
            ),
            "",
        )
        bases = [ast.unparse(base) for base in classes[body].bases] if body in classes else []
        if "PipelineMixin" in bases:
            pipeline.add(path.stem)
    aliases = MODEL_REMAPPING.items()
    assert tensor | {one for one, other in aliases if other in tensor} == TENSOR
    assert pipeline | {one for one, other in aliases if other in pipeline} == PIPELINE
