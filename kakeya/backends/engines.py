"""The models of a node that engine children run: their names, recipes and sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kakeya.adapters.config import AdapterConfig
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.child import Child, ChildClient, engine_client
from kakeya.backends.engine.engine import EngineOptions, OtherRanks
from kakeya.backends.engine.process import MAX_SOCKET_PATH_BYTES, Command
from kakeya.backends.llama.archive import SlotArchive
from kakeya.backends.llama.client import llama_client
from kakeya.backends.llama.find import find_server, missing_server
from kakeya.backends.llama.plan import LLAMA_OPTIONS, MAX_STEP_S, plan_of
from kakeya.backends.resident import ResidentModel
from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError, Conflict, NotFound
from kakeya.core.hints import INSTALL_OPENBLAS
from kakeya.core.log import event
from kakeya.core.settings import Illegal
from kakeya.generation.config import WAIT_S
from kakeya.generation.facts import DraftModelState, ModelFacts, ModelState
from kakeya.generation.manifest import LLAMA, MLX, Manifest
from kakeya.generation.spec import ModelRole, ModelSpec, is_gguf, parse_proposer, resolve
from kakeya.memory.api import MemoryArbiter

_log = logging.getLogger(__name__)
GROUP = "group"
"""The option that names the socket of a ring group, which serves the model in place of a child."""
STATES_FOR = "states_for"
"""The option that names a drafter for which the model's hidden states are kept."""
_SOCKET_NAME_BYTES = 32
"""The length of an engine's folder and socket below the folder of all sockets."""
EngineCommand = Callable[[ModelSpec, str], Command]
"""Builds the command of an engine child from the resolved name of its model."""


class EngineRecipe(NamedTuple):
    """How the engine of a model is made. `most_running` bounds its sequences, `max_step_s` its
    steps, 0 = as configured; `kv_bytes` are taken at the start, None = they grow; `others` are as
    of an `EngineSpec`."""

    command: Command
    client: Callable[[Child], ChildClient] = engine_client
    most_running: int = 0
    kv_bytes: int | None = None
    max_step_s: float = 0.0
    others: Callable[[], AbstractAsyncContextManager[OtherRanks]] | None = None


class PreparedModel(NamedTuple):
    """A model that may be added: its spec, its folder or file, and its recipe."""

    spec: ModelSpec
    source: str
    recipe: EngineRecipe


def _on_backend(spec: ModelSpec, resolved: str | None) -> ModelSpec:
    """The spec with the backend that its files call for; None = it has none."""
    if resolved is None:
        return spec
    backend, said = LLAMA if is_gguf(resolved) else MLX, spec.manifest
    if said.backend and said.backend != backend:
        raise ConfigError(
            f"models.{spec.model_id}.backend is {said.backend}, and {resolved} is a model for "
            f"{backend}; leave it out, or name other files"
        )
    known = LLAMA_OPTIONS if backend == LLAMA else (GROUP, STATES_FOR)
    said.check_options(spec.model_id, backend, known=known)
    return replace(spec, manifest=replace(said, backend=backend))


def _gguf_recipe(spec: ModelSpec, resolved: str, named: str, archive: SlotArchive) -> EngineRecipe:
    if spec.role is not ModelRole.VERIFIER:
        raise ConfigError(
            f"model {spec.model_id!r} is a GGUF file, which can only answer requests; give it as "
            f"--model without a role, not as {spec.role}"
        )
    program = find_server(named)
    if program is None:
        raise missing_server(spec.model_id)
    plan = plan_of(Path(resolved), dict(spec.manifest.options))
    return EngineRecipe(
        plan.command(program), llama_client(plan, archive), plan.slots, plan.kv_bytes, MAX_STEP_S
    )


