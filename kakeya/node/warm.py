"""Work ahead of requests as a part of the agent, and its dependencies."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kakeya.backends.llama.plan import text_source
from kakeya.backends.resident import ResidentModel
from kakeya.core.clock import Clock
from kakeya.generation.facts import ModelState
from kakeya.generation.model import ModelDirectory
from kakeya.generation.spec import ModelRole
from kakeya.node.memory import NodeMemory
from kakeya.node.pages import NodePages
from kakeya.prefix.config import PrecacheConfig
from kakeya.prefix.warm.ahead import NodePrecache
from kakeya.prefix.warm.source import ModelSource
from kakeya.text.text import Texts


@asynccontextmanager
async def node_precache(
    config: PrecacheConfig,
    models: ModelDirectory,
    memory: NodeMemory,
    pages: NodePages,
    clock: Clock,
    rng: random.Random,
) -> AsyncIterator[NodePrecache]:
    """Build warming over a node's models and pages, and connect it. Raises ConfigError."""
    arbiter = memory.arbiter
    source = ModelSource(
        models,
        pages.prefixes,
        adapter=pages.adapters.manager.find,
        is_needed=lambda: bool(arbiter.status().waiting),
    )
    precache = NodePrecache(
        config,
        models,
        source,
        Texts(clock.wall),
        usable_bytes=lambda: arbiter.budget_bytes,
        wipe=pages.wipe,
        clock=clock,
        rng=rng,
    )

    def begin_text(model: ResidentModel) -> None:
        """Read a model's text files beside its weights: a first request then waits for none."""
        folder = text_source(memory.engines.sources[model.model_id])
        is_coming = model.role is ModelRole.VERIFIER and model.state is ModelState.LOADING
        if is_coming and folder.is_dir():
            precache.texts.renew(str(folder))

    async with precache:
        memory.engines.follow(begin_text)
        memory.engines.follow(precache.engine_changed)
        stop_listening = arbiter.on_event(precache.happened)
        pages.tell_recalled(precache.recalled)
        try:
            yield precache
        finally:
            pages.tell_recalled(None)
            stop_listening()
