"""ProposerService: this node's proposers, for peers.

Each proposer works on one request at a time, in its own order; the others wait in a short queue
that refuses at once when it is full. A request that was cancelled or has passed its deadline while
waiting is dropped before anything is computed for it. Blocking proposers run on a thread of their
own, so gossip and streams never wait for a draft.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import grpc
import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import DeadlineExceeded, InvalidArgument, KakeyaError, NotFound, QueueFull
from kakeya.core.log import event
from kakeya.decoding.draft.convert import check_sizes, draft_to_wire, prefix_from_wire
from kakeya.decoding.draft.proposer import BlockProposer, Draft, Proposer, as_proposer
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.generation.place_rate import PlaceRate
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import distributed_pb2_grpc as rpc
from kakeya.wire.status import abort

_log = logging.getLogger(__name__)
QUEUE_LIMIT = 16
"""Requests that may wait for one proposer: later ones would be answered too late to be of use."""
INLINE_TOKENS = 256
"""Indexing so many new tokens for an n-gram look-up takes as long as starting a thread for it."""


@runtime_checkable
class AsyncDrafter(Protocol):
    """A proposer that works elsewhere, such as a draft model in an engine child."""

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float,
        num_steps: int,
        states: HiddenStates | None,
    ) -> Draft:
        """Draft at most `size` tokens; with a seed, in the way of a verifier that has it."""
        ...


@asynccontextmanager
async def failures_end(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of whatever is raised within, a proposer's fault included."""
    try:
        yield
    except KakeyaError as refusal:
        await abort(context, refusal)
    except ValueError as refusal:
        await abort(context, InvalidArgument(f"the proposer refused: {refusal}"))
    except grpc.aio.AbortError:
        raise
    except Exception as failure:  # noqa: BLE001 - a proposer's fault ends here
        event(_log, "proposer failed", level=logging.ERROR, error=repr(failure))
        _log.debug("traceback", exc_info=failure)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"the proposer failed: {type(failure).__name__}"
        )


class ProposerService(rpc.ProposerServiceServicer):
    """Serves named proposers; the first one is the default for model_id "".

    Whatever has the original engine's propose_block serves too. Each of them drafts for one
    caller at a time, and none has to be there from the start (both differ from the original).
    Raises InvalidArgument for an object that does not draft and for an empty name.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer | BlockProposer | AsyncDrafter] | None = None,
        *,
        clock: Clock | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._clock = clock or SystemClock()
        self._queue_limit = queue_limit
        self._desks: dict[str, ProposerQueue] = {}
        for model_id, proposer in (proposers or {}).items():
            self.serve(model_id, proposer)

    def serve(self, model_id: str, proposer: Proposer | BlockProposer | AsyncDrafter) -> None:
        """Offer a proposer, or another one under the same name. Raises InvalidArgument."""
        if not model_id:
            raise InvalidArgument('a proposer needs a name; "" asks for the first one that has one')
        offered = proposer if isinstance(proposer, AsyncDrafter) else as_proposer(proposer)
        replaced = self._desks.get(model_id)
        self._desks[model_id] = ProposerQueue(model_id, offered, self._clock, self._queue_limit)
        if replaced is not None:
            replaced.close()

    def withdraw(self, model_id: str) -> None:
        """Stop offering it; requests that it has taken are still answered."""
        desk = self._desks.pop(model_id, None)
        if desk is not None:
            desk.close()

    def served(self) -> tuple[str, ...]:
        """The names on offer, the default first."""
        return tuple(self._desks)

    async def ProposeBlock(
        self,
        request: pb.ProposeBlockRequest,
        context: grpc.aio.ServicerContext[pb.ProposeBlockRequest, pb.ProposeBlockResponse],
    ) -> pb.ProposeBlockResponse:
        """Answer with exactly block_size ids, of which num_valid are meant."""
        async with failures_end(context):
            return await self._answer(request, context.time_remaining())
        raise AssertionError("abort returned")

    async def _answer(
        self, request: pb.ProposeBlockRequest, remaining_s: float | None
    ) -> pb.ProposeBlockResponse:
        check_sizes(request)
        desk = self.desk(request.model_id)
        prefix = prefix_from_wire(request)
        expires_mono = None if remaining_s is None else self._clock.mono() + remaining_s
        draft = await desk.draft(request, prefix, expires_mono)
        return draft_to_wire(draft, request)

    def desk(self, model_id: str) -> ProposerQueue:
        """The desk of one proposer, "" = the default. Raises NotFound."""
        if not self._desks:
            raise NotFound("this node serves no proposer")
        if not model_id:
            return next(iter(self._desks.values()))
        desk = self._desks.get(model_id)
        if desk is None:
            served = ", ".join(self._desks)
            raise NotFound(
                f"proposer {model_id[:80]!r} is not served here; this node serves {served}"
            )
        return desk


class ProposerQueue:
    """One proposer and the requests that wait for it."""

    def __init__(
        self, model_id: str, proposer: Proposer | AsyncDrafter, clock: Clock, limit: int
    ) -> None:
        self._model_id = model_id
        self.proposer = proposer
        self._clock = clock
        self._limit = limit
        self._taken = 0
        self._rate = PlaceRate(clock.mono)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"draft-{model_id}")
        self._job: asyncio.Future[Draft] | None = None

    def close(self) -> None:
        """Take no more work; requests that were taken are still served."""
        self._thread.shutdown(wait=False)

    async def draft(
        self,
        request: pb.ProposeBlockRequest,
        prefix: list[int],
        expires_mono: float | None,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Wait for the proposer's turn, then draft. Raises QueueFull, DeadlineExceeded."""
        if self._taken > self._limit:
            raise QueueFull(
                f"proposer {self._model_id!r} has {self._limit} requests waiting; ask another one",
                retry_after_s=self._rate.retry_after_s(),
            )
        self._taken += 1
        if self._taken > self._limit:
            self._rate.full()
        try:
            async with self._turn:
                if self._job is not None and not self._job.done():
                    # Its caller left, but a thread cannot be stopped.
                    await asyncio.wait((self._job,))
                if expires_mono is not None and self._clock.mono() >= expires_mono:
                    raise DeadlineExceeded("the deadline passed before the request had its turn")
                return await self._work(request, prefix, states)
        finally:
            self._rate.freed(is_full=self._taken > self._limit)
            self._taken -= 1

    async def _work(
        self, request: pb.ProposeBlockRequest, prefix: list[int], states: HiddenStates | None
    ) -> Draft:
        began = self._clock.mono()
        proposer, size = self.proposer, request.block_size
        if isinstance(proposer, AsyncDrafter):
            seed = request.seed if request.HasField("seed") else None
            draft = await proposer.draft(
                prefix,
                size,
                seed=seed,
                temperature=request.temperature,
                num_steps=request.num_steps,
                states=states,
            )
        elif isinstance(proposer, NGramProposer) and proposer.unseen(prefix) <= INLINE_TOKENS:
            draft = proposer.propose(prefix, size, request.num_steps)
        else:
            loop = asyncio.get_running_loop()
            self._job = loop.run_in_executor(
                self._thread, proposer.propose, prefix, size, request.num_steps
            )
            self._job.add_done_callback(_retrieve)
            draft = await asyncio.shield(self._job)
        spent_us = int((self._clock.mono() - began) * 1e6)
        return draft if draft.draft_us else replace(draft, draft_us=spent_us)


def _retrieve(job: asyncio.Future[Draft]) -> None:
    """Read the outcome, so that a job without its caller is not reported as forgotten."""
    if not job.cancelled():
        job.exception()
