"""The work of a node ahead of requests: slots of conversations, prefixes after their turns,
declared prompts, and refreshing them while they are of use.

    request      a conversation has the slot of its model that is least loaded
    turn ended   the beginning of the next turn is warmed
    model ready  the prompts that are declared for it are warmed, after each load anew
    sweep        conversations that idle too long give their slot back, with what the engine holds
                 of them, and are looked after no more; declared prompts whose text is another by
                 now, for their files or for the date that a template writes, are warmed anew

A model's engine keeps one KV for each slot; KV that a slot lacks is found in pages by its content.
An `async with`; the APIs of the node use it as a `Precache`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, Self

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.core.figures import Figure, Json
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth, every
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.model import ModelDirectory
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.arbiter.events import Event, MemoryPressure
from kakeya.prefix.config import PrecacheConfig
from kakeya.prefix.figures import warm_figures, warm_status
from kakeya.prefix.names.keys import SYSTEM_PREFIX, derive_slot_id, resolve_key, sanitise
from kakeya.prefix.seam import (
    PrefixClaim,
    TokenSource,
    WarmReport,
    Wiped,
    warmed_for,
)
from kakeya.prefix.warm.declared import DeclaredPrompts
from kakeya.prefix.warm.for_peers import PrefixesForPeers
from kakeya.prefix.warm.prewarm import Prewarmer
from kakeya.prefix.warm.slots import (
    Conversation,
    ConversationRegistry,
    auto_parallel,
    fitting_parallel,
    slot_key,
)
from kakeya.prefix.warm.warming import Kind, Prefix, WarmSource
from kakeya.text.changing_lines import ChangingLine
from kakeya.text.text import Texts

_log = logging.getLogger(__name__)
_Slot = tuple[str, str]
"""A model, and the key of a slot's KV at its engine."""
_PIN = "pin:"
"""Begins the keys of pins, and no other key."""


class WatchedModel(Protocol):
    """A model of this node; its engine may have changed."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        ...

    @property
    def state(self) -> ModelState:
        """Its state now."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """The facts of its last engine; None before the first one was ready."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id of its engine; None while there is none."""
        ...


