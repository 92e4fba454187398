"""An image model in the arbiter: loaded, measured, swapped, given back, and brought back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.images.folder import CLASS_NAMES, pipeline_kind
from kakeya.backends.images.model import IMAGE
from kakeya.backends.model_life import TEXT
from kakeya.core.errors import ConfigError, LoadFailed, MemoryRefused, PeerUnavailable
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.generation.facts import ModelState
from kakeya.generation.image import ImageRequest
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.arbiter.events import EngineKilled, Evicted
from kakeya.memory.arbiter.plan import Reason
from tests.backends.images.world import FOX, IMAGE_BYTES, image_world, pipeline_folder, silent
from tests.waiting import until


async def test_the_first_request_loads_it_the_ledger_counts_it_and_unload_gives_all_back(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        assert world.image.state is ModelState.UNLOADED
        (drawn,) = await world.image.draw(FOX, silent)
        assert b"a fox 1" in drawn.png
        assert world.image.state is ModelState.READY
        resident = world.arbiter.find(IMAGE, "fox")
        pid = world.image.pid
        assert resident is not None
        assert pid is not None
        assert 45 * MIB < resident.bytes < IMAGE_BYTES  # measured: Python and what it allocates
        assert resident.warmth.stay_warm_s == 900.0
        world.arbiter.unload(IMAGE, "fox")
        await until(lambda: world.arbiter.find(IMAGE, "fox") is None)
        assert resident_bytes(pid) is None
        assert world.image.state is ModelState.UNLOADED
        assert [*short_path.iterdir()] == []


async def test_requests_take_turns_and_each_hears_of_its_own_steps(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        heard: list[tuple[int, str]] = []

        def listener(seed: int):
            return lambda _, phrase: heard.append((seed, phrase))

        drawn = await asyncio.gather(
            *(world.image.draw(replace(FOX, seed=seed), listener(seed)) for seed in (1, 2, 3))
        )
        assert [image.seed for (image,) in drawn] == [1, 2, 3]
        steps = [f"step {step} of 3" for step in (1, 2, 3)]
        assert heard == [(seed, step) for seed in (1, 2, 3) for step in steps]


async def test_the_most_urgent_request_is_drawn_next_and_the_others_say_their_places(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        drawn: list[int] = []
        waits = {seed: WaitTeller(lambda: None) for seed in (1, 2, 3)}

        async def draw(request: ImageRequest) -> None:
            await world.image.draw(request, silent, waits[request.seed])
            drawn.append(request.seed)

        holds = tmp_path / "fox" / "holds"
        holds.touch()
        first = asyncio.create_task(draw(FOX))
        await until(lambda: "loading fox" in waits[1].describe())
        await until(lambda: str(world.image.status()["at"]).startswith("step "))
        rest = [
            asyncio.create_task(draw(replace(FOX, seed=seed, priority=priority)))
            for seed, priority in ((2, GenerationPriority.BATCH), (3, GenerationPriority.URGENT))
        ]
        await until(lambda: waits[2].describe() == "2nd for a place, fox")
        assert waits[3].describe() == "1st for a place, fox"
        assert waits[1].describe() == ""
        holds.unlink()
        await asyncio.gather(first, *rest)
        assert drawn == [1, 3, 2]


async def test_a_dead_worker_fails_its_request_and_the_waiting_one_gets_another(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        dying = asyncio.create_task(world.image.draw(replace(FOX, prompt="die"), silent))
        waiting = asyncio.create_task(world.image.draw(FOX, silent))
        with pytest.raises(PeerUnavailable, match="exit code 7"):
            await dying
        (drawn,) = await waiting
        assert b"a fox 1" in drawn.png
        assert world.image.state is ModelState.READY


async def test_a_worker_that_outgrows_the_budget_is_ended_and_its_request_refused(
    tmp_path: Path, short_path: Path
) -> None:
    budget = 120 * MIB
    async with image_world(tmp_path, short_path, budget=budget) as world:
        await world.image.draw(FOX, silent)
        with pytest.raises(MemoryRefused, match=r"it grew to .*; ask for a smaller") as refused:
            await world.image.draw(replace(FOX, prompt="swell"), silent)
        assert refused.value.retry_after_s is None  # a job is not tried again
        (killed,) = world.told(EngineKilled)
        assert isinstance(killed, EngineKilled)
        assert killed.key == (IMAGE, "fox")
        assert budget < killed.bytes < 2 * budget
        (drawn,) = await world.image.draw(FOX, silent)
        assert b"a fox 1" in drawn.png


async def test_a_worker_that_outgrows_the_budget_as_it_loads_is_ended(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path, budget=120 * MIB) as world:
        (tmp_path / "fox" / "megabytes").write_text("900")
        with pytest.raises(LoadFailed, match=r"SIGKILL, sent because it grew to"):
            await world.image.draw(FOX, silent)
        assert world.residents() == {}


async def test_growth_within_the_budget_is_counted_while_it_draws(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        holds = tmp_path / "fox" / "holds"
        holds.touch()
        swelling = replace(FOX, prompt="swell", steps=2)
        drawing = asyncio.create_task(world.image.draw(swelling, silent))

        def counted() -> int:
            resident = world.arbiter.find(IMAGE, "fox")
            return 0 if resident is None else resident.bytes

        await until(lambda: counted() > 2 * IMAGE_BYTES)
        assert not drawing.done()
        holds.unlink()
        await drawing


async def test_a_worker_that_dies_idle_leaves_the_ledger_and_comes_back_on_request(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        await world.image.draw(FOX, silent)
        pid = world.image.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: world.residents() == {})
        (drawn,) = await world.image.draw(FOX, silent)
        assert b"a fox 1" in drawn.png
        assert world.image.pid not in (None, pid)


async def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_at_once(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path) as world:
        (tmp_path / "fox" / "broken").touch()
        with pytest.raises(LoadFailed, match="its weights are broken"):
            await world.image.draw(FOX, silent)
        assert world.image.state is ModelState.FAILED
        assert "its weights are broken" in world.image.last_error
        with pytest.raises(PeerUnavailable, match="its weights are broken") as paused:
            await world.image.draw(FOX, silent)
        assert 1 <= (paused.value.retry_after_s or 0) <= 30


async def test_it_is_offered_while_a_request_would_be_served(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path, budget=120 * MIB) as world:
        assert world.image.can_serve
        async with world.arbiter.acquire(TEXT, "words"):
            assert not world.image.can_serve, "it may not take the room of text"
        world.image.manifest = Manifest(may_displace_text=True)
        assert world.image.can_serve
        (tmp_path / "fox" / "broken").touch()
        with pytest.raises(LoadFailed):
            await world.image.draw(FOX, silent)
        assert not world.image.can_serve


async def test_without_leave_an_image_model_displaces_no_text_model(
    tmp_path: Path, short_path: Path
) -> None:
    async with image_world(tmp_path, short_path, budget=120 * MIB) as world:
        async with world.arbiter.acquire(TEXT, "words"):
            pass
        with pytest.raises(MemoryRefused):
            await world.image.draw(FOX, silent)
        assert world.residents() == {TEXT: "ready"}


async def test_with_leave_an_idle_text_model_yields_and_comes_back(
    tmp_path: Path, short_path: Path
) -> None:
    """S0.34: no process is killed for memory, and the ledger never promises what is not there."""
    budget = 120 * MIB
    async with image_world(tmp_path, short_path, budget=budget, may_displace_text=True) as world:
        async with world.arbiter.acquire(TEXT, "words") as handle:
            process = handle.backend
        assert isinstance(process, asyncio.subprocess.Process)
        (drawn,) = await world.image.draw(FOX, silent)
        assert b"a fox 1" in drawn.png
        assert resident_bytes(process.pid) is None
        assert world.residents() == {IMAGE: "ready"}
        (evicted,) = world.told(Evicted)
        assert isinstance(evicted, Evicted)
        assert (evicted.key.capability, evicted.reason) == (TEXT, Reason.SWAP)
        pid = world.image.pid
        assert pid is not None
        async with world.arbiter.acquire(TEXT, "words"):
            assert world.residents() == {TEXT: "ready"}
            assert resident_bytes(pid) is None
        assert world.text.loads == 2
        status = world.arbiter.status()
        assert budget - status.free_bytes == sum(one.bytes for one in status.residents)
        world.arbiter.check_integrity()


async def test_a_busy_text_model_is_not_interrupted(tmp_path: Path, short_path: Path) -> None:
    async with image_world(tmp_path, short_path, budget=120 * MIB, may_displace_text=True) as world:
        ends = asyncio.Event()
        talking = asyncio.create_task(world.arbiter.request(TEXT, "words", ends))
        await until(lambda: world.residents() == {TEXT: "ready"})
        drawing = asyncio.create_task(world.image.draw(FOX, silent))
        await until(lambda: world.residents() == {TEXT: "draining"})
        assert not talking.done()
        assert not drawing.done()
        ends.set()
        assert await talking == "said, while it was there"
        (drawn,) = await drawing
        assert b"a fox 1" in drawn.png
        assert world.residents() == {IMAGE: "ready"}


@pytest.mark.parametrize("named", CLASS_NAMES)
def test_the_family_is_that_of_the_class_in_the_folder(tmp_path: Path, named: str) -> None:
    folder = pipeline_folder(tmp_path / "fox", named)
    assert pipeline_kind(folder) is CLASS_NAMES[named]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"_class_name": "LTXPipeline"}, "names the pipeline 'LTXPipeline'; this node draws with "),
        ({"_class_name": 1}, "names the pipeline '1'"),
        ([], "names the pipeline 'None'"),
        ("{", "cannot be read"),
        (None, "No such file"),
    ],
)
def test_a_folder_of_another_family_is_refused(tmp_path: Path, index: object, says: str) -> None:
    if index is not None:
        text = index if isinstance(index, str) else json.dumps(index)
        (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        pipeline_kind(tmp_path)
