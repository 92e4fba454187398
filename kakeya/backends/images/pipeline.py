"""A diffusers pipeline in memory. Of the package only this module imports torch; a worker does.

    kind    loader                       half precision on a GPU
    sdxl    StableDiffusionXLPipeline    float16; the pipeline decodes in float32 where it must
    flux    FluxPipeline                 bfloat16: its activations exceed float16
    sd3     StableDiffusion3Pipeline     bfloat16

On a CPU all computes in float32. Weights are read from safetensors files of the folder alone: the
hub is not asked, and no pickle is opened.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from kakeya.backends.images.folder import pipeline_kind
from kakeya.generation.image import PipelineKind

_LOADERS = {
    PipelineKind.SDXL: diffusers.StableDiffusionXLPipeline,
    PipelineKind.FLUX: diffusers.FluxPipeline,
    PipelineKind.SD3: diffusers.StableDiffusion3Pipeline,
}
_HALF = {
    PipelineKind.SDXL: torch.float16,
    PipelineKind.FLUX: torch.bfloat16,
    PipelineKind.SD3: torch.bfloat16,
}
_DISTILLED_STEPS = 4
"""Of a FLUX model without a guidance embedding: it was distilled to draw in so many steps."""


class Pipeline:
    """A loaded pipeline. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        """Load the pipeline of a folder. Blocks. Raises ConfigError, and what diffusers raises."""
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        kind = pipeline_kind(folder)
        self.device = "mps" if torch.backends.mps.is_available() else "cpu"
        dtype = torch.float32 if self.device == "cpu" else _HALF[kind]
        self.dtype = str(dtype).removeprefix("torch.")
        self._pipe: Any = _LOADERS[kind].from_pretrained(
            folder,
            dtype=dtype,
            variant=_variant(folder),
            use_safetensors=True,
            local_files_only=True,
        )
        self._pipe.to(self.device)
        self._pipe.set_progress_bar_config(disable=True)
        # Bounds the decoder's memory by one tile of the size that it was trained on.
        self._pipe.vae.enable_tiling()
        is_flux = kind is PipelineKind.FLUX
        is_distilled = is_flux and not self._pipe.transformer.config.guidance_embeds
        self._usual_steps = {"num_inference_steps": _DISTILLED_STEPS} if is_distilled else {}

    def draw(
        self,
        prompt: str,
        seed: int,
        size: tuple[int, int] | None,
        steps: int | None,
        on_step: Callable[[int, int], None],
    ) -> bytes:
        """Draw an image; returns a PNG file. `on_step` hears how many of how many steps are done;
        what it raises ends the work."""

        def stepped(pipe: Any, at: int, _: object, state: dict[str, object]) -> dict[str, object]:  # noqa: ANN401 - diffusers has no types
            on_step(at + 1, pipe.num_timesteps)
            return state

        wish = {"num_inference_steps": steps} if steps else self._usual_steps
        if size:
            wish = {**wish, "width": size[0], "height": size[1]}
        drawn = self._pipe(
            prompt,
            # Drawn on the CPU, the noise of a seed is the same on all devices.
            generator=torch.Generator("cpu").manual_seed(seed),
            callback_on_step_end=stepped,
            **wish,
        )
        file = io.BytesIO()
        drawn.images[0].save(file, "PNG")
        return file.getvalue()


def _variant(folder: Path) -> str | None:
    """The name of the files' variant, where they are only there in half precision."""
    names = [path.name for path in folder.rglob("*.safetensors")]
    return "fp16" if names and all(".fp16." in name for name in names) else None
