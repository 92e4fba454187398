"""A model of this node, in memory or not: the object that callers keep while engines come and go.

    decode    holds a lease while it runs; a request for an absent model waits in the arbiter's
              queue until the model is loaded
    embed     likewise, of an encoder
    draft     holds a lease too, but only of a model in memory: no draft waits
    failed    an engine that was given up leaves the ledger; the first request after a pause loads
              the model again; each pause is longer than the last one

The arbiter decides whether and when a model is loaded; `EngineHandler` carries it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakSet

from kakeya.adapters.manager import AdapterWish
from kakeya.backends.attempt import Attempt
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.failures import ModelFailures
from kakeya.backends.llama.plan import text_source
from kakeya.backends.run_times import RunTimes
from kakeya.backends.terms import DRAFT_TERMS, decode_terms, terms_within
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    InvariantBroken,
    ModelLoading,
    PeerUnavailable,
)
from kakeya.core.figures import Json
from kakeya.decoding.draft.proposer import Draft
from kakeya.generation.config import WAIT_S
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState, RequestLoad
from kakeya.generation.frames import Frame, Usage
from kakeya.generation.manifest import Category
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import ModelRole, ModelSpec, resolve
from kakeya.generation.waiting import RequestWait
from kakeya.memory.api import PLAIN, Handle, MemoryArbiter, Terms
from kakeya.memory.arbiter.events import CapabilityRun
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.arbiter.resident import Resident, ResidentKey, State
from kakeya.prefix.prefixes import NodePrefixes
from kakeya.prefix.request.exchange import PrefixExchange

TEXT, DRAFT, EMBED = "text", "draft", "embedding"
"""The capabilities of verifiers, of draft models and of embedders."""
CAPABILITY_OF = {
    ModelRole.VERIFIER: TEXT,
    ModelRole.PROPOSER: DRAFT,
    ModelRole.EMBEDDER: EMBED,
}


class ResidentModel:
    """A `ServedModel`, and a proposer for peers, on top of successive engines."""

    def __init__(
        self,
        spec: ModelSpec,
        memory: MemoryArbiter,
        *,
        clock: Clock,
        on_change: Callable[[ResidentModel], None],
        patience_s: float = WAIT_S,
    ) -> None:
        """A request without a deadline waits `patience_s` for the model."""
        self._spec = spec
        self._memory = memory
        self._clock = clock
        self._on_change = on_change
        self._patience_s = patience_s
        self._facts: ModelFacts | None = None
        self.failures = ModelFailures(spec.model_id, clock.mono)
        self._earlier_restarts = 0
        self._asking = 0
        self._runs = RunTimes()
        self._attempts: WeakSet[Attempt] = WeakSet()
        self._is_expected = True
        self._is_settled = False
        self._rests = False
        self._ending: EngineBackend | None = None
        self.manifest = spec.manifest
        """What its owner says of it at this moment."""
        self.backend: EngineBackend | None = None
        """The live engine; None while the model is not in memory."""
        self.prefixes: NodePrefixes | None = None
        """The store of the KV of prompts; None = none is kept."""
        self.on_usage: Callable[[Usage], None] = lambda _: None
        """Called with the usage of each whole decode."""

    # For callers

    @property
    def model_id(self) -> str:
        """The id that callers use."""
        return self._spec.model_id

    @property
    def role(self) -> ModelRole:
        """The role for which the model is served."""
        return self._spec.role

    @property
    def category(self) -> Category:
        """The kind of the model's work."""
        return self._spec.category

    @property
    def capability(self) -> str:
        """The model's capability in the arbiter."""
        return CAPABILITY_OF[self._spec.role]

    @property
    def resident(self) -> Resident | None:
        """The model's entry in the ledger; None = it is not in memory."""
        return self._memory.find(self.capability, self.model_id)

    @property
    def state(self) -> ModelState:
        """The current state of the model."""
        if self.backend is not None and self.backend.state is not ModelState.STOPPED:
            is_ready = self.backend.state is ModelState.READY
            return ModelState.LOADING if is_ready and not self._is_settled else self.backend.state
        if self.failures.reason:
            return ModelState.FAILED
        resident = self.resident
        is_coming = resident is not None and resident.state is State.LOADING
        return ModelState.LOADING if is_coming or self._is_expected else ModelState.UNLOADED

    @property
    def last_error(self) -> str:
        """The reason of FAILED or RESTARTING, in one sentence; "" otherwise."""
        if self.backend is not None and self.backend.last_error:
            return self.backend.last_error
        return self.failures.reason

    @property
    def folder(self) -> Path | None:
        """See `ServedModel`."""
        with contextlib.suppress(ConfigError):
            found = text_source(resolve(self._spec))
            return found if found.is_dir() else None
        return None

    def waits_for(self) -> RequestWait | None:
        """See `ServedModel`."""
        if self.backend is not None and (load := self.backend.waits_for()):
            left_s = self._memory.load_left_s(self.capability, self.model_id)
            return replace(load, seconds=left_s or None)
        return self._memory.wait_of(self.capability, self.model_id)

    def load_status(self, now_mono: float) -> Json | None:
        """Return how far the load of the model is, as JSON; None while it does not load."""
        backend = self.backend
        if backend is None or backend.progress is None:
            return None
        return {
            "at": backend.progress.describe(),
            "phase": backend.progress.phase.name.lower(),
            "done_bytes": backend.progress.done_bytes,
            "total_bytes": backend.progress.total_bytes,
            "seconds": round(now_mono - backend.began_mono, 1),
        }

    @property
    def facts(self) -> ModelFacts | None:
        """The facts from the model's last engine; None before the first one was ready."""
        if self.backend is not None and self.backend.facts is not None:
            return self.backend.facts
        return self._facts

    @property
    def can_serve(self) -> bool:
        """Whether a request at this moment would be served, or, of a drafter that left for
        idleness, bring it back."""
        state = self.state
        if state is ModelState.READY:
            return True
        is_away = state is ModelState.UNLOADED or (state is ModelState.LOADING and self.facts)
        if not is_away or (self.role is ModelRole.PROPOSER and not self._rests):
            return False
        return self._memory.would_grant(self.capability, self.model_id)

    @property
    def pid(self) -> int | None:
        """The engine's process id, also while the engine ends; None without an engine."""
        backend = self.backend or self._ending
        return None if backend is None else backend.pid

    @property
    def restarts(self) -> int:
        """How often an engine of the model was restarted after its death."""
        return self._earlier_restarts + (self.backend.restarts if self.backend else 0)

    @property
    def running(self) -> int:
        """The number of decodes that hold a place."""
        return 0 if self.backend is None else self.backend.running

    @property
    def waiting(self) -> int:
        """The number of decodes that wait for the model or for a place."""
        return self._asking + (self.backend.waiting if self.backend else 0)

    @property
    def load(self) -> RequestLoad:
        """The generations that hold the model or wait for it."""
        jobs = [attempt.job for attempt in self._attempts if attempt.is_held]
        left = [job.prompt_left(self.held_tokens) for job in jobs if not job.has_begun]
        return RequestLoad(
            answers=tuple(job.tokens for job in jobs if job.has_begun),
            waiting=len(left),
            waiting_tokens=sum(left),
        )

    @property
    def load_s(self) -> float | None:
        """Seconds until the model serves, if it were asked for now; None = not known."""
        if self.state is ModelState.READY:
            return 0.0
        left_s = self._memory.load_left_s(self.capability, self.model_id)
        known_s = self.facts.load_s if self.facts is not None else 0.0
        return left_s or known_s or None

    @property
    def refusal(self) -> str:
        """Why a request would be refused now; "" = it would not."""
        if not self.failures.may_load:
            return self.failures.reason
        if self.state is ModelState.READY or self._memory.would_grant(
            self.capability, self.model_id
        ):
            return ""
        return f"there is no room for {self.model_id} now"

    def held_tokens(self, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
        """How many leading tokens of a history have their KV in pages or on disk."""
        if self.prefixes is None:
            return 0
        return self.prefixes.held(self.model_id, token_ids, cuts)

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """Return the facts of the model; load it, in its turn, if it was never in memory.

        Raises ModelLoading if that takes longer, PeerUnavailable if the model is given up, and the
        arbiter's errors.
        """
        self.failures.check()
        if self._facts is None:
            async with self.lend(terms_within(timeout_s, priority)):
                pass
        if self.facts is None:
            raise InvariantBroken("a loaded model has facts", self.model_id)
        return self.facts

    def decode(
        self, request: DecodeRequest, adapter: AdapterWish | None = None
    ) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        Raises the errors of the engine's decode, MemoryRefused and DrainTimeout if no room can be
        made, ModelLoading if the request's time is too short for a load; with an
        adapter, the errors of acquiring it.
        """
        attempt = Attempt(
            request,
            self,
            clock=self._clock,
            exchange=self._exchange,
            adapter=adapter,
            patience_s=self._patience_s,
            on_usage=partial(self.used, request),
        )
        self._attempts.add(attempt)
        return attempt.frames()

    def used(self, request: DecodeRequest, usage: Usage) -> None:
        """Note what a whole generation took."""
        if request.priority is not GenerationPriority.SPECULATIVE:  # such prompts rest in between
            self._runs.add(request, usage.total_s, self._clock.mono())
        self.on_usage(usage)

    def _exchange(self, request: DecodeRequest) -> PrefixExchange | None:
        return None if self.prefixes is None else self.prefixes.exchange(self, request)

    @asynccontextmanager
    async def lend_for(self, request: DecodeRequest) -> AsyncIterator[EngineBackend]:
        """Hold the model's engine for a request; wait for it until the request's deadline."""
        terms = decode_terms(request)
        if request.deadline_s is not None:
            terms = replace(terms, run_s=self._runs.longest_s(request, self._clock.mono()))
        async with self.lend(terms) as backend:
            with self._run():
                try:
                    yield backend
                finally:
                    if request.stay_warm_s:
                        self._memory.keep_warm(self.capability, self.model_id, request.stay_warm_s)

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        """See `EmbeddingModel`. Raises the errors of the arbiter as `decode`."""
        async with self.lend() as backend:
            with self._run():
                return await backend.embed(texts, size=size, client=client, user=user)

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
    ) -> Draft:
        """Draft with this model if it is in memory. Raises PeerUnavailable if it is not; one that
        left for idleness then comes back as room allows."""
        handle = self._memory.try_acquire(self.capability, self.model_id, DRAFT_TERMS)
        if handle is None:
            self._rests = False
            raise PeerUnavailable(f"draft model {self.model_id} is not in memory now")
        with handle, self._run():
            backend = _backend_of(handle)
            return await backend.draft(prefix, size, seed=seed, temperature=temperature)

    async def release(self, kv_key: str) -> None:
        """Forget the KV of a key; an unknown key or an absent model is ignored."""
        if self.backend is not None:
            await self.backend.release(kv_key)

    async def is_past(self, pid: int) -> bool:
        """Whether the engine process answered from its model thread: it has finished all calls that
        were cut off before."""
        backend = self.backend
        if backend is None or backend.pid != pid:
            return False
        return await backend.footprint() is not None and backend.pid == pid

    async def stats(self) -> EngineStats:
        """Return live figures of the engine; zeros without one."""
        return EngineStats() if self.backend is None else await self.backend.stats()

    # For the handler

    def opened(self, backend: EngineBackend) -> None:
        """Note that an engine begins to load."""
        self._is_expected = False
        self._is_settled = False
        self.backend = backend
        self._on_change(self)

    def settled(self, facts: ModelFacts) -> None:
        """Note that the engine is loaded, measured and within its limits."""
        self._facts = facts
        self.failures.clear()
        self._rests = False
        self._is_settled = True
        self._on_change(self)

    def closed(self) -> None:
        """Note that the engine is about to be ended."""
        if self.backend is not None:
            self._facts = self.backend.facts or self._facts
            self._earlier_restarts += self.backend.restarts
            self._ending = self.backend
        self.backend = None
        self._on_change(self)

    def ended(self) -> None:
        """Note that the process of the engine has ended."""
        self._ending = None
        self._on_change(self)

    def left_idle(self) -> None:
        """Note that the model left memory because no caller used it."""
        self._rests = True
        self._on_change(self)

    def not_expected(self) -> None:
        """Note that there was no room to load the model at the start."""
        if self._is_expected:
            self._is_expected = False
            self._on_change(self)

    def load_failed(self, reason: str) -> None:
        """Note that the model could not be loaded."""
        if self.failures.may_load:
            self.failures.note(reason)
        self._on_change(self)

    def engine_changed(self) -> None:
        """Note a change of the engine's state. A failed engine leaves memory when it is unused."""
        backend = self.backend
        if backend is not None and backend.state is ModelState.FAILED:
            self.failures.note(backend.last_error)
            self._drop_failed()
        self._on_change(self)

    @property
    def may_come_back(self) -> bool:
        """Whether the model is loaded without a request when there is room: a drafter unless it
        left for idleness and no draft was asked since, others only if they were never tried."""
        if self.role is ModelRole.PROPOSER:
            return self.failures.may_load and not self._rests
        return self._facts is None and not self.failures.reason

    # Holding it

    @asynccontextmanager
    async def lend(self, terms: Terms = PLAIN) -> AsyncIterator[EngineBackend]:
        """Hold the model's engine, which is started if needed.

        Waits for the model's `patience_s` if the terms have no deadline. Raises as `decode`.
        """
        self.failures.check()
        terms = replace(terms, may_displace_text=self.manifest.may_displace_text)
        if terms.timeout_s == FOREVER:
            terms = replace(terms, timeout_s=self._patience_s)
        try:
            async with AsyncExitStack() as stack:
                handle = self._at_hand(terms)
                if handle is not None:
                    stack.enter_context(handle)
                else:
                    lease = self._memory.acquire(self.capability, self.model_id, terms)
                    handle = await self._waited(stack.enter_async_context(lease))
                yield _backend_of(handle)
        finally:
            self._drop_failed()

    def _at_hand(self, terms: Terms) -> Handle | None:
        """Take a handle of the model if it is in memory and stays; None = the caller must wait.

        This skips the arbiter's queue, which costs more than loading an adapter.
        """
        if terms.timeout_s <= 0:
            return None
        return self._memory.try_acquire(self.capability, self.model_id, terms)

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Tell the arbiter's listeners of a run, as the arbiter does of its own runs."""
        began_mono, is_failed = self._clock.mono(), True
        try:
            yield
            is_failed = False
        finally:
            run_s = self._clock.mono() - began_mono
            key = ResidentKey(self.capability, self.model_id)
            self._memory.tell(CapabilityRun(key=key, run_s=run_s, is_failed=is_failed))

    async def _waited(self, way: Coroutine[object, object, Handle]) -> Handle:
        """Count a wait for the model; an error of its time says what the model does."""
        self._asking += 1
        try:
            return await way
        except ModelLoading as late:
            if waits := self.waits_for():
                late.message += f" ({waits.describe()})"
            raise
        finally:
            self._asking -= 1

    def bar(self, reason: str) -> None:
        """Load the model no more, for a reason in words; "" = load it again."""
        if self.failures.bar(reason):
            self._drop_failed()
            self._on_change(self)

    def _drop_failed(self) -> None:
        resident = self.resident
        if self.failures.reason and resident is not None and resident.is_idle:
            self._memory.unload(self.capability, self.model_id)


def _backend_of(handle: Handle) -> EngineBackend:
    backend = handle.backend
    if not isinstance(backend, EngineBackend):
        raise InvariantBroken("models are engines", f"{handle.key}: {backend!r}")
    return backend
