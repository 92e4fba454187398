"""The agent's end of the socket to one engine child: EngineService with the contract's values."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from kakeya.backends.engine.adapter_stream import AdapterStream
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import InvariantBroken, KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.core.tasks import is_cancelled
from kakeya.core.units import pack_ids
from kakeya.decoding.draft.convert import states_to_wire
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.engine_wire import (
    facts_from_wire,
    footprint_from_wire,
    frames_from_wire,
    job_to_wire,
    page_ref_to_wire,
    stats_from_wire,
)
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import (
    Done,
    Frame,
    HistoryLogits,
    KvExported,
    KvImported,
    KvPark,
    KvWant,
    Progress,
    QueuePlace,
    Tokens,
)
from kakeya.generation.kv import NO_KV, KvExchange, KvOffer, PageRef
from kakeya.generation.request import DecodeRequest
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from kakeya.wire.channels import (
    Keepalive,
    Option,
    engine_options,
    open_channel,
)
from kakeya.wire.status import error_from_status, rpc_status

LEND_S = 5.0
"""After this time without an answer the engine has stopped waiting."""
CLOSE_GRACE_S = 1.0
"""How long the streams of a dead engine may take to end by themselves."""
_LOOK_EVERY_S = 0.05
"""Seconds between two looks for the socket of a child that starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryLimits:
    """The bounds of an engine that keep its memory small, in bytes; 0 = unchanged.

    `memory_bytes` bounds the process, `cache_bytes` buffers that no array uses, `kv_bytes` the KV
    of running and kept sequences together, which may be raised to `kv_most_bytes`. `max_running`
    bounds the number of sequences at the same time.
    """

    memory_bytes: int = 0
    cache_bytes: int = 0
    kv_bytes: int = 0
    kv_most_bytes: int = 0
    max_running: int = 0

    def merged(self, newer: EngineMemoryLimits) -> EngineMemoryLimits:
        """Return `newer`, with these values where `newer` has 0."""
        return EngineMemoryLimits(
            memory_bytes=newer.memory_bytes or self.memory_bytes,
            cache_bytes=newer.cache_bytes or self.cache_bytes,
            kv_bytes=newer.kv_bytes or self.kv_bytes,
            kv_most_bytes=newer.kv_most_bytes or self.kv_most_bytes,
            max_running=newer.max_running or self.max_running,
        )


def _options(keepalive: Keepalive) -> tuple[Option, ...]:
    differs: tuple[Option, ...] = (
        # Without a call the probes of its owner are enough: a ping wakes a dozen threads.
        ("grpc.keepalive_permit_without_calls", 0),
        # The socket of a child is there a moment before it takes connections. One try may take
        # long: a short limit would be a short timer, too (see `_await_socket`).
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
    )
    kept = dict(keepalive.client_options()) | dict(differs)
    return *kept.items(), *engine_options()


