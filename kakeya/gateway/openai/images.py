"""POST /v1/images/generations: OpenAI's request and answer.

    honoured     model ("" = the first image model), prompt, n, size, response_format "url" or
                 "b64_json", user, safety_identifier
    extensions   seed; num_inference_steps; background: true makes a job of it
    taken        output_format "png", quality and moderation "auto", background "auto" or "opaque",
                 stream false: what is drawn anyway
    refused      everything else: 400, code unsupported_parameter

A `url` is a path of this node, which keeps the image for an hour. The result of a job is the answer
with the images in it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import URL
from starlette.types import Receive, Scope, Send

from kakeya.backends.request import ModelNotFound
from kakeya.core.clock import Clock
from kakeya.core.errors import NotFound, PeerUnavailable, Unsupported
from kakeya.dispatch.job import Job
from kakeya.dispatch.jobs import JobKind, JobQueue, Tell
from kakeya.gateway.coordinator_fields import CoordinatorFields, read_with_fields
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.body import refuse, text
from kakeya.gateway.http.edge import send_json
from kakeya.gateway.http.fields import (
    NoOps,
    choice_field,
    integer_field,
    is_one_of,
    refuse_unknown,
    table,
    text_field,
    value_field,
)
from kakeya.gateway.http.receipt import note_ignored
from kakeya.gateway.jobs import JOBS, job_body
from kakeya.gateway.openai.image_store import ImageStore
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.share_params import USERS, read_user, share_of
from kakeya.generation.fair_bound import FairBound
from kakeya.generation.image import (
    LEAST_SIDE,
    MOST_IMAGES,
    MOST_PIXELS,
    MOST_SIDE,
    MOST_STEPS,
    DrawnImage,
    ImageModel,
    ImageRequest,
    check_size,
    is_drawable,
)
from kakeya.generation.model import ModelDirectory
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.arbiter.capability import MAX_WAITING

KIND = "image"
MOST_PROMPT_CHARS = 32_000
_SIZE_WANTED = (
    f'"auto" or WIDTHxHEIGHT, such as "1024x1024": both multiples of 8 from {LEAST_SIDE} to '
    f"{MOST_SIDE}, and at most {MOST_PIXELS} pixels"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBody:
    """A body of POST /v1/images/generations; `seed` None = one is drawn."""

    model: str
    prompt: str
    count: int
    size: tuple[int, int] | None
    steps: int | None
    seed: int | None
    form: str
    is_background: bool
    user: str


def parse_images(body: Mapping[str, object]) -> ImageBody:
    """Read a request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, IMAGES, IMAGE_NO_OPS)
    is_background, form = _BACKGROUND.read(body), _FORM.read(body)
    if is_background and form == "url":
        raise Unsupported(
            'response_format "url" is not supported with background: true: the result of a job '
            "has its images in it; leave it out",
            param="response_format",
        )
    return ImageBody(
        model=_MODEL.read(body),
        prompt=_PROMPT.read(body),
        count=_COUNT.read(body) or 1,
        size=_SIZE.read(body),
        steps=_STEPS.read(body),
        seed=_SEED.read(body),
        form="b64_json" if is_background else form or "url",
        is_background=is_background,
        user=read_user(body),
    )