def engine_command(
    log_format: str,
    identity: Path | None = None,
    *,
    log_level: str = "info",
    adapters: AdapterConfig | None = None,
    findings: Path | None = None,
) -> EngineCommand:
    """Return the command of the engine, or of the image worker, that is part of this package.

    `identity` is the folder of the node's keys, which need not exist yet: an engine dials the peers
    that draft for it. `adapters` gives verifiers adapter slots, which take no memory before the
    first adapter; None = none. `findings` is the folder in which engines keep checks and measured
    speeds of their models for the next load.
    """
    keys = ("--identity", str(identity)) if identity else ()
    known = ("--findings", str(findings)) if findings else ()
    slots: tuple[str, ...] = ()
    if adapters is not None and adapters.slots:
        slots = ("--adapter-slots", str(adapters.slots), "--adapter-rank", str(adapters.rank))

    def for_model(spec: ModelSpec, resolved: str) -> Command:
        draws = spec.role is ModelRole.DIFFUSION
        module = "kakeya.backends.images.worker" if draws else "kakeya.node.engine_main"

        group = dict(spec.manifest.options).get(GROUP)
        states = _states_flags(spec)

        def on_socket(socket: Path) -> Sequence[str]:
            if group is not None:
                program = (sys.executable, "-m", "kakeya.backends.ring.adopt")
                return (*program, "--socket", str(socket), "--group", str(group))
            common = (
                *(sys.executable, "-m", module),
                *("--socket", str(socket)),
                *("--model", resolved),
                *("--model-id", spec.model_id),
                *("--log-format", log_format),
                *("--log-level", log_level),
            )
            if draws:
                return common
            return (
                *common,
                *keys,
                *known,
                *(spec.ring or (slots if spec.role is ModelRole.VERIFIER else ())),
                *states,
                *(("--encodes",) if spec.role is ModelRole.EMBEDDER else ()),
            )

        return on_socket

    return for_model


def _states_flags(spec: ModelSpec) -> tuple[str, ...]:
    """The flags of an engine that keeps hidden states for a drafter. Raises ConfigError."""
    source = dict(spec.manifest.options).get(STATES_FOR)
    if source is None:
        return ()
    try:
        drafter = parse_proposer(source)
    except Illegal as problem:
        raise ConfigError(f"models.{spec.model_id}.options.{STATES_FOR}: {problem}") from None
    return ("--states-for", f"{drafter.model_id}={resolve(drafter)}")


def sockets_folder(data_dir: Path) -> Path | None:
    """Return the folder of a node's engine sockets; None if their paths would be too long."""
    folder = data_dir / "run"
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(folder))
    return folder if room >= _SOCKET_NAME_BYTES else None


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


