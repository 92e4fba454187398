"""What an engine's life needs of the client of its child, whatever program the child is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kakeya.backends.engine.client import EngineClient, EngineMemoryLimits
from kakeya.core.clock import Clock
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import Frame, KvWant
from kakeya.generation.kv import KvOffer, PageRef
from kakeya.generation.progress import LoadProgress
from kakeya.generation.request import DecodeRequest
from kakeya.wire.channels import Keepalive


class ChildClient(Protocol):
    """Calls one engine child. What the child cannot do raises UnknownMethod or Unsupported."""

    async def describe(self, timeout_s: float) -> ModelFacts:
        """Return the model's facts. Raises DeadlineExceeded if the socket does not appear,
        PeerUnavailable while the model loads."""
        ...

    def decode(
        self, request: DecodeRequest, timeout_s: float, offer: KvOffer = ...
    ) -> AsyncGenerator[Frame, None]:
        """Stream the frames of one decode; closing the iterator cancels it. Raises PeerUnavailable
        if the engine is lost."""
        ...

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
        """Draft at most `size` tokens after `prefix`."""
        ...

    async def embed(self, texts: Sequence[Sequence[int]], size: int, timeout_s: float) -> bytes:
        """Return the vectors of texts, one behind the other."""
        ...

    async def release(self, kv_key: str, timeout_s: float) -> None:
        """Forget the KV of one key."""
        ...

    async def stats(self, timeout_s: float) -> EngineStats:
        """Return live figures."""
        ...

    async def set_limits(
        self, limits: EngineMemoryLimits, timeout_s: float, free_bytes: int | None = None
    ) -> Footprint:
        """Bound the memory of the engine."""
        ...

    async def shrink(self, size: int, timeout_s: float) -> Footprint:
        """Free up to `size` unused bytes."""
        ...

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Load an adapter; return the bytes of all slots."""
        ...

    async def unload_adapter(self, adapter_id: str, timeout_s: float) -> bool:
        """Free an adapter's slot."""
        ...

    async def answers(self, timeout_s: float) -> bool:
        """Whether the process answers."""
        ...

    async def look(self, timeout_s: float) -> tuple[ModelFacts, float] | None:
        """Return the facts and the age in seconds of the current step; None = no answer."""
        ...

    async def keep(self, timeout_s: float) -> None:
        """Save the KV that a later child can take up, before this one is ended in order; as much
        as that time allows."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A spawned child, for its client; `lend` and `on_progress` are answered by its life."""

    model_id: str
    pid: int
    socket: Path
    keepalive: Keepalive
    clock: Clock
    lend: Callable[[KvWant], Awaitable[None]]
    on_progress: Callable[[LoadProgress], None]


def engine_client(child: Child) -> EngineClient:
    """The client of an engine that is part of this package."""
    return EngineClient(child.model_id, child.socket, child.keepalive, child.clock, lend=child.lend)
