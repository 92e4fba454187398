"""RelayService: the clouds and commands that this node shares, and its image models, for the other
nodes of its fleet. What it does not share is for them as if it were not here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import grpc.aio

from kakeya.backends.relay.relays import OwnRelay, Relays
from kakeya.core.errors import InvalidArgument, Refused
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.peers.relay_wire import (
    PIECE_BYTES,
    images_from_wire,
    part_to_wire,
    request_from_wire,
)
from kakeya.dispatch.peers.wire import wait_to_wire
from kakeya.generation.image import (
    MOST_IMAGES,
    MOST_STEPS,
    DrawnImage,
    ImageModel,
    ImageRequest,
    check_size,
    is_drawable,
)
from kakeya.generation.waiting import WaitTeller
from kakeya.v1 import relay_pb2 as pb
from kakeya.v1.relay_pb2_grpc import RelayServiceServicer
from kakeya.wire.beats import with_beats
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[Any, Any]


class Painters(Protocol):
    """The image models of this node alone."""

    def image_model(self, model_id: str) -> ImageModel:
        """As `ModelDirectory`."""
        ...


class RelayService(RelayServiceServicer):
    """The servicer; `clients` counts the requests of peers beside those of this node."""

    def __init__(self, relays: Relays, painters: Painters, clients: Clients) -> None:
        self._relays = relays
        self._painters = painters
        self._clients = clients
        self._draining = ""
        self.served = 0
        """Answers and drawings of peers that were begun."""

    def drain(self, reason: str) -> None:
        """Begin nothing from now on; what runs goes on."""
        self._draining = reason

    async def CheckRelayed(
        self, request: pb.RelayedRequest, context: Context
    ) -> pb.CheckRelayedResponse:
        """Tell what an answer would not follow."""
        async with errors_end(context):
            relay = self._relay(request.model_id)
            return pb.CheckRelayedResponse(ignored=await relay.check(request_from_wire(request)))
        raise AssertionError("abort returned")

    async def AnswerRelayed(  # type: ignore[override]
        self, request: pb.RelayedRequest, context: Context
    ) -> None:
        """Stream an answer, and a sign of life while there is nothing to stream."""
        async with errors_end(context):
            relay, asked = self._relay(request.model_id), request_from_wire(request)
            await relay.check(asked)
            self.served += 1
            with self._clients.request(request.client, asked.params.user) as use:
                async with aclosing(with_beats(relay.answer(asked))) as parts:
                    async for part in parts:
                        if part is None:
                            await context.write(pb.RelayedPart())
                            continue
                        use.begin()
                        for message in part_to_wire(part):
                            await context.write(message)

    async def DrawImages(  # type: ignore[override]
        self, request: pb.DrawImagesRequest, context: Context
    ) -> None:
        """Stream the steps of images and the images, and for what the request waits meanwhile."""
        async with errors_end(context):
            self._refuse_new()
            model = self._painters.image_model(request.model_id)
            asked = images_from_wire(request)
            _check(asked, model)
            wait = WaitTeller(model.waits_for)
            self.served += 1
            with self._clients.request(request.client) as use:
                async with aclosing(with_beats(_drawing(model, asked, wait))) as events:
                    async for event in events:
                        if event is None:
                            told = None if use.has_begun else wait_to_wire(wait.ask())
                            await context.write(pb.DrawImagesResponse(wait=told))
                            continue
                        use.begin()
                        for message in _messages(event):
                            await context.write(message)

    def _relay(self, model_id: str) -> OwnRelay:
        self._refuse_new()
        return self._relays.shared(model_id)

    def _refuse_new(self) -> None:
        if self._draining:
            raise Refused(f"this node takes no requests: {self._draining}")


class _Step(NamedTuple):
    share: float
    phrase: str


def _check(asked: ImageRequest, model: ImageModel) -> None:
    """Raise InvalidArgument for a request that no front door of a node makes."""
    bounds = {
        "n": (asked.count, MOST_IMAGES),
        "num_inference_steps": (asked.steps or 1, MOST_STEPS),
    }
    for param, (given, most) in bounds.items():
        if not 1 <= given <= most:
            raise InvalidArgument(f"{param} is {given}; it is 1 to {most}", param=param)
    if asked.size is not None and not is_drawable(*asked.size):
        raise InvalidArgument(
            f"size is {asked.size[0]}x{asked.size[1]}; none draws it", param="size"
        )
    check_size(asked.size, model)


async def _drawing(
    model: ImageModel, asked: ImageRequest, wait: WaitTeller
) -> AsyncGenerator[_Step | DrawnImage, None]:
    """The steps as they come, then the images. Raises as `ImageModel.draw`, which ends with it."""
    steps: asyncio.Queue[_Step | None] = asyncio.Queue()
    drawing = asyncio.ensure_future(
        model.draw(asked, lambda share, phrase: steps.put_nowait(_Step(share, phrase)), wait)
    )
    drawing.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        while (step := await steps.get()) is not None:
            yield step
        for image in drawing.result():
            yield image
    finally:
        if not drawing.done():
            drawing.cancel()
            await asyncio.wait((drawing,))


def _messages(event: _Step | DrawnImage) -> Sequence[pb.DrawImagesResponse]:
    if isinstance(event, _Step):
        step = pb.DrawingStep(share=event.share, phrase=event.phrase)
        return [pb.DrawImagesResponse(step=step)]
    size = len(event.png)
    pieces = [
        pb.ImagePiece(
            data=event.png[start : start + PIECE_BYTES],
            is_last=start + PIECE_BYTES >= size,
            seed=event.seed,
        )
        for start in range(0, size, PIECE_BYTES)
    ]
    return [pb.DrawImagesResponse(piece=piece) for piece in pieces]
