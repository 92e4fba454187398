"""Drafts of a peer over one stream for each generation, where the peer has such streams.

A unary call sends the whole text; a message of a stream sends the tokens that joined the text since
the last one, takes half the time, and the peer keeps its index.

    opening   the text so far is told while the prompt is computed; drafts come by unary calls
    open      the peer's initial metadata have come: drafts are asked for here
    ended     by a failure, or by the peer: unary calls again, and another try after a while

A RemoteDraftBook asks a `StreamedPeer`. Deadlines, breaker and the checks of an answer are those of
the RemoteProposer below it; a peer that answers no request of ours loses its stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from kakeya.core.clock import Clock
from kakeya.core.errors import PeerProtocol
from kakeya.core.units import pack_ids
from kakeya.decoding.draft.convert import MAX_PREFIX_TOKENS, WORD, states_to_wire
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.ngram.ngram import ROLLBACK
from kakeya.decoding.remote.remote import RemoteProposer, RemoteProposerError, StreamCall
from kakeya.decoding.remote.sender import PendingDraft
from kakeya.v1.distributed_pb2 import ProposeBlockResponse
from kakeya.v1.drafts_pb2 import DraftStreamRequest

StatesFrom: TypeAlias = Callable[[int], HiddenStates | None]
"""Gives the hidden states of committed tokens from one on, as far as there are any."""
RETRY_S = 10.0
"""After the end of a stream, the peer is asked by unary calls for so long before another."""
RETRY_WITHOUT_S = 600.0
"""The same for a peer that has no streams: it may be upgraded one day."""


class StreamedDraft:
    """One request on a stream; ended by its answer, by the stream's end or by its deadline."""

    def __init__(self, version: int, block_size: int, clock: Clock, timeout_s: float) -> None:
        self.version = version
        self.block_size = block_size
        self.began_mono = clock.mono()
        self._clock = clock
        self._expires_mono = self.began_mono + timeout_s
        self._ended_mono: float | None = None
        self._ended = threading.Event()
        self._outcome: ProposeBlockResponse | Exception = grpc.FutureTimeoutError()

    @property
    def arrived_mono(self) -> float | None:
        """When it ended, if it has; that it took too long is noticed here."""
        if self._ended_mono is None and self._clock.mono() >= self._expires_mono:
            return self._expires_mono
        return self._ended_mono

    def wait(self, seconds: float) -> bool:
        """Block until it has ended, at most so long; whether it has."""
        return self._ended.wait(seconds)

    def result(self) -> ProposeBlockResponse:
        """The answer. Raises the error that it ended with."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def abandon(self) -> None:
        """Nothing needs to be done: the next message overtakes it."""

    def end(self, outcome: ProposeBlockResponse | Exception) -> None:
        """Give it its answer, or the reason why there is none; the first one counts."""
        if not self._ended.is_set():
            self._outcome = outcome
            self._ended_mono = self._clock.mono()
            self._ended.set()


class DraftStream:
    """One call, from its start on the sender's thread to its end.

    The thread that decodes sends; a reader of its own hands answers over. Answers of requests
    that were overtaken are dropped.
    """

    def __init__(self, proposer: RemoteProposer) -> None:
        self._proposer = proposer
        self._requests: SimpleQueue[DraftStreamRequest | None] = SimpleQueue()
        self._call: StreamCall | None = None
        self._waiting: StreamedDraft | None = None
        self._told_version = 0
        self._is_closed = False
        self.is_open = False
        self.has_ended = False

    def start(self) -> None:
        """Make the call and begin to read."""
        if not self._is_closed:
            self._call = self._proposer.stream(iter(self._requests.get, None))
            name = "draft-stream"
            threading.Thread(target=self._read, args=(self._call,), name=name, daemon=True).start()
        if self._is_closed and self._call is not None:
            self._call.cancel()

    def tell(self, message: DraftStreamRequest, pending: StreamedDraft | None = None) -> None:
        """Send a message; of its requests only the newest is still waited for."""
        self._told_version = message.version
        self._waiting = pending
        self._requests.put(message)
        if pending is not None and not self.is_open:
            pending.end(grpc.FutureCancelledError())

    def close(self) -> None:
        """End the call."""
        self._is_closed, self.is_open = True, False
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    def _read(self, call: StreamCall) -> None:
        outcome: ProposeBlockResponse | Exception = grpc.FutureCancelledError()
        try:
            call.initial_metadata()
            self.is_open = not self._is_closed
            self._take(call)
        except (grpc.RpcError, PeerProtocol) as failure:
            outcome = failure
        self.is_open = False
        call.cancel()
        self._requests.put(None)  # gRPC's own thread waits for the next message
        if not self._is_closed:
            has_none = call.code() is grpc.StatusCode.UNIMPLEMENTED
            self._proposer.delay_streams(RETRY_WITHOUT_S if has_none else RETRY_S)
            if has_none:  # gRPC told of metadata first, which looked like an open stream
                outcome = ProposeBlockResponse(num_valid=0)
        if self._waiting is not None:
            self._waiting.end(outcome)
        self.has_ended = True

    def _take(self, call: StreamCall) -> None:
        answered = 0
        for response in call:
            if not answered < response.version <= self._told_version:
                raise PeerProtocol(
                    f"{self._proposer.name} answered version {response.version} after "
                    f"{answered}; {self._told_version} versions were told"
                )
            answered = response.version
            waiting = self._waiting
            if waiting is not None and waiting.version == answered:
                waiting.end(response.draft)


class StreamedPeer:
    """A peer as one generation asks it: over its own stream when there is one, else by calls.

    Prefixes of one generation differ from each other near their ends only.
    """

    def __init__(self, proposer: RemoteProposer, states: StatesFrom | None = None) -> None:
        """`states` are the verifier's, for a drafter that reads them; they travel on a stream."""
        self.name = proposer.name
        self.extended = proposer.extended
        self.clock = proposer.clock
        self._proposer = proposer
        self._stream: DraftStream | None = None
        self._told: Sequence[int] = ()
        self._version = 0
        self._states = states
        self._stated = 0

    def prepare(self, prefix: Sequence[int], *, noise: SamplingNoise | None) -> None:
        """Open a stream and tell the text, before drafts are needed."""
        if self._stream is not None and self._stream.has_ended:
            self._stream = None
        if (
            self._stream is None
            and len(prefix) <= MAX_PREFIX_TOKENS
            and self._proposer.may_stream()
        ):
            self._stream, self._told, self._version = DraftStream(self._proposer), (), 0
            self._stated = 0
            opening = self._message(list(prefix), 0)
            opening.model_id = self._proposer.model_id
            if noise is not None:
                opening.seed = noise.seed & WORD
                opening.temperature = noise.temperature
            self._stream.tell(opening)
            self._proposer.soon(self._stream.start)

    def begin(
        self, prefix: Sequence[int], size: int, *, noise: SamplingNoise | None
    ) -> PendingDraft | StreamedDraft | None:
        """Send a request and return at once; None while the breaker is open.

        `prefix` is kept and compared with the next one: it must not change.
        """
        stream = self._stream
        if stream is None or not stream.is_open or not self._follows(prefix):
            self.prepare(prefix, noise=noise)
            return self._proposer.begin(prefix, size, noise=noise)
        if not self._proposer.admit():
            return None
        message = self._message(prefix, size)
        timeout_s = self._proposer.timeout_s
        pending = StreamedDraft(message.version, size, self.clock, timeout_s)
        stream.tell(message, pending)
        return pending

    def finish(self, pending: PendingDraft | StreamedDraft) -> Draft:
        """Read the answer of a request that has ended. Raises RemoteProposerError."""
        try:
            return self._proposer.finish(pending)
        except RemoteProposerError:
            if isinstance(pending, StreamedDraft):
                self._proposer.delay_streams(RETRY_S)
                self.leave()
            raise

    def abandon(self, pending: PendingDraft | StreamedDraft) -> None:
        """Give a request up."""
        self._proposer.abandon(pending)

    def leave(self) -> None:
        """End the stream; the generation is over."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _follows(self, prefix: Sequence[int]) -> bool:
        return len(self._told) - ROLLBACK <= len(prefix) <= MAX_PREFIX_TOKENS

    def _message(self, prefix: Sequence[int], size: int) -> DraftStreamRequest:
        keep = _shared(self._told, prefix)
        self._version += 1
        self._told = prefix
        message = DraftStreamRequest(
            version=self._version,
            keep_tokens=keep,
            append_ids_le32=pack_ids(prefix[keep:]),
            size=size,
        )
        if self._states is not None and (states := self._states(self._stated)) is not None:
            message.states.CopyFrom(states_to_wire(states))
            self._stated = states.end
        return message


def _shared(told: Sequence[int], prefix: Sequence[int]) -> int:
    """The count of sent tokens that the prefix begins with; only their end is compared."""
    start, end = max(0, len(told) - ROLLBACK), min(len(told), len(prefix))
    return next((at for at in range(start, end) if told[at] != prefix[at]), end)
