"""Images that a node keeps for an hour, each behind an address that cannot be guessed.

In memory: the oldest leave when there are too many bytes, and all of them with the process.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kakeya.core.errors import NotFound
from kakeya.core.ids import draw_id
from kakeya.core.units import MIB, format_bytes

KEEP_S = 3600.0
MOST_BYTES = 64 * MIB
PATH = "/v1/images/{}.png"


class ImageStore:
    """PNG files by id."""

    def __init__(self, *, mono: Callable[[], float], most_bytes: int = MOST_BYTES) -> None:
        self._mono = mono
        self._most_bytes = most_bytes
        self._rng = random.SystemRandom()
        self._kept: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self.size_bytes = 0

    def keep(self, png: bytes) -> str:
        """Keep an image; returns its path. One that is too large alone pushes itself out."""
        name = draw_id("img", self._rng, 32)
        self._kept[name] = png, self._mono() + KEEP_S
        self.size_bytes += len(png)
        self._drop()
        return PATH.format(name)

    def find(self, name: str) -> bytes:
        """An image. Raises NotFound."""
        self._drop()
        if name not in self._kept:
            raise NotFound(
                f"no image {name[:60]!r} is kept: images are kept for {KEEP_S / 60:.0f} minutes, "
                f"and no longer than newer ones fit into {format_bytes(self._most_bytes)} beside "
                'them; ask with "response_format": "b64_json" for the image itself'
            )
        return self._kept[name][0]

    def route(self) -> Route:
        """The path of the images."""

        async def show(request: Request) -> Response:
            """GET: an image."""
            png = self.find(request.path_params["image_id"])
            kept = {"cache-control": f"private, max-age={KEEP_S:.0f}"}
            return Response(png, media_type="image/png", headers=kept)

        return Route(PATH.format("{image_id}"), show)

    def _drop(self) -> None:
        while self._kept:
            png, until_mono = next(iter(self._kept.values()))
            if self.size_bytes <= self._most_bytes and until_mono > self._mono():
                return
            self._kept.popitem(last=False)
            self.size_bytes -= len(png)
