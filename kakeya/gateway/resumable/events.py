"""The events of a stream by number, and what its client says that it has of them.

Each event of an answer that any node may go on with has an id: that of the answer, and its place
from 0, as `chatcmpl-XYZ:17`. Comments and pings between them have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.http.body import shown

NONE_YET = -1
_HEADER = "last-event-id"


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event that a client has of an answer; `number` NONE_YET = it has none."""

    answer_id: str
    number: int


class NumberedEvents:
    """Writes the events of one answer from its first one on, behind a number that is known."""

    def __init__(self, answer_id: str, after: int = NONE_YET) -> None:
        self._head = b"id: " + answer_id.encode() + b":"
        self._after = after
        self._next = 0

    def write(self, events: bytes) -> bytes:
        """Whole events with their ids; of those that the client has, nothing."""
        written = b""
        for event in events.split(b"\n\n")[:-1]:
            if self._next > self._after:
                written += self._head + b"%d\n" % self._next + event + b"\n\n"
            self._next += 1
        return written


def last_event(scope: Scope) -> LastEvent | None:
    """The header Last-Event-ID; None = there is none. Raises InvalidArgument."""
    said = Headers(scope=scope).get(_HEADER, "")
    if not said:
        return None
    answer_id, _, number = said.rpartition(":")
    if not answer_id or not _is_number(number):
        raise InvalidArgument(
            f"Last-Event-ID is {shown(said)}; it must be the id of an event of a stream, as "
            "chatcmpl-XYZ:17",
            param="Last-Event-ID",
        )
    return LastEvent(answer_id, int(number))


def asked_after(request: Request, answer_id: str) -> int | None:
    """The number behind which a GET asks for the events of an answer, NONE_YET = for all; None =
    it asks for no stream. Raises InvalidArgument."""
    if (last := last_event(request.scope)) is not None:
        if last.answer_id != answer_id:
            raise InvalidArgument(
                f"Last-Event-ID is of {shown(last.answer_id)}, and the path names "
                f"{shown(answer_id)}",
                param="Last-Event-ID",
            )
        return last.number
    if request.query_params.get("stream", "false") == "false":
        return None
    said = request.query_params.get("starting_after", str(NONE_YET))
    if said != str(NONE_YET) and not _is_number(said):
        raise InvalidArgument(
            f"starting_after is {said[:20]!r}; it must be the number of an event",
            param="starting_after",
        )
    return int(said)


def _is_number(said: str) -> bool:
    return said.isdecimal() and said.isascii() and len(said) < 10
