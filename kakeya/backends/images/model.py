"""An image model of this node, in memory or not: the object that callers keep while workers come
and go.

    draw      holds a lease while it waits for its turn and draws, the most urgent first; an absent
              model waits in the arbiter's queue until it is loaded
    death     of a worker fails the request that it draws; the next one starts another worker, and
              without one the model leaves memory
    failed    a model that cannot be loaded is not tried again for a while
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kakeya.backends.engine.process import Command, EngineProcess
from kakeya.backends.images.child import ImageWorker
from kakeya.backends.images.folder import pipeline_kind
from kakeya.backends.terms import terms_within
from kakeya.core.clock import Clock
from kakeya.core.errors import InvariantBroken, KakeyaError, PeerUnavailable
from kakeya.core.figures import Json
from kakeya.generation.facts import ModelState
from kakeya.generation.image import DrawnImage, ImageRequest, Tell
from kakeya.generation.manifest import Category
from kakeya.generation.progress import LoadProgress
from kakeya.generation.request import GenerationPriority
from kakeya.generation.spec import ModelSpec
from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import progress_to, report_progress
from kakeya.memory.arbiter.resident import State

IMAGE = "image"
"""The capability of image models."""
PAUSE_S = 30.0
"""After a failed load: its next try reads many gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """How workers are started: the folder of their sockets, None = the system's temporary one, the
    longest load, and the longest wait of a request for its model."""

    sockets: Path | None
    start_timeout_s: float
    patience_s: float