class EngineClient:
    """Calls one engine. A new child gets a new socket and a new client."""

    def __init__(
        self,
        name: str,
        socket: Path,
        keepalive: Keepalive,
        clock: Clock | None = None,
        lend: Callable[[KvWant], Awaitable[None]] | None = None,
    ) -> None:
        """`lend` answers the engine with new bounds where it asks for a larger KV bound."""
        self._name = name
        self._lend_kv = lend
        self._socket = socket
        self._channel = open_channel(f"unix:{socket}", _options(keepalive))
        self._stub = EngineServiceStub(self._channel)
        self._park_ids = itertools.count(1)
        self._loads = AdapterStream(name, self._stub, self._failure_of, clock or SystemClock())

    async def describe(self, timeout_s: float) -> ModelFacts:
        """Ask for the model's facts; wait for the socket, but not for the load.

        Raises DeadlineExceeded if the socket does not appear, PeerUnavailable while it loads.
        """
        with self._told():
            reply = await self._stub.Describe(
                pb.DescribeRequest(),
                timeout=await self._await_socket(timeout_s),
                wait_for_ready=True,
            )
        return facts_from_wire(reply)

    async def _await_socket(self, timeout_s: float) -> float:
        """Wait for the socket of the child; return the rest of the time.

        No call waits for it: a channel that looks by connecting sets short timers, after which
        gRPC's timers wake this process at several moments of each second, until it ends.
        """
        end = asyncio.get_running_loop().time() + timeout_s
        while (left_s := end - asyncio.get_running_loop().time()) > 0:
            if await asyncio.to_thread(self._socket.exists):
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        return max(0.0, left_s)

    async def decode(
        self, request: DecodeRequest, timeout_s: float, offer: KvOffer = NO_KV
    ) -> AsyncGenerator[Frame, None]:
        """Stream the frames of one decode. Closing the iterator cancels the call.

        Raises PeerUnavailable if the engine is lost, InvariantBroken if a law broke in it,
        PeerProtocol for a stream without an end.
        """
        park_id = next(self._park_ids) if request.kv is not None else 0
        after_load = self._loads.under_way(request.adapter_id)
        lending: set[asyncio.Task[None]] = set()
        with self._told():  # the client may have been closed during the offer
            asked = job_to_wire(request, offer, park_id, after_load)
            call = self._stub.Decode(asked, timeout=timeout_s)
        try:
            with self._told():
                async for message in call:
                    for frame in frames_from_wire(message):
                        if isinstance(frame, Tokens | Progress | Done):
                            yield frame
                            if isinstance(frame, Done):
                                return
                        elif isinstance(frame, KvPark | KvWant):
                            answer = self._lent(park_id, frame, request.kv)
                            lending.add(task := asyncio.create_task(answer))
                            task.add_done_callback(lending.discard)
                        elif isinstance(frame, QueuePlace):
                            if request.wait is not None:
                                request.wait.place = frame
                        elif request.kv is not None:
                            _tell(request.kv, frame)
            raise PeerProtocol(f"{self._name}: the decode stream ended without a done frame")
        finally:
            call.cancel()
            for task in lending:
                task.cancel()

    async def _lent(self, park_id: int, asked: KvPark | KvWant, kv: KvExchange | None) -> None:
        """Answer a generation that asks for memory, or gives pages back."""
        if isinstance(asked, KvPark):
            if kv is not None:
                await self._lend_pages(park_id, asked, kv)
        elif self._lend_kv is not None:
            await self._lend_kv(asked)

    async def _lend_pages(self, park_id: int, asked: KvPark, kv: KvExchange) -> None:
        pages = await kv.park(asked.lengths)
        if not asked.lengths:
            return
        request = pb.LendPagesRequest(
            park_id=park_id, pages=map(page_ref_to_wire, pages), number=asked.number
        )
        # If the answer does not arrive, the engine goes on without pages.
        with contextlib.suppress(KakeyaError), self._told():
            await self._stub.LendPages(request, timeout=LEND_S)

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float | None,
        num_steps: int = 1,
        states: HiddenStates | None = None,
        timeout_s: float,
    ) -> Draft:
        """Draft at most `size` tokens after `prefix` with this engine's model."""
        request = pb.DraftRequest(
            token_ids_le32=pack_ids(prefix),
            size=size,
            seed=seed,
            temperature=temperature,
            num_steps=num_steps,
            states=states_to_wire(states) if states is not None else None,
        )
        with self._told():
            reply = await self._stub.Draft(request, timeout=timeout_s)
        return Draft(
            source=self._name,
            tokens=tuple(reply.token_ids),
            confidence=tuple(reply.confidence),
            forward_passes=reply.forward_passes,
            diffusion_steps=reply.diffusion_steps,
            peak_activation_bytes=reply.peak_activation_bytes,
            draft_us=reply.draft_us,
        )

    async def embed(self, texts: Sequence[Sequence[int]], size: int, timeout_s: float) -> bytes:
        """Return the vectors of texts, one behind the other; `size` 0 = whole ones."""
        request = pb.EmbedRequest(token_ids_le32=map(pack_ids, texts), size=size)
        with self._told():
            reply = await self._stub.Embed(request, timeout=timeout_s)
        return reply.vectors_le_f32

    async def release(self, kv_key: str, timeout_s: float) -> None:
        """Forget the KV of one key."""
        with self._told():
            await self._stub.Release(pb.ReleaseRequest(kv_key=kv_key), timeout=timeout_s)

    async def stats(self, timeout_s: float) -> EngineStats:
        """Return live figures of the engine."""
        with self._told():
            reply = await self._stub.Stats(pb.StatsRequest(), timeout=timeout_s)
        return stats_from_wire(reply)

    async def set_limits(
        self, limits: EngineMemoryLimits, timeout_s: float, free_bytes: int | None = None
    ) -> Footprint:
        """Bound the memory of the engine; 0 = unchanged. With `free_bytes`, which could be lent
        beside that now, it is the answer to a KvWant.

        Raises MemoryRefused if the model alone takes more, InvalidArgument for a KV bound in which
        no sequence fits.
        """
        request = pb.SetLimitsRequest(
            memory_bytes=limits.memory_bytes,
            cache_bytes=limits.cache_bytes,
            kv_bytes=limits.kv_bytes,
            kv_most_bytes=limits.kv_most_bytes,
            answers_want=free_bytes is not None,
            kv_free_bytes=free_bytes or 0,
            max_running=limits.max_running,
        )
        with self._told():
            return footprint_from_wire(await self._stub.SetLimits(request, timeout=timeout_s))

    async def shrink(self, size: int, timeout_s: float) -> Footprint:
        """Ask the engine to free up to `size` unused bytes."""
        with self._told():
            reply = await self._stub.Shrink(pb.ShrinkRequest(bytes=size), timeout=timeout_s)
        return footprint_from_wire(reply)

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Load an adapter from pages into a free slot or that of an idle adapter; return the bytes
        of all slots.

        `sent` is called when the load is sent. A later decode with the adapter runs after the load,
        and ends with NotFound if the load fails. The engine delays its answer a little for such a
        decode.

        Raises MemoryRefused without a slot or room, InvalidArgument if the adapter does not fit the
        model, Conflict if the other adapter is in use, UnknownMethod if the engine takes no
        adapters.
        """
        load = pb.AdapterLoad(
            adapter_id=adapter_id,
            pages=page_ref_to_wire(ref),
            instead_of=instead_of,
            is_followed=sent is not None,
        )
        return (await self._loads.load(load, timeout_s, sent)).bytes

    async def unload_adapter(self, adapter_id: str, timeout_s: float) -> bool:
        """Free an adapter's slot; False if it had none. Raises Conflict if it is in use."""
        request = pb.UnloadAdapterRequest(adapter_id=adapter_id)
        with self._told():
            return (await self._stub.UnloadAdapter(request, timeout=timeout_s)).was_loaded

    async def answers(self, timeout_s: float) -> bool:
        """Whether the engine's event loop answers within `timeout_s`; its model may be busy."""
        return await self.look(timeout_s) is not None

    async def look(self, timeout_s: float) -> tuple[ModelFacts, float] | None:
        """Return the model's facts, and the seconds since its thread began its current step.

        None = no answer.
        """
        try:
            with self._told():
                reply = await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except KakeyaError:
            return None
        return facts_from_wire(reply), reply.model_thread_silent_seconds

    async def keep(self, timeout_s: float) -> None:
        """Do nothing: its KV is in the agent's pages already."""

    async def aclose(self) -> None:
        """Close the channel; running streams get a moment to end by themselves."""
        await self._loads.aclose()  # this call does not end by itself
        await self._channel.close(grace=CLOSE_GRACE_S)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Translate the failure of a call.

        Closing the channel cancels its calls. Their callers are not cancelled: for them the engine
        is lost.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failure_of(*rpc_status(error)) from None
        except grpc.aio.UsageError:
            raise PeerUnavailable(f"{self._name}: the connection was closed") from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise PeerUnavailable(f"{self._name}: the connection was closed") from None

    def _failure_of(
        self, code: grpc.StatusCode | None, details: str, said: Mapping[str, str]
    ) -> KakeyaError:
        match code:
            case grpc.StatusCode.CANCELLED:
                # An engine that shuts down cancels its calls: the engine is lost too.
                return PeerUnavailable(f"{self._name}: {details}")
            case grpc.StatusCode.FAILED_PRECONDITION:
                kind, _, detail = details.partition(": ")
                return InvariantBroken(kind, detail)
            case _:
                return error_from_status(code, details, said, self._name)


def _tell(kv: KvExchange, frame: KvImported | KvExported | HistoryLogits) -> None:
    """Hand a frame to its KV exchange."""
    match frame:
        case KvImported():
            kv.imported(frame.tokens)
        case KvExported():
            kv.exported(frame.index, frame.tokens)
        case HistoryLogits():
            kv.history_logits(frame.logits)
