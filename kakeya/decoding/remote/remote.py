"""Drafts from a peer's ProposerService: blocking by block, or in advance of need.

`RemoteProposer` is a Proposer like any other, over one reused channel, with a deadline on every
call and a circuit breaker. Answers are checked here and verified token by token later, so a
wrong, hostile or half-dead peer costs time, never a token. `RemoteDraftBook` (draft_book.py) asks
through `begin` and `finish` without blocking.

Not thread-safe: one thread drafts.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

import grpc

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import InvalidArgument, PeerError, PeerProtocol
from kakeya.core.log import event
from kakeya.core.settings import Illegal, peer_address
from kakeya.decoding.draft.convert import (
    MAX_BLOCK_TOKENS,
    PADDING_ID,
    draft_from_wire,
    request_to_wire,
)
from kakeya.decoding.draft.proposer import BlockProposal, Draft, ProposerStats, SamplingNoise
from kakeya.decoding.remote.breaker import BreakerState, CircuitBreaker
from kakeya.decoding.remote.draft_book import RemoteDraftBook
from kakeya.decoding.remote.sender import PendingDraft, Sender
from kakeya.decoding.remote.vocabulary import asked_digest
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import distributed_pb2_grpc as rpc
from kakeya.v1.drafts_pb2 import DraftStreamRequest, DraftStreamResponse
from kakeya.v1.drafts_pb2_grpc import DraftStreamServiceStub
from kakeya.wire.channels import is_local, sync_channel
from kakeya.wire.security import TlsMaterial
from kakeya.wire.status import plain_details
from kakeya.wire.tls import FolderSecurity, handshake_failure

__all__ = ["MalformedDraft", "PendingDraft", "RemoteDraftBook", "RemoteProposer"]
__all__ += ["RemoteProposerError"]

_log = logging.getLogger(__name__)
PROPOSAL_TIMEOUT_S = 2.0
"""The longest that one call may take; drafts that take longer never pay."""
STREAM_TIMEOUT_S = 3600.0
"""The longest that one stream lasts; drafts on it are timed each for itself."""
_MISREADING = frozenset(
    (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
)
"""Statuses of a node without our extensions, to which an extended request has an empty prefix."""


class StreamCall(Protocol):
    """The call of a stream, as gRPC's threads make it."""

    def __iter__(self) -> Iterator[DraftStreamResponse]: ...

    def initial_metadata(self) -> object:
        """Wait for the server to take the call, or for its end."""
        ...

    def code(self) -> grpc.StatusCode | None:
        """Its final status; waits for the end."""
        ...

    def cancel(self) -> object:
        """End it."""
        ...


class Ended(Protocol):
    """A request, unary or on a stream."""

    @property
    def block_size(self) -> int:
        """The count of tokens that it asked for."""
        ...

    def result(self) -> pb.ProposeBlockResponse:
        """The answer of a request that has ended. Raises the error that it ended with."""
        ...

    def abandon(self) -> None:
        """Give it up."""
        ...


class RemoteProposerError(PeerError):
    """The peer gave no usable draft. `status` is its gRPC status, if the call ended with one."""

    code = "remote_proposer"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status


class MalformedDraft(RemoteProposerError, PeerProtocol):
    """The peer gave an answer that no correct proposer gives."""


