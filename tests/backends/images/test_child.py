"""An image worker as a real process: it draws, is cancelled, is killed, dies, and is never left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kakeya.backends.images import child
from kakeya.backends.images.child import ImageWorker
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError, LoadFailed, MemoryRefused, PeerError, PeerUnavailable
from kakeya.core.process import resident_bytes
from kakeya.generation.image import ImageRequest
from tests.backends.images.scripted_worker import png_size
from tests.waiting import until

SCRIPTED = "tests.backends.images.scripted_worker"


def command(folder: Path) -> Callable[[Path], Sequence[str]]:
    def on_socket(socket: Path) -> Sequence[str]:
        program = (sys.executable, "-m", SCRIPTED)
        return (*program, "--socket", str(socket), "--model", str(folder), "--model-id", "fox")

    return on_socket


@asynccontextmanager
async def worker(
    folder: Path, sockets: Path, on_end: Callable[[], None] = lambda: None
) -> AsyncIterator[ImageWorker]:
    found = await ImageWorker.start(
        "fox", command(folder), sockets=sockets, timeout_s=60, clock=SystemClock(), on_end=on_end
    )
    try:
        yield found
    finally:
        await found.aclose()
        assert resident_bytes(found.pid) is None
        assert [*sockets.iterdir()] == []


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[float, str]] = []
        self.begun = asyncio.Event()

    def __call__(self, share: float, phrase: str) -> None:
        self.said.append((share, phrase))
        self.begun.set()


async def begun(drawing: ImageWorker, prompt: str) -> asyncio.Task[object]:
    """A request that has made its first step."""
    heard = Heard()
    task = asyncio.create_task(drawing.draw(ImageRequest(prompt=prompt, seed=1), heard))
    await asyncio.wait_for(heard.begun.wait(), 60)
    return task


async def test_it_draws_images_of_seeds_in_order_and_says_how_far_it_is(
    tmp_path: Path, short_path: Path
) -> None:
    async with worker(tmp_path, short_path) as drawing:
        heard = Heard()
        request = ImageRequest(prompt="a fox", seed=7, count=2, size=(40, 24), steps=2)
        first, second = await drawing.draw(request, heard)
        assert [(one.seed, png_size(one.png)) for one in (first, second)] == [
            (7, (40, 24)),
            (8, (40, 24)),
        ]
        assert b"a fox 7" in first.png
        assert b"a fox 8" in second.png
        assert heard.said == [
            (0.25, "step 1 of 2 of image 1 of 2"),
            (0.5, "step 2 of 2 of image 1 of 2"),
            (0.75, "step 1 of 2 of image 2 of 2"),
            (1.0, "step 2 of 2 of image 2 of 2"),
        ]
        (usual,) = await drawing.draw(ImageRequest(prompt="a cat", seed=1), heard)
        assert png_size(usual.png) == (64, 64)
        assert heard.said[-1] == (1.0, "step 3 of 3")


async def test_a_cancelled_request_ends_at_a_step_and_the_worker_draws_on(
    tmp_path: Path, short_path: Path
) -> None:
    async with worker(tmp_path, short_path) as drawing:
        for _ in range(2):
            task = await begun(drawing, "slow")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        (image,) = await drawing.draw(ImageRequest(prompt="a fox", seed=1), Heard())
        assert b"a fox 1" in image.png
        assert drawing.end == ""


async def test_a_worker_that_does_not_stop_is_killed(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "CANCEL_S", 0.1)
    ended = asyncio.Event()
    async with worker(tmp_path, short_path, ended.set) as drawing:
        task = await begun(drawing, "hang")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 60)
        assert "SIGKILL" in drawing.end
        assert "did not stop a request that was cancelled" in drawing.end


async def test_a_request_of_a_worker_that_dies_is_told_so(tmp_path: Path, short_path: Path) -> None:
    ended = asyncio.Event()
    async with worker(tmp_path, short_path, ended.set) as drawing:
        with pytest.raises(PeerUnavailable, match=r"draws with fox ended \(exit code 7") as lost:
            await drawing.draw(ImageRequest(prompt="die", seed=1), Heard())
        assert lost.value.retry_after_s == 1.0
        assert ended.is_set()
        with pytest.raises(PeerUnavailable):
            await drawing.draw(ImageRequest(prompt="a fox", seed=1), Heard())


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("short", MemoryRefused, "fox: out of memory for 9 GB; ask for a smaller image"),
        ("fault", PeerError, "fox: half of a pixel"),
    ],
)
async def test_a_fault_is_the_requests_and_the_next_one_is_drawn(
    tmp_path: Path, short_path: Path, prompt: str, error: type[PeerError], says: str
) -> None:
    async with worker(tmp_path, short_path) as drawing:
        with pytest.raises(error) as raised:
            await drawing.draw(ImageRequest(prompt=prompt, seed=1), Heard())
        assert raised.value.message == says
        await drawing.draw(ImageRequest(prompt="a fox", seed=1), Heard())


async def test_what_the_pipeline_prints_is_no_frame_and_a_large_image_is_one(
    tmp_path: Path, short_path: Path
) -> None:
    async with worker(tmp_path, short_path) as drawing:
        await drawing.draw(ImageRequest(prompt="flood", seed=1), Heard())
        (image,) = await drawing.draw(ImageRequest(prompt="large", seed=1), Heard())
        assert len(image.png) == 64 << 20


@pytest.mark.parametrize(
    ("file", "says"), [("broken", "its weights are broken"), ("dies", "no memory for it")]
)
async def test_a_failed_load_says_why_and_leaves_nothing(
    tmp_path: Path, short_path: Path, file: str, says: str
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(LoadFailed, match=f"fox could not be loaded: .*{says}"):
        async with worker(tmp_path, short_path):
            pass
    assert [*short_path.iterdir()] == []


async def test_a_program_that_never_connects_or_does_not_exist_is_refused(
    short_path: Path,
) -> None:
    async def start(*program: str, timeout_s: float = 60) -> ImageWorker:
        return await ImageWorker.start(
            "fox", lambda _: program, sockets=short_path, timeout_s=timeout_s, clock=SystemClock()
        )

    with pytest.raises(LoadFailed, match=r"fox did not load within 0\.2 s"):
        await start(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=0.2)
    with pytest.raises(LoadFailed, match="exit code 3"):
        await start("sh", "-c", "exit 3")
    with pytest.raises(ConfigError, match="cannot be run"):
        await start("/no/such/program")
    assert [*short_path.iterdir()] == []


async def test_a_cancelled_load_leaves_nothing(tmp_path: Path, short_path: Path) -> None:
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    starting = asyncio.create_task(
        ImageWorker.start(
            "fox", lambda _: sleeper, sockets=short_path, timeout_s=60, clock=SystemClock()
        )
    )
    await until(lambda: [*short_path.iterdir()])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [*short_path.iterdir()] == []


async def test_a_request_that_was_cancelled_stays_so_where_its_worker_is_killed_for_its_memory(
    tmp_path: Path, short_path: Path
) -> None:
    async with worker(tmp_path, short_path) as drawing:
        task = await begun(drawing, "hang")
        task.cancel()
        await asyncio.sleep(0)
        drawing.kill("grew to 9 GiB")
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(MemoryRefused, match="it grew to 9 GiB; ask for a smaller image"):
            await drawing.draw(ImageRequest(prompt="a fox", seed=1), lambda *_: None)
