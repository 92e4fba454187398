"""One generation from its request to its last frame, through losses of its engines.

hold     adapter, prefix turn, memory, place at the engine: taken in this order, given back in
         reverse; the only place where a generation waits
stream   frames of one engine; only the `Continuation` counts committed tokens
after    the end of the stream is a value, and a table gives the next step (`endings`)
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from kakeya.adapters.lease import AdapterUse
from kakeya.adapters.manager import AdapterWish
from kakeya.backends import endings
from kakeya.backends.attempted import AttemptedModel, wait_of
from kakeya.backends.engine.engine import Engine
from kakeya.backends.engine.life import EngineLife
from kakeya.backends.recent_prompts import RecentPrompts
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.generation.config import WAIT_S
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done, Frame, Usage
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.prefix.request.exchange import PrefixExchange

_log = logging.getLogger(__name__)


class Attempt:
    """See the module. `exchange` makes a request's part in the KV of prompts, None = none.
    Without a deadline a request waits `patience_s` for its adapter. `recent` counts its prompt."""

    def __init__(
        self,
        request: DecodeRequest,
        model: AttemptedModel,
        *,
        clock: Clock,
        exchange: Callable[[DecodeRequest], PrefixExchange | None] = lambda _: None,
        adapter: AdapterWish | None = None,
        patience_s: float = WAIT_S,
        on_usage: Callable[[Usage], None] = lambda _: None,
        recent: RecentPrompts | None = None,
    ) -> None:
        self._request = request
        self._model = model
        self._clock = clock
        self._make_exchange = exchange
        self._wish = adapter
        self._patience_s = patience_s
        self._on_usage = on_usage
        self._recent = recent
        self.job = Continuation(request, clock.mono())
        self._source: EngineLife | None = None
        self._lost: Engine | None = None
        self._use: AdapterUse | None = None
        self._exchange: PrefixExchange | None = None
        self._exchanged = ""
        self.is_held = True
        """Whether it waits for its resources or has them."""
        self.waits_for: WaitReason | None = None
        """None while an engine works."""
        self._teller = request.wait
        if self._teller is not None:
            self._teller.ask = self._wait

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last, after all resources are given back.

        Raises the errors of acquiring, and PeerUnavailable if no engine can finish it.
        """
        job, mono = self.job, self._clock.mono
        ending: endings.AttemptEnding | None = None
        async with AsyncExitStack() as held:
            if self._recent is not None:
                job.on_begin = held.enter_context(self._recent.prompt(mono))
            while not isinstance(ending, Done):
                source = self._source or await self._hold(held)
                engine = await self._engine(source)
                try:
                    async with self._stream(engine) as frames:
                        kv = self._exchange
                        while not isinstance(ending, Done):
                            is_raced = kv is not None and kv.may_be_superseded
                            coming = kv.next(frames) if kv and is_raced else anext(frames)
                            frame = job.take(await coming, mono())
                            if kv is not None and frame is not None:
                                kv.saw(frame)
                            if isinstance(frame, Done):
                                ending = frame
                            elif frame is not None:
                                yield frame
                except endings.FAILURES as failure:
                    ending = self._ending(source, engine.reason(failure))
                match endings.after(ending, job):
                    case endings.EndWith(error):
                        raise error from None
                    case endings.Retry() as retry:
                        ending = await self._retry(retry, ending, engine, held)
        self._on_usage(ending.usage)
        yield ending

    def _wait(self) -> RequestWait | None:
        """For what the generation waits; None once its answer has begun."""
        if self.job.has_begun or self._teller is None:
            return None
        return wait_of(self._model, self.job, self.waits_for, self._teller.place)

    async def _hold(self, held: AsyncExitStack) -> EngineLife:
        """Take the resources of a generation in order; `waits_for` names the current one."""
        self.is_held = True
        held.callback(setattr, self, "is_held", False)
        if self._wish is not None:
            self.waits_for = WaitReason.ADAPTER
            self._use = held.enter_context(await self._adapter(self._wish))
        rest = replace(self._rest(), kv=self._request.kv)
        if self._exchange is None or self._exchanged != rest.adapter_id:
            self._exchange, self._exchanged = self._make_exchange(rest), rest.adapter_id
        if self._exchange is not None:
            self.waits_for = WaitReason.PREFIX
            held.enter_context(self._exchange)
            await self._exchange.approach(rest.deadline_s)
        self.waits_for = WaitReason.MEMORY
        source = await held.enter_async_context(self._model.lend_for(self._rest()))
        self.waits_for = WaitReason.HELD
        await held.enter_async_context(source.gate.turn(rest.client, rest.user))
        self._source = source
        return source

    async def _adapter(self, wish: AdapterWish) -> AdapterUse:
        """Acquire the adapter: after the first token the version of the start, else the newest."""
        left_s = self._rest().deadline_s
        patience_s = self._patience_s if left_s is None else left_s
        await self._model.ready(patience_s, self._request.priority)
        begun = self._use.record if self._use is not None and self.job.has_begun else None
        return await wish.acquire(patience_s, begun)

    async def _engine(self, source: EngineLife) -> Engine:
        """Wait for an engine, at most until the request's deadline."""
        self.waits_for = WaitReason.RESTART
        if self._teller is not None:
            self._teller.place = None
        left_s, most_s = self._rest().deadline_s, source.options.resume_timeout_s
        patience_s = most_s if left_s is None else min(left_s, most_s)
        return await source.serving(patience_s, other_than=self._lost)

    @asynccontextmanager
    async def _stream(self, engine: Engine) -> AsyncIterator[AsyncGenerator[Frame, None]]:
        """Open the frames of one engine, which starts from the offered blocks."""
        kv, offer = self._rest().kv, KvOffer()
        try:
            if kv is not None:
                self.waits_for = WaitReason.PREFIX
                offer = await kv.offer(self._rest().token_ids, engine.pid)
            self.waits_for = None
            async with aclosing(engine.decode(self._rest(), offer)) as frames:
                yield frames
        finally:
            if kv is not None:
                kv.ended()

    def _rest(self) -> DecodeRequest:
        """Return the request for the tokens that are left."""
        rest = self.job.rest(self._clock.mono())
        if self._use is not None:
            rest = replace(rest, adapter_id=self._use.adapter_id)
        return rest if self._exchange is None else replace(rest, kv=self._exchange)

    def _ending(self, source: EngineLife, failure: Exception) -> endings.AttemptEnding:
        """Return the ending of a failure. Raises the failure if it is not an ending."""
        model_id = self._model.model_id
        ending = endings.ending_of(
            failure,
            self.job,
            model_id=model_id,
            adapter=self._wish.model_id if self._wish is not None else "",
            is_alone=source.gate.running + source.gate.waiting <= 1,
            most=source.options.max_losses_in_a_row,
            retry_after_s=source.retry_after_s(),
        )
        if isinstance(ending, endings.EngineLost):
            said = str(ending.error)
            event(_log, "decode lost its engine", level=logging.WARNING, model=model_id, error=said)
        if isinstance(ending, endings.AdapterUnknown) and self._wish and self._use:
            self._wish.adapters.lost(self._use)
        return ending

    async def _retry(
        self,
        retry: endings.Retry,
        ending: endings.AttemptEnding,
        engine: Engine,
        held: AsyncExitStack,
    ) -> Done | None:
        """Prepare another try; return the last frame if the committed tokens need none."""
        self._lost = None
        if isinstance(ending, endings.EngineLost) and self._source is not None:
            is_lost = await self._source.is_lost(engine, ending.error)
            self._lost = engine if is_lost else None
        if isinstance(ending, endings.MakeWay):
            why = ending.refusal.message
            event(_log, "decode makes way", model=self._model.model_id, reason=why)
        if retry.gives_back:
            self._source = None
            await held.aclose()
        await self._clock.sleep(retry.in_s)
        facts, now = self._model.facts, self._clock.mono()
        return None if facts is None else self.job.finish(facts.context_tokens, now)
