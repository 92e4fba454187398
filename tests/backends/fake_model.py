"""A model in this process whose only engine is a function of the test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from kakeya.adapters.manager import AdapterWish
from kakeya.backends.attempt import Attempt
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.gate import Gate
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import PeerUnavailable
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Frame
from kakeya.generation.kv import KvOffer
from kakeya.generation.manifest import NO_MANIFEST
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait

Decode = Callable[[DecodeRequest, KvOffer], AsyncGenerator[Frame, None]]


@dataclass(eq=False)
class FakeEngine:
    decode: Decode
    pid: int = 1

    def reason(self, failure: Exception) -> Exception:
        return failure


class FakeModel:
    """What a generation needs of a model, and of its engines: where one is lost, `next_engine`
    makes another."""

    state = ModelState.READY
    last_error = ""
    manifest = NO_MANIFEST

    def __init__(
        self,
        decode: Decode,
        *,
        model_id: str = "fake",
        clock: Clock | None = None,
        pid: int = 1,
        context_tokens: int = 99,
    ) -> None:
        self.model_id = model_id
        self.clock = clock or SystemClock()
        self.facts: ModelFacts | None = ModelFacts(
            model_id=model_id,
            model_path="",
            vocab_size=99,
            context_tokens=context_tokens,
            eos_token_ids=(),
        )
        self.gate = Gate(f"model {model_id}", max_running=8, max_waiting=64, mono=self.clock.mono)
        self.options = EngineOptions()
        self.engine = FakeEngine(decode, pid)
        self.next_engine: Callable[[], FakeEngine] | None = None
        self.losses: list[str] = []

    @property
    def folder(self) -> None:
        return None

    def waits_for(self) -> RequestWait | None:
        return None

    def prompts_s(self, job: Continuation) -> float:
        return 0.0

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        assert self.facts is not None
        return self.facts

    async def serving(self, timeout_s: float, *, other_than: object = None) -> FakeEngine:
        if self.engine is other_than:
            raise PeerUnavailable("there is no other engine")
        return self.engine

    async def is_lost(self, engine: object, error: PeerUnavailable) -> bool:
        self.losses.append(error.message)
        if self.next_engine is None:
            return False
        self.engine = self.next_engine()
        return True

    def retry_after_s(self) -> float | None:
        return 1.0

    def lend_for(self, request: DecodeRequest) -> AbstractAsyncContextManager[FakeModel]:
        return nullcontext(self)

    def decode(
        self, request: DecodeRequest, adapter: AdapterWish | None = None, **more: object
    ) -> AsyncGenerator[Frame, None]:
        return Attempt(request, self, clock=self.clock, adapter=adapter, **more).frames()

    async def release(self, kv_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()
