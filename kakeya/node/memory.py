"""The memory of a node: the arbiter, the sources of pressure, and the models in its ledger.

    enter   sizes are estimated, capabilities registered; nothing is loaded yet
    start   plug-ins, the first reading of the machine, then models load as room allows, text first
    run     pressure is read, drafters come back when it has passed, sizes are remembered, and
            `on_change` is called at intervals: any user of memory changes which absent model a
            request could load
    exit    every engine is ended

Plug-ins, jobs in other processes, adapters and the page arena use `arbiter`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from kakeya.backends.added.home import ModelHome
from kakeya.backends.care import PanicCare
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.watch import EngineWatch
from kakeya.backends.engines import EngineCommand, Engines
from kakeya.backends.handler import EngineHandler
from kakeya.backends.images.handler import ImageHandler, ImageModels
from kakeya.backends.images.model import IMAGE, ResidentPipeline, WorkerSetup
from kakeya.backends.model_life import DRAFT, EMBED, TEXT
from kakeya.backends.model_sizes import ModelSizes
from kakeya.backends.preloads import Preloads
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.canary_node import GroupChecks
from kakeya.backends.ring.own_share import OwnShare
from kakeya.backends.sizes import check_named, check_pinned, node_budget
from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError
from kakeya.core.figures import Figure, Json
from kakeya.core.tasks import Supervisor, TaskHealth, every
from kakeya.generation.config import WAIT_S
from kakeya.generation.facts import ModelState
from kakeya.generation.manifest import Manifest
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability
from kakeya.memory.arbiter.events import Event, LoadFailure, MemoryPressure, ModelLoad, ModelUnload
from kakeya.memory.arbiter.plan import Reason
from kakeya.memory.arbiter.resident import (
    DIFFUSION,
    DRAFTER,
    EMBEDDING,
    TEXT_TARGET,
    ResidentKey,
    Warmth,
)
from kakeya.memory.config import MemoryConfig
from kakeya.memory.estimate.history import SizeRecord
from kakeya.memory.figures import MemoryCounters, describe_memory, memory_figures
from kakeya.memory.leases.keeper import LeaseKeeper, lease_keeper
from kakeya.memory.log import MemoryLog
from kakeya.memory.machine.panics import FIND_PERIOD_S, Profile, report_folders
from kakeya.memory.machine.pressure import DispatchedPressure
from kakeya.memory.plugins import PluginReport, load_capabilities
from kakeya.memory.pressure_sources import dispatcher, pressure_monitor
from kakeya.node.state_writer import StateWriter

_ENGINES = {TEXT: TEXT_TARGET, DRAFT: DRAFTER, EMBED: EMBEDDING}
"""The capabilities of models that are engines, and their roles in the ledger."""
TEND_S = 4.0
"""Seconds between two checks of which models can come back, or be loaded by a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How engines are run, the longest wait for one, and the program for GGUF files."""

    command: EngineCommand
    options: EngineOptions
    sockets: Path | None
    wait_s: float = WAIT_S
    llama_server: str = ""


class NodeMemory:
    """See the module. `on_change` is called when the set of servable models may have changed."""

    def __init__(
        self,
        config: MemoryConfig,
        specs: Sequence[ModelSpec],
        setup: EngineSetup,
        *,
        data_dir: Path,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[], None],
        reports: Sequence[Path] | None = None,
    ) -> None:
        """`reports` are the folders of the system's panic reports, None = the usual ones.

        Raises ConfigError for a model that cannot be found, and for a budget of 0 bytes.
        """
        self._config = config
        self._data_dir = data_dir
        self._clock = clock
        self._rng = rng
        self._on_change = on_change
        self._sizes = ModelSizes(data_dir)
        self._working_set_bytes: int | None = None
        self._stack = AsyncExitStack()
        self._reports = report_folders(sys.platform, Path.home()) if reports is None else reports
        self._care = PanicCare(
            self._reports, data_dir, options=setup.options, allowed=config.after_panics, clock=clock
        )
        budget = node_budget(config, self.profile)
        self.arbiter = MemoryArbiter(budget=budget, clock=clock, grace_s=0.0)
        self.images = ImageModels(
            specs,
            setup.command,
            self.arbiter,
            WorkerSetup(
                sockets=setup.sockets,
                start_timeout_s=setup.options.start_timeout_s,
                patience_s=setup.wait_s,
            ),
            clock=clock,
            on_change=on_change,
        )
        self.engines = Engines(
            [spec for spec in specs if spec.role is not ModelRole.DIFFUSION],
            self._care.with_flags(setup.command),
            self.arbiter,
            clock=clock,
            options=self._care.options(),
            on_change=on_change,
            sockets=setup.sockets,
            patience_s=setup.wait_s,
            llama_server=setup.llama_server,
        )
        verifiers = partial(self.engines.of_role, ModelRole.VERIFIER)
        self.share = OwnShare(self.arbiter.status, verifiers, self.engines.sources)
        self._checks = GroupChecks(self.engines, self.arbiter, data_dir=data_dir, clock=clock)
        self.dispatched = DispatchedPressure(mono=clock.mono)
        self.plugins: tuple[PluginReport, ...] = ()
        self.dispatch = dispatcher(self.dispatched, self.arbiter)
        self._leases: LeaseKeeper | None = None
        self._watch = EngineWatch(self.arbiter, clock)
        self._preloads = Preloads(self.engines, self.images, self.arbiter, clock.mono)
        self._log = MemoryLog(clock.mono)
        self._counters = MemoryCounters()
        for listener in (
            self._log.take,
            self._counters.take,
            self._preloads.happened,
            self._follow,
        ):
            self.arbiter.on_event(listener)

    async def __aenter__(self) -> Self:
        """Raises ConfigError if one model alone, or all pinned ones, exceed the budget."""
        await self._sizes.load()
        if self._sizes.working_set_bytes:
            await self._fit_budget()
        await self._estimate()
        self._check_pinned()
        check_named("memory.after_panics", self._config.after_panics, self._sizes.by_id)
        self._register()
        self._use_care()
        # A request may load a model as soon as a listener is open, which is before `start`.
        await self.engines.prepare()
        async with AsyncExitStack() as stack:
            self._keeper: StateWriter[tuple[SizeRecord, ...]] = StateWriter(
                self._sizes.history.snapshot,
                self._sizes.save,
                saved=self._sizes.history.snapshot(),
                clock=self._clock,
            )
            stack.push_async_callback(self._care.aclose)
            await stack.enter_async_context(self.arbiter)
            await stack.enter_async_context(self._watch)
            stack.push_async_callback(self._keeper.flush)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, tasks: Supervisor, node_id: str) -> None:
        """Count leases of other processes, read the machine, begin to load. Raises ConfigError."""
        self.plugins = await load_capabilities(self.arbiter)
        leases = lease_keeper(
            self._data_dir,
            self._config.lease_store,
            self.arbiter,
            clock=self._clock,
            node_id=node_id,
        )
        self._leases = await self._stack.enter_async_context(leases)
        monitor = await asyncio.to_thread(
            pressure_monitor, self.arbiter, self.dispatched, clock=self._clock
        )
        self.dispatched.when_told(monitor.poll_now)
        await monitor.poll()
        await self._preloads.begin(self._pinned())
        tasks.start("memory pressure", monitor.run)
        tasks.start("memory tending", self._tend)
        tasks.start("model sizes", self._keeper.run)
        if self._reports:
            tasks.start("memory profile", self._read_reports)

    def model_home(self) -> ModelHome:
        """Where ring groups and models that were pulled become models of this node."""
        return ModelHome(self.engines, self._sizes, self.arbiter, self._checks, self._clock)

    @property
    def profile(self) -> Profile:
        """The load that the node takes upon itself."""
        return self._care.profile

    @property
    def is_careful(self) -> bool:
        """Whether the node uses less memory after a panic of the machine."""
        return self.profile.name == "careful"

    @property
    def offers_models(self) -> bool:
        """Whether a model of this node can be asked for, in memory or not."""
        return any(
            model is None or model.state is not ModelState.FAILED
            for _, model in self.engines.models()
        )

    def take_manifests(self, manifests: Mapping[str, Manifest]) -> None:
        """Take what is said of models from now on. Raises ConfigError for pins that do not fit the
        budget; nothing changes then."""
        before = {model: model.manifest for model in self._all()}
        for model in before:
            said = manifests.get(model.model_id, model.manifest)
            model.manifest = model.manifest.with_live(said)
        try:
            self._check_pinned()
        except ConfigError:
            for model, manifest in before.items():
                model.manifest = manifest
            raise
        for model in before:
            self.arbiter.renew_warmth(model.capability, model.model_id)

    async def lend_slots(self, model_id: str, size: int) -> bool:
        """Lend an engine the bytes of its adapter slots; False = not all of them are free now."""
        return await self._watch.lend_slots(model_id, size)

    def status(self) -> Json:
        """Return the ledger and its latest events."""
        return describe_memory(
            self.arbiter.status(),
            self._log,
            now=self._clock.mono(),
            profile=self.profile,
            plugins=self.plugins,
            engines=self._watch.status(),
            leases=self._leases.status() if self._leases else {},
        )

    def figures(self) -> Iterator[Figure]:
        """Figures of the ledger, and counts of its events."""
        yield from memory_figures(self.arbiter.status(), is_careful=self.is_careful)
        yield from self._counters.figures(
            ResidentKey(model.capability, model.model_id) for model in self._all()
        )

    def health(self) -> tuple[TaskHealth, ...]:
        """Background tasks of the memory, beside the agent's."""
        leases = self._leases.health() if self._leases else ()
        return (*self.arbiter.health(), *self._watch.health(), *leases)

    async def _estimate(self) -> None:
        stated = {
            model.model_id: size
            for model in self._all()
            if (size := model.manifest.size_bytes) is not None
        }
        folders = {**self.engines.sources, **self.images.sources}
        sized = await self._sizes.sized(
            {model.model_id: (folders[model.model_id], model.capability) for model in self._all()},
            self.arbiter.budget_bytes,
            stated_bytes=dict(self._config.stated_bytes) | stated,
            fixed_kv_bytes=self.engines.fixed_kv_bytes,
        )
        for model_id, lease in sized.items():
            self._sizes.add(model_id, lease)
        await self._sizes.estimate_alone(
            self.engines.alone, self.engines.sources, self.arbiter.budget_bytes
        )

    def _register(self) -> None:
        options = self._care.options()
        handler = EngineHandler(
            self.engines,
            self._sizes.by_id,
            self._sizes.history,
            self._watch,
            options,
            self.arbiter,
            self._care,
        )
        for name, role in _ENGINES.items():
            self.arbiter.register(
                Capability(
                    name=name,
                    role=role,
                    handler=handler,
                    estimate=self._sizes.lease_bytes,
                    load_s=partial(self._sizes.load_s, name),
                    use_s=lambda model_id, *requests: self.engines.get(model_id).use_s(*requests),
                    asks_per_s=lambda model_id: self.engines.get(model_id).load.prompts_per_s,
                    own_warmth=self._warmth,
                    concurrency=options.max_running,
                    max_waiting=options.max_waiting,
                )
            )
        if self.images.by_id:
            self.arbiter.register(
                Capability(
                    name=IMAGE,
                    role=DIFFUSION,
                    handler=ImageHandler(
                        self.images.by_id,
                        self._sizes.by_id,
                        self._sizes.history,
                        self.arbiter,
                        self._watch.guard,
                    ),
                    estimate=self._sizes.lease_bytes,
                    load_s=partial(self._sizes.load_s, IMAGE),
                    own_warmth=self._warmth,
                )
            )

    def _check_pinned(self) -> None:
        verifiers = self.engines.of_role(ModelRole.VERIFIER)
        texts = {model.model_id for model in verifiers if not model.is_on_demand}
        rings = {spec.model_id for spec, _ in self.engines.models() if spec.ring}  # lent already
        sizes, budget = self._sizes.by_id, self.arbiter.budget_bytes
        check_pinned(self._pinned() - rings, sizes, sorted(texts - rings), budget)

    def _pinned(self) -> frozenset[str]:
        said = (model.model_id for model in self._all() if model.manifest.pin)
        return frozenset((*self._config.pinned, *said))

    def _warmth(self, model_id: str) -> Warmth:
        model = self.images.by_id.get(model_id) or self.engines.get(model_id)
        return self._config.warmth(
            model.manifest, model.category, is_pinned=model_id in self._pinned()
        )

    def _all(self) -> tuple[ResidentModel | ResidentPipeline, ...]:
        return (*self.engines.in_order(), *self.images.by_id.values())

    def _use_care(self) -> None:
        """Bar the models that are not loaded after panics, and set the options of later engines."""
        self.engines.use(self._care.options(), self._care.own_options())
        for model in self.engines.in_order():
            model.bar(self._care.refusals.get(model.model_id, ""))

    async def _read_reports(self) -> None:
        """Read panic reports, and change the profile if there is news.

        The profile sets the budget at once, and the options of engines that start later.
        """
        while True:
            await self._clock.sleep(FIND_PERIOD_S)
            await self._care.read_again()
            self._use_care()
            await self._fit_budget()
            self._on_change()

    async def _fit_budget(self) -> None:
        """Set the budget by the profile, and by the limit that Metal told the last engine."""
        self._working_set_bytes = self._sizes.working_set_bytes
        self.arbiter.set_budget(
            await asyncio.to_thread(
                node_budget, self._config, self.profile, working_set_bytes=self._working_set_bytes
            )
        )

    async def _tend(self) -> None:
        await every(TEND_S, self._look, clock=self._clock, rng=self._rng, is_shared=True)

    async def _look(self) -> None:
        if self._sizes.working_set_bytes != self._working_set_bytes:
            await self._fit_budget()
        await self._preloads.bring_back()
        self._on_change()

    def _follow(self, happened: Event) -> None:
        match happened:
            case ModelLoad(key=(kind, _)) if kind in (*_ENGINES, IMAGE):
                self._sizes.note_load(happened.key, happened.load_s)
            case ModelUnload(key=(kind, name), reason=Reason.IDLE) if kind in _ENGINES:
                self.engines.get(name).left_idle()
            case _:
                pass
        if isinstance(happened, ModelLoad | ModelUnload | LoadFailure | MemoryPressure):
            self._on_change()
