"""The contract of images: what is asked of a model that draws, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kakeya.core.errors import InvalidArgument
from kakeya.generation.facts import ModelState
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitTeller

Tell = Callable[[float, str], None]
"""Hears how far an image is: a share from 0 to 1, and a phrase such as "step 3 of 20"."""
MOST_IMAGES = 10
MOST_STEPS = 150
LEAST_SIDE, MOST_SIDE = 64, 2048
MOST_PIXELS = 2 * 1024 * 1024
"""OpenAI's largest size, 1792x1024, has fewer."""


class PipelineKind(StrEnum):
    """The families of pipelines that a node draws with."""

    SDXL = "sdxl"
    FLUX = "flux"
    SD3 = "sd3"

    @property
    def size_step(self) -> int:
        """The sides of an image are multiples of it: latents are an eighth, and transformers take
        them in patches of two."""
        return 8 if self is PipelineKind.SDXL else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """Images to be drawn, one after the other, from `seed`, `seed` + 1, ...

    `size` is (width, height) in pixels. None = the pipeline's usual size, or number of steps.
    `stay_warm_s` are seconds for which the model stays warm afterwards, at least.
    """

    prompt: str
    seed: int
    count: int = 1
    size: tuple[int, int] | None = None
    steps: int | None = None
    priority: GenerationPriority = GenerationPriority.NORMAL
    stay_warm_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnImage:
    """An image as the bytes of a PNG file, and the seed that draws it again."""

    png: bytes
    seed: int


class ImageModel(Protocol):
    """A model that draws images from text, in memory or not."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        ...

    @property
    def kind(self) -> PipelineKind | None:
        """The family of its pipeline; None = only its node knows it."""
        ...

    @property
    def state(self) -> ModelState:
        """State of the model."""
        ...

    @property
    def last_error(self) -> str:
        """Why the model is FAILED, in one sentence; "" otherwise."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What its owner says of it at this moment."""
        ...

    def waits_for(self) -> RequestWait | None:
        """For what a request waits before the model draws: its load, or its place in line for
        memory; None = nothing."""
        ...

    async def draw(
        self, request: ImageRequest, tell: Tell, wait: WaitTeller | None = None
    ) -> tuple[DrawnImage, ...]:
        """Draw the images of a request; `tell` hears of each step, and `wait` tells until the first
        one for what the request waits. Cancelling it stops the work at the end of a step.

        The model is loaded if needed. Raises PeerUnavailable if its process dies, PeerError for a
        fault in the pipeline, MemoryRefused where the process has no room for so large an image,
        QueueFull, and the memory arbiter's errors.
        """
        ...


def is_drawable(width: int, height: int) -> bool:
    """Whether some pipeline draws images of this size."""
    is_side = all(LEAST_SIDE <= one <= MOST_SIDE and one % 8 == 0 for one in (width, height))
    return is_side and width * height <= MOST_PIXELS


def check_size(size: tuple[int, int] | None, model: ImageModel) -> None:
    """Raise InvalidArgument for a size that a model's pipeline does not draw, where it is known."""
    if size is None or model.kind is None:
        return
    step = model.kind.size_step
    if any(side % step for side in size):
        raise InvalidArgument(
            f"size is {size[0]}x{size[1]}; {model.model_id} draws with {model.kind}, where both "
            f"sides must be multiples of {step}",
            param="size",
        )