def _parse_prompt(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MOST_PROMPT_CHARS:
        refuse("prompt", value, f"a text of 1 to {MOST_PROMPT_CHARS} characters")
    return text(value, "prompt")


def _parse_size(value: object) -> tuple[int, int] | None:
    if value in (None, "auto"):
        return None
    sides = value.split("x") if isinstance(value, str) else ()
    if len(sides) != 2 or not all(side.isascii() and side.isdecimal() for side in sides):
        refuse("size", value, _SIZE_WANTED)
    width, height = (int(side[:5]) for side in sides)
    if not is_drawable(width, height):
        refuse("size", value, _SIZE_WANTED)
    return width, height


def _parse_background(value: object) -> bool:
    if value not in (None, True, False, "auto", "opaque") or type(value) in (int, float):
        refuse("background", value, 'true for a job, or false; of OpenAI\'s, "auto" or "opaque"')
    return value is True


_PROMPT = value_field(
    "prompt",
    _parse_prompt,
    {"type": "string", "minLength": 1, "maxLength": MOST_PROMPT_CHARS},
    is_required=True,
)
_MODEL = text_field("model")
_COUNT = integer_field("n", 1, MOST_IMAGES)
_SIZE = value_field(
    "size", _parse_size, {"type": "string", "pattern": r"^(auto|[1-9][0-9]{1,3}x[1-9][0-9]{1,3})$"}
)
_FORM = choice_field("response_format", ("url", "b64_json"))
_SEED = integer_field("seed", 0, 2**53 - 1)
_STEPS = integer_field("num_inference_steps", 1, MOST_STEPS)
_BACKGROUND = value_field(
    "background", _parse_background, {"enum": [True, False, "auto", "opaque"]}
)
IMAGES = table(_PROMPT, _MODEL, _COUNT, _SIZE, _FORM, _SEED, _STEPS, _BACKGROUND, *USERS)
IMAGE_NO_OPS: NoOps = {
    "output_format": is_one_of("png"),
    "quality": is_one_of("auto"),
    "moderation": is_one_of("auto"),
    "stream": is_one_of(False),
}


class ImageRoute:
    """The ASGI application behind the path, and the work of jobs that draw."""

    def __init__(
        self,
        directory: ModelDirectory,
        generations: Generations,
        jobs: JobQueue,
        store: ImageStore,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._generations = generations
        self._jobs = jobs
        self._store = store
        self._clock = clock
        self._rng = rng
        self._crowd = FairBound(1 + MAX_WAITING, clock.mono)
        jobs.add_kind(JobKind(name=KIND, run=self._work, concurrency=1))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises as `ImageModel.draw`, and ModelNotFound."""

        generations = self._generations
        asked, fields = await read_with_fields(scope, receive, generations.limits, parse_images)
        model = self._find(asked.model)
        request = self._request(model, asked, fields, scope)
        if fields.ignored:
            note_ignored(scope, fields.ignored)
        client = client_of(scope) or fields.client
        share = share_of(client, scope)
        cooldown_s = fields.cooldown_s if client else 0.0
        with generations.clients.request(share, asked.user, cooldown_s) as use:
            if asked.is_background:
                job = self._jobs.submit(KIND, _kept(model, request), owner=share)
                await self._jobs.kept()
                await send_json(send, 202, job_body(job), {"location": f"{JOBS}/{job.job_id}"})
                return

            def begun(share: float, phrase: str) -> None:
                if not use.has_begun:
                    use.begin()

            full = f"{self._crowd.total} requests for images are running, which is the limit"
            with self._crowd.member(share, asked.user, full):
                wait = WaitTeller(model.waits_for)
                async with generations.connection(receive, send, wait) as connection:
                    drawn = await model.draw(request, begun, wait)
                    base = URL(scope=scope).replace(query="")
                    show = partial(self._url, base) if asked.form == "url" else _base64
                    answer = await asyncio.to_thread(self._answer, drawn, show)
                    connection.finish()
        await send_json(send, 200, compact(answer))

    async def _work(self, job: Job, tell: Tell, wait: WaitTeller) -> object:
        """Draw for a job. Raises as `ImageModel.draw`."""
        asked = json.loads(job.request)
        try:
            model = self._find(asked.pop("model"))
        except ModelNotFound as unknown:
            # It was found when the job came: its node is away, or not heard of since the start.
            raise PeerUnavailable(unknown.message) from unknown
        size = asked.pop("size")
        request = ImageRequest(
            **asked | {"priority": GenerationPriority(asked["priority"])},
            size=None if size is None else (size[0], size[1]),
        )
        drawn = await model.draw(request, tell, wait)
        return await asyncio.to_thread(self._answer, drawn, _base64)

    def _find(self, model_id: str) -> ImageModel:
        try:
            return self._directory.image_model(model_id)
        except NotFound as unknown:
            raise ModelNotFound(unknown.message) from None

    def _request(
        self, model: ImageModel, asked: ImageBody, fields: CoordinatorFields, scope: Scope
    ) -> ImageRequest:
        check_size(asked.size, model)
        return ImageRequest(
            prompt=asked.prompt,
            seed=self._rng.getrandbits(32) if asked.seed is None else asked.seed,
            count=asked.count,
            size=asked.size,
            steps=asked.steps,
            priority=fields.urgency(scope) or GenerationPriority.NORMAL,
            stay_warm_s=fields.stay_warm_s,
        )

    def _url(self, base: URL, png: bytes) -> tuple[str, str]:
        return "url", str(base.replace(path=self._store.keep(png)))

    def _answer(
        self, drawn: Sequence[DrawnImage], show: Callable[[bytes], tuple[str, str]]
    ) -> dict[str, object]:
        width, height = struct.unpack(">2I", drawn[0].png[16:24])  # of the header of a PNG file
        return {
            "created": int(self._clock.wall()),
            "output_format": "png",
            "size": f"{width}x{height}",
            "data": [dict([show(one.png)]) | {"seed": one.seed} for one in drawn],
        }


def _base64(png: bytes) -> tuple[str, str]:
    return "b64_json", base64.b64encode(png).decode("ascii")


def _kept(model: ImageModel, request: ImageRequest) -> dict[str, object]:
    """A request as its job keeps it: with its seed, so that it draws the same again."""
    return {
        "model": model.model_id,
        "prompt": request.prompt,
        "seed": request.seed,
        "count": request.count,
        "size": request.size,
        "steps": request.steps,
        "priority": request.priority.value,
        "stay_warm_s": request.stay_warm_s,
    }