class ResidentPipeline:
    """An `ImageModel` on top of successive workers."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        command: Command,
        memory: MemoryArbiter,
        setup: WorkerSetup,
        *,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """Raises ConfigError for a folder without a pipeline that a node draws with."""
        self.kind = pipeline_kind(folder)
        self.folder = folder
        self._spec = spec
        self._command = command
        self._memory = memory
        self._setup = setup
        self._clock = clock
        self._on_change = on_change
        self.manifest = spec.manifest
        """What its owner says of it at this moment."""
        self._failed_until_mono = 0.0
        self._reason = ""
        self._worker: ImageWorker | None = None
        self._process: EngineProcess | None = None  # of a worker, also while it loads
        self._is_drawing = False
        self._at = ""  # how far a load or an image is
        self._asking = 0
        self.on_work: Callable[[], None] = lambda: None
        """Called when the worker begins to load or to draw; the guard of engines sets it."""

    # For callers

    @property
    def model_id(self) -> str:
        """The id that callers use."""
        return self._spec.model_id

    @property
    def capability(self) -> str:
        """The model's capability in the arbiter."""
        return IMAGE

    @property
    def category(self) -> Category:
        """The kind of the model's work."""
        return self._spec.category

    @property
    def state(self) -> ModelState:
        """The current state of the model."""
        resident = self._memory.find(IMAGE, self.model_id)
        if resident is None:
            return ModelState.FAILED if self._pause_s > 0 else ModelState.UNLOADED
        is_loading = resident.state is State.LOADING or self._worker is None
        return ModelState.LOADING if is_loading else ModelState.READY

    @property
    def can_serve(self) -> bool:
        """Whether a request at this moment would be served."""
        if self.state is ModelState.UNLOADED:
            return self._memory.would_grant(IMAGE, self.model_id, self._terms())
        return self.state is not ModelState.FAILED

    @property
    def last_error(self) -> str:
        """Why the last load failed, in one sentence; "" = it did not, or long ago."""
        return self._reason if self._pause_s > 0 else ""

    def waits_for(self) -> RequestWait | None:
        """See `ImageModel`."""
        if self.state is ModelState.LOADING:
            left_s = self._memory.load_left_s(IMAGE, self.model_id) or None
            return RequestWait(
                reason=WaitReason.LOAD, model_id=self.model_id, seconds=left_s, progress=self._at
            )
        return self._memory.wait_of(IMAGE, self.model_id)

    async def draw(
        self, request: ImageRequest, tell: Tell, wait: WaitTeller | None = None
    ) -> tuple[DrawnImage, ...]:
        """See `ImageModel`."""
        if self._pause_s > 0:
            raise PeerUnavailable(
                f"model {self.model_id} is failed: {self._reason}; it is tried again later",
                retry_after_s=max(1.0, self._pause_s),
            )
        line = WaitTeller(self.waits_for)
        if wait is not None:
            wait.ask = partial(self._told, line)
        terms = replace(self._terms(request.priority), wait=line)
        self._asking += 1
        try:
            async with self._memory.acquire(IMAGE, self.model_id, terms) as handle:
                with progress_to(tell):
                    drawn = await handle.run(request)
                if request.stay_warm_s:
                    self._memory.keep_warm(IMAGE, self.model_id, request.stay_warm_s)
        finally:
            self._asking -= 1
            self._drop_dead()
        if not isinstance(drawn, tuple):
            raise InvariantBroken("a run of an image model draws images", repr(drawn))
        return drawn

    def status(self) -> Json:
        """The model as JSON, with how far its load or its image is."""
        return {
            "model_id": self.model_id,
            "role": self._spec.role.value,
            "state": self.state.value,
            "error": self.last_error,
            "pipeline": self.kind.value,
            "pid": self.pid,
            "at": self._at,
            "requests": self._asking,
        }

    # For the handler

    async def open(self) -> int:
        """Start a worker; returns its process id. Raises LoadFailed and ConfigError."""
        self._at = "starting"
        self.on_work()
        try:
            self._worker = await ImageWorker.start(
                self.model_id,
                self._command,
                sockets=self._setup.sockets,
                timeout_s=self._setup.start_timeout_s,
                clock=self._clock,
                on_progress=self._progressed,
                on_process=self._started,
                on_end=self._died,
            )
        except BaseException as problem:
            self._process = None
            if not isinstance(problem, KakeyaError):
                raise
            self._reason = problem.message
            self._failed_until_mono = self._clock.mono() + PAUSE_S
            raise
        finally:
            self._at = ""
            self._on_change()
        return self._worker.pid

    async def close(self) -> None:
        """End the worker; return when the system has its memory back."""
        worker, self._worker, self._process = self._worker, None, None
        if worker is not None:
            await worker.aclose()
        self._on_change()

    async def perform(
        self, request: ImageRequest, on_step: Callable[[], None]
    ) -> tuple[DrawnImage, ...]:
        """Draw with the worker, or with a new one where it died; the progress is reported, and
        `on_step` called after each step."""
        worker = self._worker
        if worker is None or worker.end:
            await self.close()
            await self.open()
            worker = self._worker
        if worker is None:
            raise InvariantBroken("an open model has a worker", self.model_id)

        def tell(share: float, phrase: str) -> None:
            self._at = phrase
            report_progress(share, phrase)
            on_step()

        self._is_drawing = True
        self.on_work()
        try:
            return await worker.draw(request, tell)
        finally:
            self._at, self._is_drawing = "", False

    # For the guard of engines

    @property
    def pid(self) -> int | None:
        """The process id of the worker, also while it loads; None without one that lives."""
        process = self._process
        return None if process is None else process.pid

    @property
    def running(self) -> int:
        """The requests that the worker draws."""
        return int(self._is_drawing)

    @property
    def waiting(self) -> int:
        """None wait in the worker: it gets one request at a time."""
        return 0

    async def answers(self, timeout_s: float) -> bool:
        """True: a worker in the middle of a step answers nothing, and only its growth ends it."""
        return True

    def kill(self, cause: str) -> None:
        """Kill the worker for the memory that it takes."""
        if self._worker is not None:
            self._worker.kill(cause)
        elif self._process is not None:
            self._process.kill(cause)

    @property
    def _pause_s(self) -> float:
        return self._failed_until_mono - self._clock.mono()

    def _terms(self, priority: GenerationPriority = GenerationPriority.NORMAL) -> Terms:
        terms = terms_within(self._setup.patience_s, priority)
        return replace(terms, may_displace_text=self.manifest.may_displace_text)

    def _told(self, line: WaitTeller) -> RequestWait | None:
        """For what a request waits, with how far the load is."""
        wait = line.ask()
        is_load = wait is not None and wait.reason is WaitReason.LOAD
        return self.waits_for() if is_load else wait

    def _started(self, process: EngineProcess) -> None:
        self._process = process

    def _progressed(self, progress: LoadProgress) -> None:
        self._at = progress.describe()

    def _died(self) -> None:
        self._process = None
        self._drop_dead()
        self._on_change()

    def _drop_dead(self) -> None:
        """Let a model without a process leave the ledger when no request holds it."""
        resident = self._memory.find(IMAGE, self.model_id)
        is_dead = self._worker is not None and bool(self._worker.end)
        if is_dead and resident is not None and resident.is_idle:
            self._memory.unload(IMAGE, self.model_id)