class RemoteProposer:
    """The proposer `model_id` of the node at `address`; "" is that node's default.

    `extended=False` for nodes without our wire extensions: they answer full blocks, in which
    padding looks like drafts. A node that turns out to be such a one is asked in its way from then
    on. Token ids from `vocab_size` on are refused; without it they are not checked here. A given
    `channel` stays the caller's to close. The first failure is logged and stands in `stats`.

    With `tls` the peer must show a certificate for `server_name`. In a fleet with identities a
    program names the data directory of a member as `identity` instead, which counts on the way to
    another machine; `server_name` is then the peer's node id, "" = any member.

    Otherwise than in the original engine, a call takes 2 seconds at most by default, not 60, and a
    peer that failed three times in a row is not asked for a while.

    Raises InvalidArgument for an address that is not HOST:PORT, a timeout or a vocabulary that is
    not above 0, ConfigError for an identity that is missing or damaged.
    """

    def __init__(
        self,
        address: str,
        model_id: str = "",
        *,
        channel: grpc.Channel | None = None,
        timeout_s: float = PROPOSAL_TIMEOUT_S,
        vocab_size: int | None = None,
        extended: bool = True,
        tls: TlsMaterial | None = None,
        server_name: str = "",
        identity: Path | None = None,
        breaker: CircuitBreaker | None = None,
        rng: random.Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check_terms(address, timeout_s, vocab_size, has_channel=channel is not None)
        self.address = address
        self.name = f"{model_id}@{address}"
        self.stats = ProposerStats()
        self.extended = extended
        self.clock = clock or SystemClock()
        self.breaker = breaker or CircuitBreaker(rng or random.Random())
        self.model_id = model_id
        self.timeout_s = timeout_s
        self._streams_from_mono = 0.0
        self._has_answered_extended = False
        self._vocab_size = vocab_size
        self._sender = Sender(f"draft-{model_id}")
        if identity is not None and not is_local(address):
            security = FolderSecurity(identity, server_name)
            security.refresh()
            tls, server_name = security.material(), security.server_name(address)
        self._owns_channel = channel is None
        self._channel = channel or sync_channel(address, tls=tls, server_name=server_name)
        self._stub = rpc.ProposerServiceStub(self._channel)
        self._streams = DraftStreamServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        """Draft at most `size` tokens, of which a peer is asked for 1024 at a time.

        Raises RemoteProposerError, InvalidArgument.
        """
        return self._ask(prefix, min(size, MAX_BLOCK_TOKENS), num_steps)

    def propose_block(
        self, committed: Sequence[int], block_size: int, num_steps: int = 1
    ) -> BlockProposal:
        """Draft exactly `block_size` tokens, of which `num_valid` are meant."""
        draft = self._ask(committed, block_size, num_steps)
        return BlockProposal(
            tokens=draft.tokens + (PADDING_ID,) * (block_size - len(draft.tokens)),
            num_valid=len(draft.tokens),
            forward_passes=draft.forward_passes,
            diffusion_steps=draft.diffusion_steps,
            peak_activation_bytes=draft.peak_activation_bytes,
        )

    def begin(
        self, prefix: Sequence[int], size: int, *, noise: SamplingNoise | None = None
    ) -> PendingDraft | None:
        """Send a request and return at once; None while the breaker is open.

        `prefix` must stay as it is until the request has left; `noise` is of a sampled decode.
        """
        _check(prefix, size, 1)
        if not self.admit():
            return None
        pending = PendingDraft(size, self.clock)

        def start() -> grpc.Future[pb.ProposeBlockResponse]:
            request = self._request(prefix, size, 1, noise)
            return self._stub.ProposeBlock.future(request, timeout=self.timeout_s)

        self._sender.send(pending, start)
        return pending

    def admit(self) -> bool:
        """Count a request, which is then sent; False while the breaker is open."""
        admitted = self.breaker.admit(self.clock.mono())
        self.stats.calls += admitted
        return admitted

    def finish(self, pending: Ended) -> Draft:
        """Read the answer of a call that has ended. Raises RemoteProposerError."""
        try:
            response = pending.result()
        except PeerProtocol as failure:
            self._count_failure(failure.message)
            raise MalformedDraft(failure.message) from failure
        except (
            grpc.RpcError,
            grpc.FutureTimeoutError,
            grpc.FutureCancelledError,
            ValueError,
        ) as failure:
            raise self._failed(failure) from failure
        if self.extended and not response.HasField("num_valid"):
            self._speak_plainly()
            problem = f"{self.name} has not read the prefix: it lacks the extension"
            self._count_failure(problem)
            raise MalformedDraft(problem)
        return self._read(response, pending.block_size)

    def abandon(self, pending: Ended) -> None:
        """Give a call up; the server drops it if it has not begun."""
        pending.abandon()
        self.breaker.withdrawn()

    def prepare(self, prefix: Sequence[int], *, noise: SamplingNoise | None) -> None:
        """Nothing to prepare: each call tells the whole prefix."""

    def leave(self) -> None:
        """Nothing to leave."""

    def may_stream(self) -> bool:
        """Whether a stream is worth a try now; a plain peer has none."""
        closed = self.breaker.state is BreakerState.CLOSED
        return self.extended and closed and self.clock.mono() >= self._streams_from_mono

    def delay_streams(self, seconds: float) -> None:
        """Try no stream for so long; thread-safe."""
        self._streams_from_mono = self.clock.mono() + seconds

    def stream(self, requests: Iterator[DraftStreamRequest]) -> StreamCall:
        """Open a stream; its failures come when it is read."""
        return self._streams.DraftStream(requests, timeout=STREAM_TIMEOUT_S)

    def soon(self, job: Callable[[], None]) -> None:
        """Have something done on the sender's thread."""
        self._sender.run(job)

    def vocabulary_digest(self) -> str:
        """Ask the node's card what its token ids mean; "" = the card does not say, or no card."""
        return asked_digest(self._channel, self.model_id, self.timeout_s)

    def close(self) -> None:
        """End the sending thread, and the channel if it is the proposer's own."""
        self._sender.close()
        if self._owns_channel:
            self._channel.close()

    def _ask(self, prefix: Sequence[int], size: int, num_steps: int) -> Draft:
        _check(prefix, size, num_steps)
        began = self.clock.mono()
        if not self.breaker.admit(began):
            raise self._refused(began)
        self.stats.calls += 1
        try:
            response = self._call(prefix, size, num_steps)
        except grpc.RpcError as failure:
            raise self._failed(failure) from failure
        finally:
            self.stats.wait_s += self.clock.mono() - began
        return self._read(response, size)

    def _call(self, prefix: Sequence[int], size: int, num_steps: int) -> pb.ProposeBlockResponse:
        """Ask, and ask again in plain form where the node has not read an extended request."""
        expires = self.clock.mono() + self.timeout_s
        request = self._request(prefix, size, num_steps)
        if not self.extended:
            return self._stub.ProposeBlock(request, timeout=self.timeout_s)
        try:
            response = self._stub.ProposeBlock(request, timeout=self.timeout_s)
        except grpc.RpcError as failure:
            if self._has_answered_extended or _status(failure) not in _MISREADING:
                raise
        else:
            if response.HasField("num_valid"):
                self._has_answered_extended = True
                return response
        plain = request_to_wire(prefix, size, num_steps, self.model_id, extended=False)
        left_s = max(expires - self.clock.mono(), 0.001)
        response = self._stub.ProposeBlock(plain, timeout=left_s)
        if not response.HasField("num_valid"):
            self._speak_plainly()
        return response

    def _speak_plainly(self) -> None:
        self.extended = False
        event(
            _log,
            "a node does not know this build's extension of drafts; it is asked without",
            source=self.name,
        )

    def _request(
        self,
        prefix: Sequence[int],
        size: int,
        num_steps: int,
        noise: SamplingNoise | None = None,
    ) -> pb.ProposeBlockRequest:
        return request_to_wire(
            prefix, size, num_steps, self.model_id, extended=self.extended, noise=noise
        )

    def _read(self, response: pb.ProposeBlockResponse, size: int) -> Draft:
        try:
            draft = draft_from_wire(response, size, self.name, self._vocab_size)
        except PeerProtocol as failure:
            self._count_failure(failure.message)
            raise MalformedDraft(failure.message) from failure
        self.breaker.succeeded()
        self.stats.count(draft)
        return draft

    def _failed(self, failure: Exception) -> RemoteProposerError:
        status = _status(failure)
        details = failure.details() if isinstance(failure, grpc.Call) else repr(failure)
        named = status.name if status is not None else "no status"
        refused = handshake_failure(details or "", self.name)
        said = plain_details(details or "")
        problem = f"{self.name}: {named}: {said}" if refused is None else refused.message
        self._count_failure(problem)
        return RemoteProposerError(problem, status=status)

    def _count_failure(self, problem: str) -> None:
        self.stats.count_failure(self.name, problem)
        self.breaker.failed(self.clock.mono())

    def _refused(self, now: float) -> RemoteProposerError:
        trying = self.breaker.state is BreakerState.TRYING
        wait_s = 0.0 if trying else max(0.0, self.breaker.retry_mono - now)
        return RemoteProposerError(
            f"{self.name} failed several times in a row; it is asked again in {wait_s:.1f} s",
            retry_after_s=wait_s,
        )


def _check(prefix: Sequence[int], size: int, num_steps: int) -> None:
    if not len(prefix):
        raise InvalidArgument("the prefix is empty: there is nothing to continue")
    if size < 1 or num_steps < 1:
        raise InvalidArgument(f"block size {size}, num_steps {num_steps}: both must be at least 1")


def _check_terms(
    address: str, timeout_s: float, vocab_size: int | None, *, has_channel: bool
) -> None:
    try:
        if not has_channel or not address:
            peer_address(address)
    except Illegal as problem:
        raise InvalidArgument(f"the proposer's address: {problem}", param="address") from problem
    if not timeout_s > 0:
        raise InvalidArgument(f"timeout_s is {timeout_s}, it must be above 0", param="timeout_s")
    if vocab_size is not None and vocab_size < 1:
        raise InvalidArgument(f"vocab_size is {vocab_size}, it must be at least 1")


def _status(failure: Exception) -> grpc.StatusCode | None:
    return failure.code() if isinstance(failure, grpc.Call) else None
