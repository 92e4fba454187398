"""Responses that a node keeps for a day, so that a later request can go on from one of them.

In memory, as bytes: the oldest ones leave when there are too many or too large ones, and all of
them with the process. Off where the node's setting gives it no memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.units import format_bytes
from kakeya.gateway.http.body import shown
from kakeya.gateway.openai.reply import compact

KEEP_S = 24 * 3600.0
MOST_RESPONSES = 4096
_OFF = (
    "this node keeps no responses; send the whole conversation as input, or start the node with "
    "--http-store-mb MB (http_store_mb under [listen])"
)


class PreviousResponseNotFound(InvalidArgument):
    """The `previous_response_id` of a request is none of the kept ones."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes
    asked: bytes
    client: str
    until_mono: float

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.asked)


class ResponseStore:
    """Responses by id. A client, named as by `share_of`, finds only its own."""

    def __init__(
        self,
        *,
        most_bytes: int,
        mono: Callable[[], float],
        most_responses: int = MOST_RESPONSES,
    ) -> None:
        """`most_bytes` 0 = none is kept."""
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._most_responses = most_responses
        self._mono = mono
        self.elsewhere: Callable[[str, str], list[object] | None] = lambda _id, _client: None
        """As `items`, of responses that are kept elsewhere; None = there is none."""
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether responses are kept."""
        return self._most_bytes > 0

    def keep(self, body: Mapping[str, object], asked: bytes, client: str) -> None:
        """Keep a response, and the items that it answers as JSON; one that is too large alone is
        not."""
        made = _Kept(compact(body), asked, client, self._mono() + KEEP_S)
        if made.size_bytes > self._most_bytes:
            return
        self._kept[str(body["id"])] = made
        self.size_bytes += made.size_bytes
        while self._is_over():
            self.size_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def items(self, response_id: str, client: str) -> list[object]:
        """What a request that goes on from a response begins with. Raises InvalidArgument."""
        if (known := self.elsewhere(response_id, client)) is not None:
            return known
        if not self.is_on:
            raise InvalidArgument(f"previous_response_id: {_OFF}", param="previous_response_id")
        found = self._find(response_id, client)
        if found is None:
            raise PreviousResponseNotFound(
                f"no response {shown(response_id)} is kept: {self._bounds()}; send the whole "
                "conversation as input",
                param="previous_response_id",
            )
        items: list[object] = json.loads(found.asked) + json.loads(found.body)["output"]
        return items

    def body(self, response_id: str, client: str) -> bytes:
        """A response as JSON. Raises NotFound."""
        found = self._find(response_id, client)
        if found is None:
            why = self._bounds() if self.is_on else _OFF
            raise NotFound(f"no response {shown(response_id)} is kept: {why}")
        return found.body

    def delete(self, response_id: str, client: str) -> None:
        """Forget a response. Raises NotFound."""
        self.body(response_id, client)
        self.size_bytes -= self._kept.pop(response_id).size_bytes

    def _find(self, response_id: str, client: str) -> _Kept | None:
        found = self._kept.get(response_id)
        is_there = found and found.client == client and found.until_mono > self._mono()
        return found if is_there else None

    def _is_over(self) -> bool:
        oldest = next(iter(self._kept.values()))
        is_full = self.size_bytes > self._most_bytes or len(self._kept) > self._most_responses
        return is_full or oldest.until_mono <= self._mono()

    def _bounds(self) -> str:
        return (
            f"it was asked for with store false, deleted, is older than {KEEP_S / 3600:.0f} hours, "
            f"or newer ones took its place ({format_bytes(self._most_bytes)} are kept)"
        )
