"""Calls of RelayService on a peer: whole requests that it answers, and images that it draws."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import grpc.aio

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.faults import UpstreamBusy, UpstreamDenied
from kakeya.backends.request import Request
from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.core.units import MIB, format_bytes
from kakeya.dispatch.peers.relay_wire import images_to_wire, part_from_wire, request_to_wire
from kakeya.dispatch.peers.wire import wait_from_wire
from kakeya.generation.image import DrawnImage, ImageRequest, Tell
from kakeya.generation.waiting import RequestWait, WaitTeller
from kakeya.text.tools.answer import Part
from kakeya.v1 import relay_pb2 as pb
from kakeya.v1.relay_pb2_grpc import RelayServiceStub
from kakeya.wire.beats import hear
from kakeya.wire.calls import calling
from kakeya.wire.channels import NETWORK_MESSAGE_BYTES

if TYPE_CHECKING:
    from kakeya.v1.relay_pb2_grpc import RelayServiceAsyncStub

_CHECK_S = 2.0
_LONGEST_S = 24 * 3600.0
"""Of an answer; one that no more is heard of ends long before."""
_MOST_FILE_BYTES = 32 * MIB
"""Of one image; the largest has 8 MiB of pixels."""
_UPSTREAM = (UpstreamDenied, UpstreamBusy)
"""The errors of clouds, which are in no tree."""
_PNG = b"\x89PNG\r\n\x1a\n"


class RelayCalls:
    """The calls of one peer, over a channel that others use too."""

    def __init__(self, channel: grpc.aio.Channel, name: str, client: str) -> None:
        """Errors call the peer by `name`; it counts the requests as those of `client`."""
        self._name = name
        self._client = client
        self._stub: RelayServiceAsyncStub = RelayServiceStub(channel)

    async def check(self, asked: Request) -> Sequence[str]:
        """As `Backend.check`. Raises NotFound for a model that is not shared, and its peer's
        errors."""
        message = self._message(asked)
        with calling(self._name):
            reply = await self._stub.CheckRelayed(message, timeout=_CHECK_S)
        return tuple(reply.ignored)

    async def answer(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """Answer as `Backend.handle`. Closing the iterator ends the work on the peer. Raises
        PeerUnavailable for a peer that is lost or silent, and PeerProtocol for an answer without an
        end."""
        message = self._message(asked)
        with calling(self._name):
            call = self._stub.AnswerRelayed(message, timeout=_LONGEST_S)
        try:
            while (heard := await hear(call, pb.RelayedPart, self._name, *_UPSTREAM)) is not None:
                part = part_from_wire(heard)
                if part is not None:
                    yield part
                if isinstance(part, Finished):
                    return
            raise PeerProtocol(f"{self._name}: the answer ended without its account")
        finally:
            call.cancel()

    async def draw(
        self, model_id: str, request: ImageRequest, tell: Tell, wait: WaitTeller | None
    ) -> tuple[DrawnImage, ...]:
        """Draw as `ImageModel.draw`. Raises as `answer`, and PeerProtocol for other images than
        were asked for."""
        told: RequestWait | None = None
        if wait is not None:
            wait.ask = lambda: told
        drawn, file = list[DrawnImage](), bytearray()
        with calling(self._name):
            call = self._stub.DrawImages(
                images_to_wire(model_id, request, self._client), timeout=_LONGEST_S
            )
        try:
            while (heard := await hear(call, pb.DrawImagesResponse, self._name)) is not None:
                told = wait_from_wire(heard.wait, model_id) if heard.HasField("wait") else None
                if heard.HasField("step"):
                    tell(heard.step.share, heard.step.phrase)
                if not heard.HasField("piece"):
                    continue
                file += heard.piece.data
                if len(file) > _MOST_FILE_BYTES or len(drawn) == request.count:
                    break
                if heard.piece.is_last:
                    drawn.append(DrawnImage(png=bytes(file), seed=heard.piece.seed))
                    file.clear()
        finally:
            call.cancel()
        if file or len(drawn) != request.count or not all(map(_is_png, drawn)):
            raise PeerProtocol(
                f"{self._name} sent {len(drawn)} images and {format_bytes(len(file))} of another; "
                f"{request.count} PNG files were asked for"
            )
        return tuple(drawn)

    def _message(self, asked: Request) -> pb.RelayedRequest:
        message = request_to_wire(asked, self._client)
        if (size := message.ByteSize()) > NETWORK_MESSAGE_BYTES:
            raise InvalidArgument(
                f"the request has {format_bytes(size)}, and at most "
                f"{format_bytes(NETWORK_MESSAGE_BYTES)} go to another node; make it shorter, or "
                f"ask {self._name} itself"
            )
        return message


def _is_png(image: DrawnImage) -> bool:
    """Whether it begins with the header of a PNG file, in which its size stands."""
    return image.png.startswith(_PNG) and image.png[12:16] == b"IHDR" and len(image.png) > 32
