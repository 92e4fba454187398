"""The engines of one model of this node, one after the other, and what they make of the model.

The arbiter decides whether and when a model is loaded; `EngineHandler` carries it out and reports
here. An engine that was given up leaves the ledger; the first request after a pause loads the model
again; each pause is longer than the last one (see `ModelFailures`).
"""

from __future__ import annotations

from collections.abc import Callable

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineCheck
from kakeya.backends.engine.failures import ModelFailures
from kakeya.core.figures import Json
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.manifest import Category
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.resident import Resident, State

TEXT, DRAFT, EMBED = "text", "draft", "embedding"
"""The capabilities of verifiers, of draft models and of embedders."""
CAPABILITY_OF = {
    ModelRole.VERIFIER: TEXT,
    ModelRole.PROPOSER: DRAFT,
    ModelRole.EMBEDDER: EMBED,
}


class ModelLife:
    """See the module. `on_change` is called after each change of the model's state."""

    def __init__(
        self,
        spec: ModelSpec,
        memory: MemoryArbiter,
        *,
        mono: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._on_change = on_change
        self._facts: ModelFacts | None = None
        self.failures = ModelFailures(spec.model_id, mono)
        self._earlier_restarts = 0
        self._is_expected = not spec.is_on_demand
        self._is_settled = False
        self._rests = False
        self._ending: EngineBackend | None = None
        self.manifest = spec.manifest
        """What its owner says of it at this moment."""
        self.check: EngineCheck | None = None
        """Checks each engine before it serves; None = none is checked."""
        self.backend: EngineBackend | None = None
        """The live engine; None while the model is not in memory."""

    @property
    def model_id(self) -> str:
        """The id that callers use."""
        return self._spec.model_id

    @property
    def role(self) -> ModelRole:
        """The role for which the model is served."""
        return self._spec.role

    @property
    def is_on_demand(self) -> bool:
        """Whether it is loaded for requests alone."""
        return self._spec.is_on_demand

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
    def facts(self) -> ModelFacts | None:
        """The facts from the model's last engine; None before the first one was ready."""
        if self.backend is not None and self.backend.facts is not None:
            return self.backend.facts
        return self._facts

    @property
    def pid(self) -> int | None:
        """The engine's process id, also while the engine ends; None without an engine."""
        backend = self.backend or self._ending
        return None if backend is None else backend.pid

    @property
    def restarts(self) -> int:
        """How often an engine of the model was restarted after its death."""
        return self._earlier_restarts + (self.backend.restarts if self.backend else 0)

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

    async def is_past(self, pid: int) -> bool:
        """Whether the engine process answered from its model thread: it has finished all calls that
        were cut off before."""
        backend = self.backend
        if backend is None or backend.pid != pid:
            return False
        return await backend.footprint() is not None and backend.pid == pid

    # For the handler

    def opened(self, backend: EngineBackend) -> None:
        """Note that an engine begins to load."""
        self._is_expected = False
        self._is_settled = False
        self.backend = backend
        self._on_change()

    def settled(self, facts: ModelFacts) -> None:
        """Note that the engine is loaded, measured and within its limits."""
        self._facts = facts
        self.failures.clear()
        self._rests = False
        self._is_settled = True
        self._on_change()

    def closed(self) -> None:
        """Note that the engine is about to be ended."""
        if self.backend is not None:
            self._facts = self.backend.facts or self._facts
            self._earlier_restarts += self.backend.restarts
            self._ending = self.backend
        self.backend = None
        self._on_change()

    def ended(self) -> None:
        """Note that the process of the engine has ended."""
        self._ending = None
        self._on_change()

    def left_idle(self) -> None:
        """Note that the model left memory because no caller used it."""
        self._rests = True
        self._on_change()

    def not_expected(self) -> None:
        """Note that there was no room to load the model at the start."""
        if self._is_expected:
            self._is_expected = False
            self._on_change()

    def load_failed(self, reason: str) -> None:
        """Note that the model could not be loaded."""
        if self.failures.may_load:
            self.failures.note(reason)
        self._on_change()

    def engine_changed(self) -> None:
        """Note a change of the engine's state. A failed engine leaves memory when it is unused."""
        backend = self.backend
        if backend is not None and backend.state is ModelState.FAILED:
            self.failures.note(backend.last_error)
            self._drop_failed()
        self._on_change()

    @property
    def may_come_back(self) -> bool:
        """Whether the model is loaded without a request when there is room: a drafter unless it
        left for idleness and no draft was asked since; others if they were never tried, or have
        served and failed, once the pause is over: peers ask no failed model. A ring group, which
        has a check, is formed by its leader alone."""
        if self.is_on_demand:
            return False
        if self.role is ModelRole.PROPOSER:
            return self.failures.may_load and not self._rests
        if self.failures.reason:
            return self._facts is not None and self.check is None and self.failures.may_load
        return self._facts is None

    def bar(self, reason: str) -> None:
        """Load the model no more, for a reason in words; "" = load it again."""
        if self.failures.bar(reason):
            self._drop_failed()
            self._on_change()

    def _drop_failed(self) -> None:
        resident = self.resident
        if self.failures.reason and resident is not None and resident.is_idle:
            self._memory.unload(self.capability, self.model_id)
