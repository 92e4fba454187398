"""POST /v1/images/generations: OpenAI's client, refusals that name the field, jobs, kept images."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument, NotFound, PeerUnavailable
from kakeya.gateway.openai.image_store import KEEP_S, ImageStore
from kakeya.gateway.openai.images import parse_images
from kakeya.generation.facts import ModelState
from kakeya.generation.image import DrawnImage, ImageRequest, PipelineKind, Tell
from kakeya.generation.manifest import NO_MANIFEST
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import WaitTeller
from tests.backends.images.scripted_worker import png, png_size
from tests.fakes import FakeClock
from tests.gateway.toy import ToyModel, make_folder, no_jobs, serving
from tests.waiting import until

PATH = "/v1/images/generations"


@dataclass
class ToyPainter:
    """Draws grey; `lasts` seconds."""

    model_id: str = "painter"
    kind: PipelineKind = PipelineKind.SDXL
    lasts: float = 0.0
    fails: Exception | None = None
    state: ModelState = ModelState.UNLOADED
    last_error: str = ""
    asked: list[ImageRequest] = field(default_factory=list)
    manifest = NO_MANIFEST

    def __post_init__(self) -> None:
        self.cancelled = asyncio.Event()

    def waits_for(self) -> None:
        return None

    async def draw(
        self, request: ImageRequest, tell: Tell, wait: WaitTeller | None = None
    ) -> tuple[DrawnImage, ...]:
        self.asked.append(request)
        if self.fails:
            raise self.fails
        tell(0.5, "step 1 of 2")
        try:
            await asyncio.sleep(self.lasts)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        seeds = range(request.seed, request.seed + request.count)
        return tuple(
            DrawnImage(png=png(*(request.size or (64, 64)), b"%d" % seed), seed=seed)
            for seed in seeds
        )


async def test_openais_client_gets_images_and_their_addresses() -> None:
    painter = ToyPainter()
    async with serving(images=[painter]) as served:
        made = await served.openai.images.generate(
            model="painter",
            prompt="a fox",
            n=2,
            size="1024x1536",
            response_format="b64_json",
            user="me",
            extra_body={"seed": 7, "num_inference_steps": 4, "x_priority": "high"},
        )
        (request,) = painter.asked
        assert (request.prompt, request.seed, request.count) == ("a fox", 7, 2)
        assert (request.size, request.steps) == ((1024, 1536), 4)
        assert request.priority is GenerationPriority.HIGH
        files = [base64.b64decode(one.b64_json or "") for one in made.data or ()]
        assert [png_size(file) for file in files] == [(1024, 1536)] * 2
        assert made.size == "1024x1536"
        again = await served.openai.images.generate(prompt="a fox")
        assert painter.asked[-1].size is None
        (one,) = again.data or ()
        assert one.url is not None
        assert one.url.startswith(f"http://127.0.0.1:{served.port}/v1/images/img-")
        shown = await served.http.get(one.url)
        assert shown.headers["content-type"] == "image/png"
        assert png_size(shown.content) == (64, 64)
        lost = await served.http.get("/v1/images/img-guessed.png")
        assert lost.status_code == 404
        assert "60 minutes" in lost.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"size": "1000x1001"}, "size"),
        ({"size": "1024"}, "size"),
        ({"size": "32x32"}, "size"),
        ({"size": "2048x2048"}, "size"),
        ({"size": "9999999999x64"}, "size"),
        ({"size": 1024}, "size"),
        ({"response_format": "jpeg"}, "response_format"),
        ({"seed": -1}, "seed"),
        ({"num_inference_steps": 151}, "num_inference_steps"),
        ({"background": "transparent"}, "background"),
        ({"background": 1}, "background"),
        ({"background": True, "response_format": "url"}, "response_format"),
        ({"output_format": "webp"}, "output_format"),
        ({"stream": True}, "stream"),
        ({"guidance": 3}, "guidance"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        parse_images({"prompt": "a fox", **fields})
    assert wrong.value.param == param
    assert param in wrong.value.message


@pytest.mark.parametrize("background", [None, False, "auto", "opaque"])
def test_what_openais_clients_say_of_what_is_drawn_anyway_is_taken(background: object) -> None:
    body = {"prompt": "a fox", "background": background, "output_format": "png", "stream": False}
    asked = parse_images({**body, "quality": "auto", "moderation": "auto", "size": "auto"})
    assert not asked.is_background
    assert asked.size is None


async def test_the_sides_are_multiples_of_what_the_pipeline_draws() -> None:
    painters = [ToyPainter(), ToyPainter("flux", PipelineKind.FLUX)]
    async with serving(images=painters) as served:
        body = {"prompt": "a fox", "size": "1032x1024"}
        assert (await served.http.post(PATH, json={**body, "model": "painter"})).status_code == 200
        refused = await served.http.post(PATH, json={**body, "model": "flux"})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "size"
        assert "multiples of 16" in error["message"]


async def test_a_client_that_leaves_cancels_its_image() -> None:
    painter = ToyPainter(lasts=60)
    async with serving(images=[painter]) as served:
        asking = asyncio.create_task(served.http.post(PATH, json={"prompt": "a fox"}))
        while not painter.asked:
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.wait_for(painter.cancelled.wait(), 60)


async def test_an_image_in_the_background_is_a_job_with_its_progress_and_result() -> None:
    painter, slow = ToyPainter(), ToyPainter("slow", lasts=60)
    async with serving(images=[painter, slow]) as served:
        body = {"prompt": "a fox", "background": True, "n": 2, "size": "64x64"}
        taken = await served.http.post(PATH, json=body)
        assert taken.status_code == 202
        at = taken.headers["location"]
        job = (await served.http.get(at, params={"wait_s": 30})).json()
        assert (job["state"], job["kind"]) == ("done", "image")
        data = job["result"]["data"]
        assert [png_size(base64.b64decode(one["b64_json"])) for one in data] == [(64, 64)] * 2
        assert data[1]["seed"] == data[0]["seed"] + 1 == painter.asked[0].seed + 1
        taken = await served.http.post(PATH, json={**body, "model": "slow"})
        at = taken.headers["location"]
        while (job := (await served.http.get(at)).json())["progress"]["phrase"] != "step 1 of 2":
            assert job["state"] in ("queued", "running")
            await asyncio.sleep(0.01)
        assert job["progress"]["share"] == 0.5
        await served.http.post(at + "/cancel")
        await asyncio.wait_for(slow.cancelled.wait(), 60)


async def test_a_kept_job_waits_for_the_node_of_its_model_which_is_not_heard_of_yet() -> None:
    jobs = no_jobs()
    async with serving(jobs=jobs) as served:
        asked = {"model": "painter", "prompt": "a fox", "seed": 1, "count": 1, "size": None}
        more = {"steps": None, "priority": GenerationPriority.NORMAL, "stay_warm_s": 0.0}
        job = jobs.submit("image", asked | more, owner="me")
        await until(lambda: jobs.find(job.job_id, "me").phrase)
        job = jobs.find(job.job_id, "me")
        assert (job.state, job.phrase) == ("queued", "it waits: no image model painter")
        assert served.port


async def test_errors_of_the_model_are_typed_and_an_unknown_one_is_not_found() -> None:
    gone = PeerUnavailable("the process that draws ended", retry_after_s=1.0)
    async with serving(images=[ToyPainter(fails=gone)]) as served:
        failed = await served.http.post(PATH, json={"prompt": "a fox"})
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        unknown = await served.http.post(PATH, json={"prompt": "a fox", "model": "paint"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"


async def test_models_that_draw_are_listed_with_their_kind(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(make_folder, tmp_path)
    async with serving(ToyModel(folder), images=[ToyPainter()]) as served:
        listed = (await served.http.get("/v1/models")).json()["data"]
        one = next(entry for entry in listed if entry["id"] == "painter")
        assert (one["kind"], one["pipeline"], one["state"]) == ("image", "sdxl", "unloaded")
        assert one["modalities"]["output"] == ["image"]
        assert (await served.http.get("/v1/models/painter")).json() == one
    async with serving(images=[ToyPainter()]) as served:
        ready = (await served.http.get("/readyz")).json()
        assert (ready["ready"], ready["model"]) == (True, "painter")


def test_kept_images_leave_after_an_hour_and_the_oldest_for_newer_ones() -> None:
    clock = FakeClock()
    store = ImageStore(mono=clock.mono, most_bytes=100)
    names = [store.keep(bytes(40)).split("/")[-1].removesuffix(".png") for _ in range(3)]
    assert len(set(names)) == 3
    assert store.size_bytes == 80
    with pytest.raises(NotFound):
        store.find(names[0])
    assert store.find(names[2]) == bytes(40)
    clock.advance(KEEP_S)
    with pytest.raises(NotFound):
        store.find(names[2])
    assert store.size_bytes == 0
    store.keep(bytes(101))
    assert store.size_bytes == 0
