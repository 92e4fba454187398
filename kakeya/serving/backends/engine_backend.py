"""One model of this node, run by an engine child that the agent owns.

The backend starts the child, waits until it describes its model, notices its exit at once and
starts it again by `RestartPolicy`. Generations outlive the child: `decode` goes on in the next
one from the tokens committed so far. A child that hangs is found by a probe and killed, so that
every fault becomes the one that is handled: an exit.

    LOADING -> READY -> RESTARTING -> READY ...     FAILED: given up     STOPPED: closed by us
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KakeyaError,
    PeerUnavailable,
)
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth
from kakeya.decoding.proposer import Draft
from kakeya.runtime.generation import (
    DecodeRequest,
    EngineStats,
    Frame,
    ModelFacts,
    ModelState,
    ServedModel,
)
from kakeya.serving.backends.continuation import Continuation
from kakeya.serving.backends.engine_client import EngineClient
from kakeya.serving.backends.engine_process import Command, EngineProcess, SocketFolder
from kakeya.serving.backends.gate import Gate
from kakeya.serving.backends.restart import Exit, GiveUp, Plan, RestartIn, RestartPolicy
from kakeya.wire.channels import Keepalive

_log = logging.getLogger(__name__)
EXIT_NOTICE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Times and bounds of one backend."""

    start_timeout_s: float = 600.0
    """From the spawn until the model is described; the largest models load for minutes."""
    resume_timeout_s: float = 60.0
    """How long a generation waits for an engine, at its start and after each loss."""
    decode_timeout_s: float = 3600.0
    draft_timeout_s: float = 5.0
    call_timeout_s: float = 5.0
    """Of Stats and Release."""
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 10.0
    """An engine that misses this `max_missed_probes` times in a row is killed."""
    max_missed_probes: int = 2
    stop_grace_s: float = 5.0
    max_running: int = 8
    max_waiting: int = 64
    max_losses_in_a_row: int = 3
    """A generation that loses this many engines without a token between them is given up."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    keepalive: Keepalive = field(default_factory=Keepalive)


@dataclass(frozen=True, slots=True, eq=False)
class _Engine:
    """A child that serves."""

    process: EngineProcess
    client: EngineClient
    facts: ModelFacts


class EngineBackend:
    """A `ServedModel` behind one engine child; an `async with` that starts and ends it.

    `on_change` is called after each change of `state`, on the event loop; it must not raise.
    """

    def __init__(
        self,
        model_id: str,
        command: Command,
        *,
        options: EngineOptions | None = None,
        clock: Clock | None = None,
        runtime_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        on_change: Callable[[ServedModel], None] | None = None,
    ) -> None:
        self._model_id = model_id
        self._command = command
        self._options = options or EngineOptions()
        self._clock = clock or SystemClock()
        self._runtime_dir = runtime_dir
        self._env = env
        self._on_change = on_change
        self._gate = Gate(
            f"model {model_id}",
            max_running=self._options.max_running,
            max_waiting=self._options.max_waiting,
        )
        self._tasks = Supervisor(self._clock)
        self._state = ModelState.LOADING
        self._last_error = ""
        self._changed = asyncio.Event()
        self._engine: _Engine | None = None
        self._pid: int | None = None
        self._facts: ModelFacts | None = None
        self._deaths: tuple[float, ...] = ()
        self._restarts = 0
        self._next_start_mono = 0.0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Begin to load; `ready` waits for the end of it."""
        self._tasks.start(f"engine {self._model_id}", self._supervise)

    async def aclose(self) -> None:
        """End the child; running decodes end with PeerUnavailable."""
        self._move(ModelState.STOPPED, "")
        await self._tasks.aclose()

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        return self._model_id

    @property
    def state(self) -> ModelState:
        """Where it is in its life now."""
        return self._state

    @property
    def last_error(self) -> str:
        """Why it is FAILED or RESTARTING, in one sentence; "" otherwise."""
        return self._last_error

    @property
    def facts(self) -> ModelFacts | None:
        """What the last engine said of its model; None before the first one was ready."""
        return self._facts

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._pid

    @property
    def restarts(self) -> int:
        """How often a child was started again."""
        return self._restarts

    @property
    def running(self) -> int:
        """Decodes that hold a place."""
        return self._gate.running

    @property
    def waiting(self) -> int:
        """Decodes that wait for a place."""
        return self._gate.waiting

    def health(self) -> tuple[TaskHealth, ...]:
        """The supervising task."""
        return self._tasks.health()

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until it serves. Raises PeerUnavailable (with retry_after_s) when it will not."""
        return (await self._serving(timeout_s)).facts

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        Raises QueueFull when too many wait, PeerUnavailable when no engine can take or finish it.
        """
        async with self._gate.turn(), aclosing(self._decode(request)) as frames:
            async for frame in frames:
                yield frame

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None = None,
        temperature: float | None = None,
    ) -> Draft:
        """Draft with this model. Never waits for a restart: a late draft is worth nothing."""
        if not prefix or size < 1:
            raise InvalidArgument(
                f"a draft needs a prefix and a size of at least 1, "
                f"not {len(prefix)} tokens and size {size}"
            )
        engine = self._engine
        if engine is None:
            raise self._unavailable()
        return await engine.client.draft(
            prefix,
            size,
            seed=seed,
            temperature=temperature,
            timeout_s=self._options.draft_timeout_s,
        )

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key; unknown keys and dead engines are fine."""
        if self._engine is None:
            return
        try:
            await self._engine.client.release(kv_key, self._options.call_timeout_s)
        except KakeyaError as error:
            # The engine's own bound on kept KV reclaims it; a dead one holds nothing.
            event(_log, "release failed", level=logging.DEBUG, kv_key=kv_key, error=error.message)

    async def stats(self) -> EngineStats:
        """Live numbers; zeros while the engine is not up."""
        if self._engine is None:
            return EngineStats()
        try:
            return await self._engine.client.stats(self._options.call_timeout_s)
        except KakeyaError:
            return EngineStats()

    # Generations that outlive their engine

    async def _decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        job = Continuation(request, self._clock.mono())
        lost: _Engine | None = None
        while True:
            if lost is not None and self._facts is not None:
                done = job.finish(self._facts.context_tokens, self._clock.mono())
                if done is not None:
                    yield done
                    return
            engine = await self._serving(self._options.resume_timeout_s, other_than=lost)
            stream = engine.client.decode(job.rest(), self._options.decode_timeout_s)
            try:
                async with aclosing(stream) as frames:
                    async for frame in frames:
                        seen = job.take(frame, self._clock.mono())
                        if seen is not None:
                            yield seen
            except PeerUnavailable as error:
                job.interrupt()
                lost = await self._settle_loss(engine, job, error)
            else:
                return

    async def _settle_loss(
        self, engine: _Engine, job: Continuation, error: PeerUnavailable
    ) -> _Engine | None:
        """Find out what a broken stream means; return the engine if it is gone for good."""
        event(
            _log,
            "decode lost its engine",
            level=logging.WARNING,
            model=self._model_id,
            error=error.message,
        )
        if job.losses_in_a_row >= self._options.max_losses_in_a_row:
            raise PeerUnavailable(
                f"model {self._model_id} lost {job.losses_in_a_row} engines in a row over this "
                f"request without a token, the last with: {error.message}",
                retry_after_s=self._retry_after_s(),
            ) from None
        # A killed child breaks its streams a moment before its exit is known.
        if self._engine is not engine or await engine.process.has_exited_within(EXIT_NOTICE_S):
            return engine
        if await engine.client.answers(self._options.call_timeout_s):
            return None
        engine.process.kill(f"answered neither a decode nor a probe ({error.message})")
        return engine

    async def _serving(self, timeout_s: float, *, other_than: _Engine | None = None) -> _Engine:
        """Wait for an engine that serves, and is not the one given."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._engine is None or self._engine is other_than:
                    if self._state in (ModelState.FAILED, ModelState.STOPPED):
                        raise self._unavailable()
                    await self._changed.wait()
                return self._engine
        except TimeoutError:
            raise self._unavailable() from None

    def _unavailable(self) -> PeerUnavailable:
        because = f": {self._last_error}" if self._last_error else ""
        return PeerUnavailable(
            f"model {self._model_id} is {self._state.value}{because}",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> float | None:
        if self._state in (ModelState.FAILED, ModelState.STOPPED):
            return None
        load_s = self._facts.load_s if self._facts else 5.0
        return max(1.0, self._next_start_mono - self._clock.mono() + load_s)

    # The life of the child

    async def _supervise(self) -> None:
        try:
            folder = await asyncio.to_thread(SocketFolder, self._runtime_dir)
            try:
                while isinstance(plan := await self._run_engine(folder.next_socket()), RestartIn):
                    await self._clock.sleep(plan.delay_s)
                    self._restarts += 1
            finally:
                await asyncio.to_thread(folder.remove)
        except ConfigError as error:
            self._move(ModelState.FAILED, error.message)

    async def _run_engine(self, socket: Path) -> Plan:
        """Run one child from its spawn to its end and decide what follows."""
        process = await EngineProcess.start(self._model_id, self._command, socket, self._env)
        client = EngineClient(self._model_id, process.address, self._options.keepalive)
        self._pid = process.pid
        watch = asyncio.create_task(self._attend(process, client), name=f"attend {self._model_id}")
        try:
            ended = await process.exited()
            return self._after_exit(ended)
        finally:
            self._engine = None
            self._pid = None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await process.aclose(self._options.stop_grace_s)
            await client.aclose()

    def _after_exit(self, ended: Exit) -> Plan:
        now = self._clock.mono()
        self._engine = None
        plan = self._options.restart.after_exit(now, ended, self._deaths)
        self._deaths = (*self._options.restart.recent(now, self._deaths), now)
        match plan:
            case RestartIn():
                self._next_start_mono = now + plan.delay_s
                self._move(ModelState.RESTARTING, plan.reason)
            case GiveUp():
                self._move(ModelState.FAILED, plan.reason)
        return plan

    async def _attend(self, process: EngineProcess, client: EngineClient) -> None:
        """Wait for the model, then probe; a child that fails either is killed."""
        try:
            facts = await self._described(client)
        except KakeyaError as error:
            process.kill(f"could not be made ready: {error.message}")
            return
        self._engine = _Engine(process, client, facts)
        self._facts = facts
        self._move(ModelState.READY, "")
        missed = 0
        while missed < self._options.max_missed_probes:
            await self._clock.sleep(self._options.probe_interval_s)
            missed = 0 if await client.answers(self._options.probe_timeout_s) else missed + 1
        process.kill(f"answered none of {missed} probes of {self._options.probe_timeout_s:g} s")

    async def _described(self, client: EngineClient) -> ModelFacts:
        started = self._clock.mono()
        step_s = 5.0
        while (left_s := self._options.start_timeout_s - (self._clock.mono() - started)) > 0:
            try:
                return await client.describe(min(step_s, left_s))
            except DeadlineExceeded:
                waited_s = self._clock.mono() - started
                event(_log, "model is loading", model=self._model_id, seconds=waited_s)
            except PeerUnavailable:
                await self._clock.sleep(0.05)
        raise DeadlineExceeded(f"it took longer than {self._options.start_timeout_s:g} s")

    def _move(self, state: ModelState, reason: str) -> None:
        if self._state is ModelState.STOPPED:
            return
        self._state = state
        self._last_error = reason
        event(_log, f"model {state.value}", model=self._model_id, reason=reason or "-")
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._on_change is not None:
            self._on_change(self)