class NodePrecache:
    """See the module.

    `usable_bytes` is the memory that slots may be counted from; `wipe` drops all blocks of KV;
    `texts` are for HTTP too.
    """

    def __init__(
        self,
        config: PrecacheConfig,
        models: ModelDirectory,
        source: WarmSource,
        texts: Texts,
        *,
        usable_bytes: Callable[[], int],
        wipe: Callable[[], Awaitable[Wiped]],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._config = config
        self.moved_kinds: Collection[ChangingLine] = config.move_lines
        self._wipe = wipe
        self._models = models
        self.texts = texts
        self._usable_bytes = usable_bytes
        self._clock = clock
        self._rng = rng
        self._registry = ConversationRegistry()
        self._prewarmer = Prewarmer(source, clock=clock, keep_alive_s=config.keep_alive_s)
        self._tasks = Supervisor(clock)
        self._warmed_pids: dict[str, int | None] = {}
        self._told_crowded: set[str] = set()
        self._used_by: dict[_Slot, str] = {}
        self.elsewhere: Callable[[PrefixClaim, str, TokenSource], bool] = lambda *_: False
        """Takes over what is to be warm under a KV key, if another node serves its requests."""
        self.declared = DeclaredPrompts(
            config.prompts, models, texts, self._prewarmer, moved_kinds=config.move_lines
        )
        self.for_peers = PrefixesForPeers(self._prewarmer, self.declared, clock)

    async def __aenter__(self) -> Self:
        """Raises ConfigError for a declared prompt whose files or model cannot be used."""
        await asyncio.to_thread(self.declared.check)
        self._tasks.start("prewarm", self._prewarmer.run)
        self._tasks.start("conversations", self._sweep_forever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()

    # For the APIs of the node.

    def kv_key(self, claim: PrefixClaim) -> str:
        """Name the KV that a generation continues and leaves; "" = none, content decides."""
        key = resolve_key(claim.use.keys)
        if key is None:
            return ""
        parallel, most = self._parallels(claim.facts)
        if not claim.use.keys.conversation_id:
            kv_key = slot_key(derive_slot_id(key, parallel))
            self._used_by[claim.facts.model_id, kv_key] = _file_name(claim)
            return kv_key
        retention = claim.use.retention or Retention.LONG
        conversation = self._registry.open(
            claim.facts.model_id,
            _file_name(claim),
            self._clock.mono(),
            parallel=parallel,
            most=most,
            retention=retention,
        )
        self._used_by[conversation.model_id, conversation.kv_key] = _file_name(claim)
        self._forget(self._registry.overflow())
        self._tell_crowded(conversation.model_id)
        self._prewarmer.used(_file_name(claim))
        return conversation.kv_key

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        """Have the beginning of the next request warm, when there is time."""
        if not claim.use.is_empty and not self.elsewhere(claim, self._key_now(claim), tokens):
            self._prewarmer.submit(self._prefix(claim, tokens), Kind.TURN)

    def _key_now(self, claim: PrefixClaim) -> str:
        """The KV key of a claim; "" for a conversation that was closed meanwhile."""
        if not claim.use.keys.conversation_id:
            return self.kv_key(claim)
        name, now = _file_name(claim), self._clock.mono()
        conversation = self._registry.get(claim.facts.model_id, name, now)
        return "" if conversation is None else conversation.kv_key

    def opened(self, claim: PrefixClaim) -> asyncio.Future[WarmReport] | None:
        """Have warm what is known of a key whose request is about to come."""
        if claim.use.keys.conversation_id:
            self.kv_key(claim)
        report = self._prewarmer.renew(_file_name(claim))
        if report is None:
            self.declared.warm(claim.model_id)
        return report

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        """Have a prefix warmed; the report of that.

        A pin has a key of its own, which turns of its conversation leave alone.
        """
        if claim.use.keys.conversation_id:
            self.kv_key(claim)
        prefix = self._prefix(claim, tokens)
        pin_key = f"{_PIN}{prefix.key}"
        if is_pinned:
            prefix = replace(
                prefix,
                key=pin_key,
                retention=warmed_for(claim.use, is_pinned=True),
                block_class=BlockClass.SYSTEM,
                is_kept=True,
                is_pinned=True,
            )
        else:
            self._prewarmer.forget(pin_key)
        return await self._prewarmer.ask(prefix)

    async def wipe(self) -> Wiped:
        """Drop all KV: of idle conversations in engines, in pages, on disk. Declared prompts are
        warmed again at their time; no other prefix comes back by itself."""
        self._prewarmer.wipe(lambda key: key.startswith(SYSTEM_PREFIX))
        self.for_peers.clear()
        for slot in tuple(self._used_by):
            await self._release(slot)
        wiped = await self._wipe()
        event(_log, "kept KV was wiped", blocks=wiped.blocks, files=wiped.files)
        if wiped.kept:
            event(
                _log,
                "files of KV cannot be removed; the next start finds them",
                level=logging.ERROR,
                files=len(wiped.kept),
                first=wiped.kept[0],
            )
        return wiped

    # Events of the node.

    def engine_changed(self, model: WatchedModel) -> None:
        """Note that a model's state changed: once a fresh engine is ready, its prompts are
        warmed."""
        if model.state is not ModelState.READY:
            return
        if self._warmed_pids.get(model.model_id) == model.pid:
            return
        self._warmed_pids[model.model_id] = model.pid
        if model.facts is not None:
            self.texts.renew(model.facts.model_path)
        self.declared.warm(model.model_id)

    async def recalled(self, facts: ModelFacts, histories: Sequence[Sequence[int]]) -> None:
        """Keep the tokens of texts with KV that came back, so that a request with such a text finds
        them.

        Raises Unsupported for a model without a tokenizer.
        """
        text = await self.texts.get(facts.model_path)
        await asyncio.to_thread(text.learn, histories)

    def happened(self, told: Event) -> None:
        """Note an event of the memory arbiter."""
        if isinstance(told, MemoryPressure):
            self._prewarmer.pressed(told.level)

    # Status.

    def status(self) -> Json:
        """Slots, conversations and warmed prefixes, as JSON."""
        return warm_status(
            self._registry.status(),
            len(self._registry),
            self._prewarmer.stats,
            prompts=len(self._config.prompts),
            for_peers=len(self.for_peers),
        )

    def figures(self) -> Iterator[Figure]:
        """The same numbers."""
        return warm_figures(self._registry.status(), self._prewarmer.stats)

    def health(self) -> tuple[TaskHealth, ...]:
        """Its background tasks."""
        return self._tasks.health()

    # How.

    def _prefix(self, claim: PrefixClaim, tokens: TokenSource) -> Prefix:
        return Prefix(
            key=_file_name(claim),
            model_id=claim.model_id,
            tokens=tokens,
            retention=warmed_for(claim.use, is_pinned=False),
            is_kept=self._is_open(claim),
            client=claim.client,
        )

    def _is_open(self, claim: PrefixClaim) -> bool:
        """Whether the key is of an open conversation; notes its use."""
        name, now = _file_name(claim), self._clock.mono()
        return self._registry.get(claim.facts.model_id, name, now) is not None

    def _parallels(self, facts: ModelFacts) -> tuple[int, int]:
        """The slots of a model, and the number that memory would hold."""
        sizes = self._usable_bytes(), facts.kv_bytes_per_token, facts.context_tokens
        return self._config.parallel or auto_parallel(*sizes), fitting_parallel(*sizes)

    def _tell_crowded(self, model_id: str) -> None:
        status = self._registry.status()[model_id]
        if status.is_crowded and model_id not in self._told_crowded:
            self._told_crowded.add(model_id)
            event(
                _log,
                "more conversations than slots; they take each other's decoded KV",
                level=logging.WARNING,
                model=model_id,
                slots=status.parallel,
                recommended=status.recommended,
            )

    async def _sweep_forever(self) -> None:
        await every(self._config.sweep_s, self.sweep, clock=self._clock, rng=self._rng)

    async def sweep(self) -> None:
        """Close conversations that idle for longer than they may, and warm declared prompts anew
        that have another text by now."""
        idle = self._registry.evict_idle(self._clock.mono())
        self._forget(idle)
        for one in idle:
            slot = one.model_id, one.kv_key
            if self._used_by.get(slot) == one.conversation_id:
                await self._release(slot)
        self.for_peers.lapse()
        await self.declared.renew()

    async def _release(self, slot: _Slot) -> None:
        """Have an engine drop the KV of a slot; the KV of prompts is in blocks."""
        self._used_by.pop(slot, None)
        model_id, kv_key = slot
        with contextlib.suppress(KakeyaError):  # the model is gone, and its KV with it
            await self._models.get(model_id).release(kv_key)

    def _forget(self, closed: Sequence[Conversation]) -> None:
        for conversation in closed:
            self._prewarmer.forget(conversation.conversation_id)


def _file_name(claim: PrefixClaim) -> str:
    """The name that the prefix of a claim is filed under; no other prefix has it."""
    key = resolve_key(claim.use.keys) or "none"
    owner = f"|{sanitise(claim.client)}" if claim.client else ""
    return f"{key}|{claim.model_id}{owner}"