class Engines:
    """The models of a node by name, and the recipe of each engine.

    The arbiter lets `EngineHandler` start and end engines. N-grams need no engine: they have a spec
    here and no model. `on_change` is called after each change of a model's state.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        command: EngineCommand,
        memory: MemoryArbiter,
        *,
        clock: Clock,
        options: EngineOptions,
        on_change: Callable[[], None],
        sockets: Path | None = None,
        patience_s: float = WAIT_S,
        llama_server: str = "",
    ) -> None:
        """A request without a deadline waits `patience_s` for its model. Sockets lie in `sockets`,
        or in the system's temporary folder. `llama_server` is the program for GGUF files, "" = the
        one that is found.

        Raises ConfigError for a model that cannot be found, and for a GGUF file that cannot be
        served.
        """
        self._sockets = sockets
        self._on_change = on_change
        self.use(options)
        self._clock = clock
        self._has_hinted = False
        self._followers: list[Callable[[ResidentModel], None]] = []
        self.sources = {spec.model_id: resolve(spec) for spec in specs if not spec.is_ngram}
        """Model id -> its folder, GGUF file or Hugging Face id, for models with an engine."""
        self._specs = tuple(_on_backend(spec, self.sources.get(spec.model_id)) for spec in specs)
        self._command = command
        self._memory = memory
        self._patience_s = patience_s
        engines = [spec for spec in self._specs if not spec.is_ngram]
        self._llama_server = llama_server
        self.archive = SlotArchive()
        """The KV of conversations with GGUF models, which outlives their servers."""
        self._recipes = {
            spec.model_id: self._recipe(spec, self.sources[spec.model_id]) for spec in engines
        }
        self._models = {spec.model_id: self._model(spec) for spec in engines}
        self.alone: dict[str, ResidentModel] = {}
        """By the ids of ring groups the same models in one process: no caller can ask for them."""
        for spec in engines:
            if any(name == GROUP for name, _ in spec.manifest.options):
                self._add_alone(spec)

    async def prepare(self) -> None:
        """Make an empty folder for the sockets."""
        if self._sockets is not None:
            # The node holds its data directory, so any file there was left by a killed node.
            await asyncio.to_thread(_make_anew, self._sockets)

    def follow(self, follower: Callable[[ResidentModel], None]) -> None:
        """Call `follower` after each change of a model's state, an engine's end included."""
        self._followers.append(follower)

    def use(self, options: EngineOptions, own: Mapping[str, EngineOptions] | None = None) -> None:
        """Make later engines with these options; `own` are those of single models by id."""
        self._options = options
        self._own_options = dict(own or {})

    def make(self, model_id: str) -> EngineBackend:
        """Make a new backend of a model without starting it. Raises NotFound."""
        model = self.get(model_id)
        options = self._own_options.get(model_id, self._options)
        recipe = self._recipes[model_id]
        rows = min(options.max_running, recipe.most_running or options.max_running)
        step_s = max(options.max_step_s, recipe.max_step_s)
        return EngineBackend(
            model_id,
            recipe.command,
            client=recipe.client,
            others=recipe.others,
            check=model.check,
            options=replace(options, max_running=rows, max_step_s=step_s),
            clock=self._clock,
            on_change=lambda _: model.engine_changed(),
            runtime_dir=self._sockets,
        )

    def prepared(
        self,
        spec: ModelSpec,
        others: Callable[[], AbstractAsyncContextManager[OtherRanks]] | None = None,
    ) -> PreparedModel:
        """What `add` takes; with `others` the engine is rank 0 of a ring group. Raises ConfigError
        for files that are not here, Conflict for the id of another model."""
        self._check_free(spec.model_id)
        source = resolve(spec)
        if others is not None:
            recipe = EngineRecipe(self._command(spec, source), others=others)
            return PreparedModel(spec, source, recipe)
        spec = _on_backend(spec, source)
        return PreparedModel(spec, source, self._recipe(spec, source))

    def add(self, made: PreparedModel) -> ResidentModel:
        """Add one more model. Raises Conflict for the id of another one."""
        name = made.spec.model_id
        self._check_free(name)
        self._recipes[name], self.sources[name] = made.recipe, made.source
        self._specs = (*self._specs, made.spec)
        self._models[name] = self._model(made.spec)
        if made.recipe.others is not None:
            self._add_alone(made.spec)
        self._on_change()
        return self._models[name]

    def remove(self, model_id: str) -> None:
        """Forget a model of `add`, which is not in memory."""
        self._specs = tuple(one for one in self._specs if one.model_id != model_id)
        alone = self.alone.pop(model_id, None)
        for gone in (model_id, *((alone.model_id,) if alone else ())):
            self._recipes.pop(gone, None)
            self.sources.pop(gone, None)
            self._models.pop(gone, None)
        self._on_change()

    @property
    def lasting_sources(self) -> Mapping[str, str]:
        """As `sources`, without models that are loaded for requests alone."""
        passing = {spec.model_id for spec in self._specs if spec.is_on_demand}
        return {name: source for name, source in self.sources.items() if name not in passing}

    @property
    def fixed_kv_bytes(self) -> Mapping[str, int]:
        """The memory of keys and values of those models that take all of it at the start."""
        recipes = self._recipes.items()
        return {name: made.kv_bytes for name, made in recipes if made.kv_bytes is not None}

    def get(self, model_id: str) -> ResidentModel:
        """Find a model that has an engine. Raises NotFound."""
        if model_id not in self._models:
            known = ", ".join(self._models) or "none"
            raise NotFound(f"no model of this node is called {model_id[:80]!r}; there are {known}")
        return self._models[model_id]

    def models(self) -> tuple[tuple[ModelSpec, ResidentModel | None], ...]:
        """Every configured model; None for n-grams, which need no engine."""
        return tuple((spec, self._models.get(spec.model_id)) for spec in self._specs)

    def _offers(self) -> Iterator[ResidentModel]:
        """Every model that callers can ask for."""
        return (model for _, model in self.models() if model is not None)

    def of_role(self, role: ModelRole) -> tuple[ResidentModel, ...]:
        """List the models of a role, in configured order."""
        return tuple(model for model in self._offers() if model.role is role)

    def in_order(self) -> tuple[ResidentModel, ...]:
        """List the models, verifiers first: drafts are of no use without a verifier."""
        order = (ModelRole.VERIFIER, ModelRole.EMBEDDER, ModelRole.PROPOSER)
        return tuple(model for role in order for model in self.of_role(role))

    def proposers(self) -> tuple[DraftModelState, ...]:
        """List every configured model that only drafts, n-grams included."""
        return tuple(
            DraftModelState(model_id=spec.model_id, state=ModelState.READY)
            if model is None
            else DraftModelState(
                model_id=spec.model_id, state=model.state, last_error=model.last_error
            )
            for spec, model in self.models()
            if spec.role is ModelRole.PROPOSER
        )

    def offered(self) -> tuple[tuple[ModelRole, ModelFacts], ...]:
        """List the models that a request would get now, with their facts."""
        return tuple(
            (model.role, model.facts)
            for model in self._offers()
            if model.facts is not None and model.can_serve
        )

    def loaded(self) -> tuple[str, ...]:
        """List the models that are in memory."""
        ready = ModelState.READY
        return tuple(name for name, model in self._models.items() if model.state is ready)

    def unloaded(self) -> tuple[tuple[ModelRole, str], ...]:
        """List the models that were never loaded, and that a request would bring to memory now."""
        return tuple(
            (model.role, model.model_id)
            for model in self._offers()
            if model.facts is None and model.role is not ModelRole.PROPOSER and model.can_serve
        )

    def _check_free(self, model_id: str) -> None:
        if any(model_id == one.model_id for one in self._specs):
            told = f"this node serves a model {model_id!r} already; give another name"
            raise Conflict(f"{told}, a ring group's by --name")

    def _recipe(self, spec: ModelSpec, source: str) -> EngineRecipe:
        if spec.backend == LLAMA:
            return _gguf_recipe(spec, source, self._llama_server, self.archive)
        return EngineRecipe(self._command(spec, source))

    def _model(self, spec: ModelSpec) -> ResidentModel:
        return ResidentModel(
            spec,
            self._memory,
            clock=self._clock,
            on_change=self._changed,
            patience_s=self._patience_s,
        )

    def _add_alone(self, group: ModelSpec) -> None:
        """Add a ring group's model in one process, which is compared with the group."""
        source = self.sources[group.model_id]
        spec = replace(
            group,
            model_id=f"{group.model_id} in one process",
            manifest=Manifest(backend=group.manifest.backend),
            ring=(),
        )
        self.sources[spec.model_id] = source
        self._recipes[spec.model_id] = EngineRecipe(self._command(spec, source))
        self._models[spec.model_id] = self.alone[group.model_id] = ResidentModel(
            spec, self._memory, clock=self._clock, on_change=lambda _: self._on_change()
        )

    def _changed(self, model: ResidentModel) -> None:
        facts = model.facts
        is_slow = model.state is ModelState.READY and facts and not facts.blas_accelerated
        if is_slow and not self._has_hinted:
            self._has_hinted = True  # a warning about the machine: once is enough
            event(
                _log,
                "OpenBLAS is missing: prompts are read 10 to 40 times slower than they could be; "
                f"{INSTALL_OPENBLAS}, then start the node again",
                level=logging.WARNING,
                model=model.model_id,
            )
        for follower in self._followers:
            follower(model)
        self._on_change()
