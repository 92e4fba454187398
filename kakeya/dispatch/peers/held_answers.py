"""Copies of answers in the memory of this node: another node that streams an answer to its client
has it copied here as it is made, and after the loss of that node any node goes on with it.

Never on disk. A copy is held for ten minutes behind its last token; where room is short, the copies
that grew last stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kakeya.core.errors import CapacityExhausted, Conflict, NotFound
from kakeya.core.figures import Figure, gauge
from kakeya.core.units import format_bytes
from kakeya.dispatch.peers.quote import NO_ORIGIN, AnswerOrigin
from kakeya.generation.frames import Frame
from kakeya.generation.request import DecodeRequest
from kakeya.v1 import serving_pb2 as pb

KEEP_S = 600.0
_LARGEST_SHARE = 4
"""One copy takes at most this part of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCopy:
    """What another node needs to go on with an answer.

    `client` alone is given it, by its name, or by its machine where it has none. `body` is the
    client's request as JSON; `request` is what engines are asked, None = it is still to be
    prepared. `frames` hold the committed tokens, and the end where it came; `is_complete` says that
    nothing follows. `fingerprint` is what the client is told of what began it. `node_id` makes it
    now. `ended` is a response without an answer as JSON, that failed or was cancelled.
    """

    answer_id: str
    client: str
    model_id: str
    body: bytes
    created_at: int
    request: DecodeRequest | None = None
    frames: Sequence[Frame] = ()
    is_complete: bool = False
    origin: AnswerOrigin = NO_ORIGIN
    fingerprint: str = ""
    node_id: str = ""
    ended: bytes = b""


@dataclass(slots=True)
class _Held:
    client: str
    written: bytearray
    frames: int
    until_mono: float
    is_complete: bool = False


class HeldAnswers:
    """See the module; lives on the event loop."""

    def __init__(self, *, most_bytes: int, mono: Callable[[], float]) -> None:
        """`most_bytes` 0 = none is held."""
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._mono = mono
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._deleted: OrderedDict[str, float] = OrderedDict()
        """Answers that were forgotten for their clients, and until when none is held again."""

    @property
    def is_on(self) -> bool:
        """Whether copies are held."""
        return self._most_bytes > 0

    def hold(self, copy: pb.AnswerCopy, frames_before: int) -> None:
        """Hold a copy, or what is new of one, as `HoldAnswerRequest` says. Raises NotFound where
        the frames before are not here, Conflict where the answer was forgotten for its client, and
        CapacityExhausted for a copy that has no room."""
        self._forget_old()
        if copy.answer_id in self._deleted:
            raise Conflict(f"{copy.answer_id[:80]} was deleted by its client")
        known = self._held.get(copy.answer_id)
        if frames_before == 0:
            if known and known.client == copy.client and known.is_complete > copy.is_complete:
                return  # of another node, that was slower or is behind
            known = _Held(copy.client, bytearray(), 0, 0.0)
        elif known is None or known.client != copy.client or known.frames != frames_before:
            raise NotFound(f"{copy.answer_id[:80]} is not held up to frame {frames_before}")
        # Messages one behind the other are one message, with the frames of all.
        new = copy.SerializeToString()
        self._drop(copy.answer_id)
        most_bytes = self._most_bytes // _LARGEST_SHARE
        if len(known.written) + len(new) > most_bytes:
            raise CapacityExhausted(
                f"a copy of an answer takes {format_bytes(len(known.written) + len(new))}; one may "
                f"take {format_bytes(most_bytes)} of the {format_bytes(self._most_bytes)} for all "
                "(http_resume_mb)"
            )
        known.written += new
        known.frames += len(copy.frames)
        known.is_complete = copy.is_complete
        known.until_mono = self._mono() + KEEP_S
        self._held[copy.answer_id] = known
        self.size_bytes += len(known.written)
        while self.size_bytes > self._most_bytes:
            self._drop(next(iter(self._held)))

    def find(self, answer_id: str, client: str) -> pb.AnswerCopy | None:
        """The copy of an answer of a client."""
        self._forget_old()
        known = self._held.get(answer_id)
        if known is None or known.client != client:
            return None
        return pb.AnswerCopy.FromString(bytes(known.written))

    def forget(self, answer_id: str, client: str) -> bool:
        """Forget a copy, and hold none of the answer again; False = there was none."""
        known = self._held.get(answer_id)
        if known is None or known.client != client:
            return False
        self._drop(answer_id)
        self._deleted[answer_id] = self._mono() + KEEP_S
        return True

    def figures(self) -> Iterator[Figure]:
        """What is held."""
        self._forget_old()
        yield gauge("kakeya_held_answers", "Copies of answers in memory", len(self._held), "{}")
        size = self.size_bytes
        yield gauge("kakeya_held_answers_bytes", "Memory of copies of answers", size, "bytes")

    def _forget_old(self) -> None:
        now = self._mono()
        while self._held and next(iter(self._held.values())).until_mono <= now:
            self._drop(next(iter(self._held)))
        while self._deleted and next(iter(self._deleted.values())) <= now:
            self._deleted.popitem(last=False)

    def _drop(self, answer_id: str) -> None:
        gone = self._held.pop(answer_id, None)
        if gone is not None:
            self.size_bytes -= len(gone.written)
