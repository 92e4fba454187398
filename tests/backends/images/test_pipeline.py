"""Real pipelines of each family, with a few thousand random parameters, in real workers.

They need the extra `images`, which the usual environment of the tests does not have.
"""

from __future__ import annotations

import asyncio
import io
from importlib.util import find_spec
from pathlib import Path

import pytest

from kakeya.backends.engines import engine_command
from kakeya.backends.images.child import ImageWorker
from kakeya.backends.images.folder import pipeline_kind
from kakeya.core.clock import SystemClock
from kakeya.core.process import resident_bytes
from kakeya.generation.image import DrawnImage, ImageRequest, PipelineKind
from kakeya.generation.spec import ModelRole, parse_model, resolve
from kakeya.memory.estimate.pipeline import estimate_pipeline
from tests.backends.images.scripted_worker import png_size

MISSING = [name for name in ("torch", "diffusers") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} missing: pip install 'kakeya[images]'"
)
SIZE = (64, 48)


@pytest.fixture(scope="module", params=PipelineKind)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of each family, built and saved."""
    from tests.backends.images.tiny_pipelines import save

    made: Path = tmp_path_factory.mktemp(request.param) / "tiny"
    save(request.param, made)
    return made


async def test_it_draws_and_the_same_seed_draws_the_same(folder: Path, short_path: Path) -> None:
    from PIL import Image

    spec = await asyncio.to_thread(parse_model, str(folder))
    assert spec.role is ModelRole.DIFFUSION
    command = engine_command("text")(spec, await asyncio.to_thread(resolve, spec))
    said: list[str] = []
    drawing = await ImageWorker.start(
        "tiny", command, sockets=short_path, timeout_s=300, clock=SystemClock()
    )
    try:

        async def draw(seed: int, count: int = 1) -> tuple[DrawnImage, ...]:
            request = ImageRequest(prompt="a fox", seed=seed, count=count, size=SIZE, steps=3)
            return await drawing.draw(request, lambda _, phrase: said.append(phrase))

        (one,) = await draw(7)
        assert png_size(one.png) == SIZE
        assert said == [f"step {step} of 3" for step in (1, 2, 3)]
        picture = Image.open(io.BytesIO(one.png)).convert("RGB")
        assert len(picture.getcolors(1 << 20)) > 100, "noise has many colours"
        again, other = await draw(7, count=2)
        assert again.png == one.png
        assert other.png != one.png
        (usual,) = await drawing.draw(
            ImageRequest(prompt="a fox", seed=1, steps=1), lambda *_: None
        )
        assert min(png_size(usual.png)) >= 16

        task = asyncio.create_task(
            drawing.draw(
                ImageRequest(prompt="a fox", seed=1, size=SIZE, steps=150),
                lambda _, phrase: said.append(phrase),
            )
        )
        while "step 1 of 150" not in said:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "step 150 of 150" not in said
        assert (await draw(7))[0].png == one.png
        footprint = await asyncio.to_thread(resident_bytes, drawing.pid)
        estimate = await asyncio.to_thread(estimate_pipeline, folder, widens=True)
        assert footprint is not None
        assert 0.5 < estimate.bytes / footprint < 2
    finally:
        await drawing.aclose()
    assert resident_bytes(drawing.pid) is None


def test_the_estimate_counts_every_weight_once_and_names_the_pipeline(folder: Path) -> None:
    from tests.backends.images.tiny_pipelines import parameters

    plain = estimate_pipeline(folder, widens=True)
    assert plain.weights_bytes == 4 * parameters(folder)
    assert estimate_pipeline(folder, widens=False).weights_bytes == 2 * parameters(folder)
    assert plain.digest == estimate_pipeline(folder, widens=False).digest
    assert not plain.problem
    assert pipeline_kind(folder) in PipelineKind
