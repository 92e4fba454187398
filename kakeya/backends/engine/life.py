"""The life cycle of one engine child: started, awaited, probed, restarted, given up.

This module owns the state of a served model. A probe finds a child that hangs, or a model thread
that does, and the child is killed: so every fault becomes an exit, which is handled.

    LOADING -> READY -> RESTARTING -> READY ...     FAILED: given up     STOPPED: closed by us
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

from kakeya.backends.engine.child import Child, ChildClient
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.backends.engine.engine import (
    Engine,
    EngineOptions,
    EngineSpec,
    KvSource,
    NoKvSource,
    OtherRanks,
    end_with,
)
from kakeya.backends.engine.failures import GroupRefused
from kakeya.backends.engine.process import EngineProcess, SocketFolder
from kakeya.backends.engine.restart import Exit, GiveUp, Plan, RestartIn, RestartPolicy
from kakeya.backends.gate import Gate
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    DeadlineExceeded,
    KakeyaError,
    MemoryRefused,
    PeerUnavailable,
)
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth, shared_pause_s
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.progress import LoadProgress

_log = logging.getLogger(__name__)
_REST_INTERVALS = (3, 6, 14)
"""Before the 1st, 2nd, ... probe of an engine at rest, in probe intervals; the last value repeats.
A probe wakes a dozen threads of gRPC, each of which looks for more work some twenty times."""
CARE_S = 300.0
"""For so long after a child was killed, by this node or by the system, later ones run one sequence
at a time: what ran together may have been too much."""
GROUP_RESTARTS = RestartPolicy(backoff_s=(0.0, 1.0, 2.0, 4.0), max_deaths=30)
"""Of rank 0 of a group that has served: what is lost on other machines is no fault of the engine.
Given up, the group waits longer between its tries, or until its members are seen again."""
GATHER_EVERY_S = 1.0
"""Between two tries to have the other ranks of a group that was lost."""
EXIT_NOTICE_S = 0.25
"""How long to wait for an exit: a killed child breaks its streams a moment before."""


class EngineLife:
    """Runs successive children behind one gate.

    `on_change` is called on the event loop after each change of `state`, and must not raise."""

    def __init__(
        self,
        spec: EngineSpec,
        options: EngineOptions,
        *,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self.model_id = spec.model_id
        """The id that callers use."""
        self.options = options
        self.gate = Gate(
            f"model {spec.model_id}",
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            mono=clock.mono,
            on_entry=self._entered,
        )
        self._clock = clock
        self._on_change = on_change
        self._tasks = Supervisor(clock)
        self._changed = asyncio.Event()
        self._deaths: tuple[float, ...] = ()
        self._next_start_mono = 0.0
        self._careful_until_mono = 0.0
        self._process: EngineProcess | None = None
        self._is_asked_to_end = False
        self._refusal = ""
        self.limits = EngineMemoryLimits()
        """The bounds that each engine gets before it serves."""
        self.kv_source: KvSource = NoKvSource()
        self._work = asyncio.Event()
        self.on_work: Callable[[], None] = lambda: None
        """Called at the start of each child and of each request."""
        self.state = ModelState.LOADING
        self.last_error = ""
        """The reason of FAILED or RESTARTING, in one sentence; "" otherwise."""
        self.engine: Engine | None = None
        """None while no child serves."""
        self.pid: int | None = None
        """The child's process id; None without a child."""
        self.progress: LoadProgress | None = None
        """How far the load of a child is; None while none loads."""
        self.began_mono = 0.0
        """The start of the last child."""
        self.facts: ModelFacts | None = None
        """The facts from the last engine; None before the first one was ready."""
        self.restarts = 0

    async def start(self) -> None:
        """Begin to load; `ready` waits for the end of the load."""
        self._tasks.start(f"engine {self.model_id}", self._supervise)

    async def aclose(self) -> None:
        """End the child for good; running decodes end with PeerUnavailable."""
        self._move(ModelState.STOPPED, "")
        await self._tasks.aclose()

    def health(self) -> tuple[TaskHealth, ...]:
        """The supervising task."""
        return self._tasks.health()

    async def serving(self, timeout_s: float, *, other_than: Engine | None = None) -> Engine:
        """Wait for a serving engine other than `other_than`. Raises PeerUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.engine is None or self.engine is other_than:
                    if self.state in (ModelState.FAILED, ModelState.STOPPED):
                        raise self.unavailable()
                    await self._changed.wait()
                return self.engine
        except TimeoutError:
            raise self.unavailable() from None

    async def is_lost(self, engine: Engine, error: PeerUnavailable) -> bool:
        """Whether the engine of a broken stream is lost; one that does not answer is killed."""
        if self.engine is not engine or await engine.process.has_exited_within(EXIT_NOTICE_S):
            return True
        if await engine.client.answers(self.options.call_timeout_s):
            return False
        engine.process.kill(f"answered neither a decode nor a probe ({error.message})")
        return True

    async def answers(self, timeout_s: float) -> bool:
        """Whether the process of the engine answers; True while none serves."""
        engine = self.engine
        return engine is None or await engine.client.answers(timeout_s)

    def end(self, cause: str) -> None:
        """End a child that outgrew its memory in order and start another one at once; this does
        not count as a death.

        `cause` completes "because it ..."; running sequences go on in the next child.
        """
        self.gate.resume()
        if self._process is None or self._is_asked_to_end:
            return
        self._is_asked_to_end = True
        self.engine = None
        self._process.outgrew = cause
        self._process.end(cause)
        self._move(ModelState.RESTARTING, f"it was asked to end because it {cause}")

    def kill(self, cause: str) -> None:
        """Kill a child that outgrew its memory; `cause` and running sequences as in `end`."""
        self.gate.resume()
        if self._process is not None:
            self.engine = None  # new requests wait for the next child
            self._process.outgrew = cause
            self._process.kill(cause)

    def unavailable(self) -> PeerUnavailable:
        """Make the error for a caller that cannot be served now."""
        because = f": {self.last_error}" if self.last_error else ""
        if self.progress is not None:
            because += f", {self.progress.describe()}"
        return PeerUnavailable(
            f"model {self.model_id} is {self.state.value}{because}",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> float | None:
        """Return the seconds until another try may help; None = only after the owner acts."""
        if self.state in (ModelState.FAILED, ModelState.STOPPED):
            return None
        load_s = self.facts.load_s if self.facts else 5.0
        return max(1.0, self._next_start_mono - self._clock.mono() + load_s)

    async def _supervise(self) -> None:
        try:
            async with SocketFolder.lent(self._spec.runtime_dir) as folder:
                while isinstance(plan := await self._run_engine(folder.next_socket()), RestartIn):
                    await self._clock.sleep(plan.delay_s)
                    self.restarts += 1
        except ConfigError as error:
            self._move(ModelState.FAILED, error.message)

    async def _run_engine(self, socket: Path) -> Plan:
        """Run one child from its spawn to its end and decide what follows."""
        self.began_mono = self._clock.mono()
        if self._spec.others is None:
            return await self._run_child(socket, None)
        async with AsyncExitStack() as stack:
            try:
                others = await self._gathered(stack, self._spec.others)
            except KakeyaError as refusal:
                self._move(ModelState.FAILED, refusal.message)
                return GiveUp(reason=refusal.message)
            return await self._run_child(socket, others)

    async def _gathered(
        self, stack: AsyncExitStack, others: Callable[[], AbstractAsyncContextManager[OtherRanks]]
    ) -> OtherRanks:
        """The other ranks of a group, for which a group that lost one waits. Raises KakeyaError."""
        while True:
            try:
                return await stack.enter_async_context(others())
            except KakeyaError as refusal:
                if not self._awaits(refusal):
                    raise
                self._move(ModelState.RESTARTING, refusal.message)
            await self._clock.sleep(GATHER_EVERY_S)

    def _awaits(self, refusal: KakeyaError) -> bool:
        """Whether a rank that is away may be back in time for the generations that lost it."""
        lost_mono = self._deaths[-1] if self._deaths else -math.inf
        is_in_time = self._clock.mono() - lost_mono < self.options.gather_s
        return isinstance(refusal, PeerUnavailable | DeadlineExceeded) and is_in_time

    async def _run_child(self, socket: Path, others: OtherRanks | None) -> Plan:
        env = self._spec.env if others is None else others.env()
        process = await EngineProcess.start(
            self.model_id, self._spec.command, socket, env, self._loads
        )
        client = self._spec.client(
            Child(
                model_id=self.model_id,
                pid=process.pid,
                socket=socket,
                keepalive=self.options.keepalive,
                clock=self._clock,
                lend=lambda want: self.kv_source.lend(want),
                on_progress=self._loads,
            )
        )
        self.pid = process.pid
        self.on_work()
        self._process = process
        self._is_asked_to_end = False
        watches = [asyncio.create_task(self._attend(process, client))]
        if others is not None:
            watches.append(asyncio.create_task(end_with(others, process)))
        try:
            ended = await process.exited()
            return self._after_exit(ended)
        finally:
            serves = self.engine is not None
            self.engine = None
            self.progress = None
            self._process = None
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            try:
                if serves:
                    await client.keep(self.options.keep_s)
                await process.aclose(self.options.stop_grace_s)
            finally:
                self.pid = None  # only after the child's end: until then it may write to its pages
            await client.aclose()

    def _after_exit(self, ended: Exit) -> Plan:
        now = self._clock.mono()
        self.engine = None
        self.pid = None
        if self._is_asked_to_end:
            self._next_start_mono = now
            self._move(ModelState.RESTARTING, f"it ended by {ended.describe()}")
            return RestartIn(delay_s=0.0, reason=ended.describe())
        if self._refusal:
            self._move(ModelState.FAILED, self._refusal)
            return GiveUp(reason=self._refusal)
        if ended.returncode == -signal.SIGKILL and not (self._spec.others and ended.cause):
            self._careful_until_mono = now + CARE_S
            self.limits = self.limits.merged(EngineMemoryLimits(max_running=1))
        has_served = self._spec.others is not None and self.facts is not None
        policy = GROUP_RESTARTS if has_served else self.options.restart
        plan = policy.after_exit(now, ended, self._deaths)
        self._deaths = (*self.options.restart.recent(now, self._deaths), now)
        match plan:
            case RestartIn():
                self._next_start_mono = now + plan.delay_s
                self._move(ModelState.RESTARTING, plan.reason)
            case GiveUp():
                self._move(ModelState.FAILED, plan.reason)
        return plan

    async def _attend(self, process: EngineProcess, client: ChildClient) -> None:
        """Wait for the model, then probe; a child that fails either is killed."""
        try:
            await self._serve(process, client)
        except GroupRefused as refusal:  # no later child can make it good
            self.engine = None
            self._refusal = refusal.message
            process.kill("was refused")
        except Exception as fault:  # noqa: BLE001 - no fault may leave a child without a keeper
            self.engine = None
            process.kill(f"lost its keeper: {fault!r}")
            _log.debug("traceback", exc_info=fault)

    async def _serve(self, process: EngineProcess, client: ChildClient) -> None:
        try:
            facts = await self._described(client)
            if self.limits != EngineMemoryLimits():
                facts = await self._limited(client, facts)
            if self._spec.check is not None:
                await self._spec.check.admit(client, facts, self._loads)
        except GroupRefused:
            raise
        except KakeyaError as error:
            process.kill(f"could not be made ready: {error.message}")
            return
        self.engine = Engine(
            process,
            client,
            self.options.decode_timeout_s,
            free_kv_bytes=lambda: self.kv_source.free_bytes(),
        )
        self.progress = None
        self.facts = facts
        self._move(ModelState.READY, "")
        process.kill(await self._probed_until_ill(client))

    async def _limited(self, client: ChildClient, facts: ModelFacts) -> ModelFacts:
        """Bound a new engine before it serves; its facts may depend on the bounds."""
        try:
            await client.set_limits(self.limits, self.options.call_timeout_s)
        except MemoryRefused as refusal:
            # The engine serves all the same: the watch measures its memory.
            event(
                _log,
                "limits refused",
                level=logging.WARNING,
                model=self.model_id,
                error=refusal.message,
            )
            return facts
        return await client.describe(self.options.call_timeout_s)

    async def _probed_until_ill(self, client: ChildClient) -> str:
        """Probe until too many probes fail in a row; return the fault of the last one."""
        missed, wrong, rests = 0, "", 0
        while missed < self.options.max_missed_probes:
            if missed or not self._is_at_rest():
                rests = 0
                await self._clock.sleep(self.options.probe_interval_s)
            elif await self._rested(rests):
                rests += 1
            else:
                rests = 0
                continue
            seen = await client.look(self.options.probe_timeout_s)
            if seen is None:
                wrong = f"answered no probe within {self.options.probe_timeout_s:g} s"
            elif seen[1] > self.options.max_step_s:
                wrong = f"was at one step of its model for {seen[1]:.3g} s"
            else:
                missed, wrong = 0, ""
                if self._learn(seen[0]):
                    rests = 0
                await self._end_care(client)
                if self._spec.check is not None:
                    await self._spec.check.audit(client, seen[0])
            missed += bool(wrong)
        return wrong

    def _entered(self) -> None:
        self._work.set()
        self.on_work()

    def _is_at_rest(self) -> bool:
        """Whether an engine is without a request; a group never is: it has more than one process
        that may be lost."""
        return self.gate.running + self.gate.waiting == 0 and self._spec.check is None

    async def _rested(self, rests: int) -> bool:
        """Wait for the next probe of an engine at rest; False if a request came before."""
        self._work.clear()
        intervals = _REST_INTERVALS[min(rests, len(_REST_INTERVALS) - 1)]
        pause_s = shared_pause_s(intervals * self.options.probe_interval_s, self._clock.mono())
        await self._clock.sleep(pause_s, self._work)
        return not self._work.is_set()

    async def _end_care(self, client: ChildClient) -> None:
        """Let an engine run as many sequences as configured again when its time of care is over."""
        usual = self.options.max_running
        if self.limits.max_running in (0, usual) or self._clock.mono() < self._careful_until_mono:
            return
        again = EngineMemoryLimits(max_running=usual)
        with contextlib.suppress(KakeyaError):  # busy: the next probe tries again
            await client.set_limits(again, self.options.call_timeout_s)
            self.limits = self.limits.merged(again)

    def _learn(self, facts: ModelFacts) -> bool:
        """Take facts that an engine found out while it was idle: its speeds. Whether they are
        news."""
        if facts == self.facts:
            return False
        self.facts = facts
        self._on_change()
        return True

    async def _described(self, client: ChildClient) -> ModelFacts:
        started = self._clock.mono()
        while (left_s := self.options.start_timeout_s - (self._clock.mono() - started)) > 0:
            try:
                return await client.describe(left_s)
            except DeadlineExceeded:
                break
            except PeerUnavailable:
                await self._clock.sleep(0.05)
        raise DeadlineExceeded(f"it took longer than {self.options.start_timeout_s:g} s")

    def _loads(self, progress: LoadProgress) -> None:
        """Note how far the load of the child is; its last lines may come after its end."""
        if self._process is None:
            return
        has_begun = self.progress is None or self.progress.phase is not progress.phase
        self.progress = progress
        if has_begun:
            event(
                _log,
                "model is loading",
                model=self.model_id,
                phase=progress.phase.value,
                bytes=progress.total_bytes,
                seconds=self._clock.mono() - self.began_mono,
            )

    def _move(self, state: ModelState, reason: str) -> None:
        if self.state is ModelState.STOPPED:
            return
        self.state = state
        self.last_error = reason
        event(_log, f"model {state.value}", model=self.model_id, reason=reason or "-")
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()
