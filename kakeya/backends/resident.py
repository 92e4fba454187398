"""A model of this node, in memory or not: the object that callers keep while engines come and go.

    decode    holds a lease while it runs; a request for an absent model waits in the arbiter's
              queue until the model is loaded
    embed     likewise, of an encoder
    draft     holds a lease too, but only of a model in memory: no draft waits

The engines themselves are followed in `model_life`.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
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
from kakeya.backends.llama.plan import text_source
from kakeya.backends.model_life import ModelLife
from kakeya.backends.prompts_in_flight import PromptsInFlight
from kakeya.backends.recent_prompts import RecentPrompts
from kakeya.backends.run_times import RunTimes
from kakeya.backends.terms import DRAFT_TERMS, decode_terms, terms_within
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    InvariantBroken,
    ModelLoading,
    PeerUnavailable,
)
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.config import WAIT_S
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import (
    EngineStats,
    ModelFacts,
    ModelState,
    PromptsAlike,
    RequestLoad,
)
from kakeya.generation.frames import Frame, Usage
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.spec import ModelRole, ModelSpec, resolve
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.memory.api import PLAIN, Handle, MemoryArbiter, Terms
from kakeya.memory.arbiter.events import CapabilityRun
from kakeya.memory.arbiter.plan import FOREVER
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.prefix.prefixes import NodePrefixes
from kakeya.prefix.request.exchange import PrefixExchange

_LINE_S = 1.0
"""So long the prompts that wait for a model are told to each of them: there may be hundreds."""


class ResidentModel(ModelLife):
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
        super().__init__(spec, memory, mono=clock.mono, on_change=lambda: on_change(self))
        self._clock = clock
        self._patience_s = patience_s
        self._asking = 0
        self._runs = RunTimes()
        self._told_facts: tuple[ModelFacts, ModelFacts] | None = None
        """Those of the engine, and those with what real prompts told."""
        self._recent = RecentPrompts(clock.mono())
        self._attempts: WeakSet[Attempt] = WeakSet()
        self._prompts = PromptsInFlight()
        self._line: list[tuple[GenerationPriority, int]] = []
        self._line_until_mono = -math.inf
        self.prefixes: NodePrefixes | None = None
        """The store of the KV of prompts; None = none is kept."""
        self.on_usage: Callable[[Usage], None] = lambda _: None
        """Called with the usage of each whole decode."""

    # For callers

    @property
    def facts(self) -> ModelFacts | None:
        """See `ServedModel`; the speed of prompts is that of real ones where the engine has not
        measured it."""
        facts, rate = super().facts, self._runs.prefill_per_s
        if facts is None or facts.prefill_tokens_per_second or not rate:
            return facts
        told = self._told_facts
        if told is None or told[0] is not facts or told[1].prefill_tokens_per_second != rate:
            told = self._told_facts = facts, replace(facts, prefill_tokens_per_second=rate)
        return told[1]

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

    @property
    def can_serve(self) -> bool:
        """Whether a request at this moment would be served, or, of a drafter that left for
        idleness, bring it back."""
        state = self.state
        if state is ModelState.READY:
            return True
        # A first load without a request may find no room; one that a request began has its room.
        is_sure = bool(self.facts) or self.is_on_demand
        is_away = state is ModelState.UNLOADED or (state is ModelState.LOADING and is_sure)
        if not is_away or (self.role is ModelRole.PROPOSER and not self._rests):
            return False
        return self._memory.would_grant(self.capability, self.model_id)

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
            prompts_per_s=self._recent.per_s(self._clock.mono()),
            busy_share=self._recent.busy_share(self._clock.mono()),
        )

    def use_s(self, waiting: int, more: int) -> float | None:
        """Seconds until the generations that hold the model have ended, or that so many take that
        wait for it, and so many more; None = not known."""
        facts, now = self.facts, self._clock.mono()
        is_new = waiting + more > 0
        held = (one for one in self._attempts if one.is_held)
        jobs = [one.job for one in held if (one.waits_for is WaitReason.MEMORY) == is_new]
        if is_new:
            jobs = jobs[:waiting]
        if facts is None or not (jobs or more):  # drafts and embeddings take moments
            return None if jobs else 0.0
        prompt_tokens = sum(job.prompt_left(self.held_tokens) for job in jobs)
        if prompt_tokens and not facts.prefill_tokens_per_second:
            return None
        prompts_s = prompt_tokens and prompt_tokens / facts.prefill_tokens_per_second
        left_s = self._runs.left_s(jobs, facts, now, more)
        return None if left_s is None else prompts_s + left_s

    def prompts_s(self, job: Continuation) -> float:
        """Seconds of the prompts that an engine computes first once it has a job and the others
        that wait for the model: of those as urgent ones that are as short, its own too."""
        facts, now = self.facts, self._clock.mono()
        if facts is None or not facts.prefill_tokens_per_second:
            return 0.0
        if now >= self._line_until_mono:
            jobs = [one.job for one in self._attempts if one.waits_for is WaitReason.MEMORY]
            self._line = sorted(self._prompt_work(one) for one in jobs)
            self._line_until_mono = now + _LINE_S
        before = self._line[: bisect_right(self._line, self._prompt_work(job))]
        return sum(tokens for _, tokens in before) / facts.prefill_tokens_per_second

    def _prompt_work(self, job: Continuation) -> tuple[GenerationPriority, int]:
        return job.priority, job.prompt_left(self.held_tokens)

    def alike(self, token_ids: Sequence[int]) -> PromptsAlike:
        """What its requests without an adapter have in common with a prompt."""
        block = self.facts.kv_block_tokens if self.facts is not None and self.prefixes else 0
        return self._prompts.alike(token_ids, block)

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

    @property
    def adapter_digest(self) -> str:
        """None: it has no adapter."""
        return ""

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

        Raises the errors of the engine's decode, MemoryRefused if no room can be made, ModelLoading
        if the request's time is too short for a load, or for the use of a model that has to go;
        with an adapter, the errors of acquiring it.
        """
        attempt = Attempt(
            request,
            self,
            clock=self._clock,
            exchange=self._exchange,
            adapter=adapter,
            patience_s=self._patience_s,
            on_usage=partial(self.used, request),
            # Prompts that are computed ahead rest for others.
            recent=None if request.priority is GenerationPriority.SPECULATIVE else self._recent,
        )
        self._attempts.add(attempt)
        if adapter is None:
            self._prompts.add(attempt, request.token_ids)
        return attempt.frames()

    def used(self, request: DecodeRequest, usage: Usage) -> None:
        """Note what a whole generation took."""
        if request.priority is not GenerationPriority.SPECULATIVE:  # such prompts rest in between
            self._runs.add(request, usage, self._clock.mono())
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
        num_steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft with this model if it is in memory. Raises PeerUnavailable if it is not; one that
        left for idleness then comes back as room allows."""
        handle = self._memory.try_acquire(self.capability, self.model_id, DRAFT_TERMS)
        if handle is None:
            self._rests = False
            raise PeerUnavailable(f"draft model {self.model_id} is not in memory now")
        with handle, self._run():
            backend = _backend_of(handle)
            return await backend.draft(
                prefix,
                size,
                seed=seed,
                temperature=temperature,
                num_steps=num_steps,
                states=states,
            )

    async def release(self, kv_key: str) -> None:
        """Forget the KV of a key; an unknown key or an absent model is ignored."""
        if self.backend is not None:
            await self.backend.release(kv_key)

    async def stats(self) -> EngineStats:
        """Return live figures of the engine; zeros without one."""
        return EngineStats() if self.backend is None else await self.backend.stats()

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


def _backend_of(handle: Handle) -> EngineBackend:
    backend = handle.backend
    if not isinstance(backend, EngineBackend):
        raise InvariantBroken("models are engines", f"{handle.key}: {backend!r}")
    return backend
