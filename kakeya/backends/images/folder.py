"""The folder of a diffusers pipeline: which family it is, by its `model_index.json`."""

from __future__ import annotations

import json
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.generation.image import PipelineKind
from kakeya.generation.spec import PIPELINE_FILE

CLASS_NAMES = {
    "StableDiffusionXLPipeline": PipelineKind.SDXL,
    "FluxPipeline": PipelineKind.FLUX,
    "StableDiffusion3Pipeline": PipelineKind.SD3,
}
"""The family of a pipeline by the class that its folder names."""
_MOST_BYTES = 1_000_000


def pipeline_kind(folder: Path) -> PipelineKind:
    """Find the family of the pipeline in a folder. Blocks. Raises ConfigError."""
    path = folder / PIPELINE_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, too many for an index")
        index = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from None
    named = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(named, str) or named not in CLASS_NAMES:
        raise ConfigError(
            f"{path} names the pipeline {str(named)[:80]!r}; this node draws with "
            f"{', '.join(CLASS_NAMES)}"
        )
    return CLASS_NAMES[named]
