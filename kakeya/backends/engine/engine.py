"""An engine child: the command that runs it, its times and bounds, and the one that serves now."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kakeya.backends.engine.child import Child, ChildClient, engine_client
from kakeya.backends.engine.failures import EngineOutgrew
from kakeya.backends.engine.process import Command, EngineProcess
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.core.errors import PeerUnavailable
from kakeya.core.figures import Json
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Frame, KvWant
from kakeya.generation.kv import KvOffer
from kakeya.generation.progress import LoadProgress
from kakeya.generation.request import DecodeRequest
from kakeya.wire.channels import Keepalive

ALONE_S = 1.0
"""For so long a child lives without the other ranks of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Times and bounds of one backend."""

    start_timeout_s: float = 600.0
    """The limit from the spawn to the model's facts; the largest models load for minutes."""
    resume_timeout_s: float = 60.0
    """How long a generation waits for an engine, at its start and after each loss."""
    gather_s: float = 20.0
    """How long a group that lost a rank waits for a node that is away, before it is given up: a
    node that is replaced or killed is back by then."""
    decode_timeout_s: float = 3600.0
    draft_timeout_s: float = 5.0
    call_timeout_s: float = 5.0
    """The limit of all calls but Decode, Draft and LoadAdapter, which have their own."""
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 10.0
    """An engine that misses this `max_missed_probes` times in a row is killed."""
    max_step_s: float = 60.0
    """A model thread that works longer than this at one step misses its probe, even if the process
    answers. The longest normal step is a draft after a prefix of a whole context: seconds."""
    max_missed_probes: int = 2
    stop_grace_s: float = 0.5
    """Seconds from SIGTERM to SIGKILL. An engine saves nothing, and its callers had their grace."""
    keep_s: float = 5.0
    """Seconds in which a child that is ended in order may save its KV before."""
    max_running: int = 64
    max_waiting: int = 192
    max_losses_in_a_row: int = 3
    """A generation that loses this many engines without a token between them is given up."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    keepalive: Keepalive = field(default_factory=Keepalive)


class KvSource(Protocol):
    """The source of memory for an engine's keys and values."""

    def free_bytes(self) -> int:
        """Bytes that would be lent now, without models leaving for it."""
        ...

    async def lend(self, want: KvWant) -> None:
        """Answer an engine with new bounds."""
        ...


class NoKvSource:
    """Lends nothing: for engines whose KV bound is fixed, which do not ask."""

    def free_bytes(self) -> int:
        """None are free."""
        return 0

    async def lend(self, want: KvWant) -> None:
        """Leave the question without an answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """A child that serves."""

    process: EngineProcess
    client: ChildClient
    decode_timeout_s: float
    free_kv_bytes: Callable[[], int]

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self.process.pid

    def reason(self, failure: Exception) -> Exception:
        """The failure of a stream, or why it came where the child was ended for its memory."""
        outgrew = self.process.outgrew
        if outgrew and isinstance(failure, PeerUnavailable):
            return EngineOutgrew(f"the engine {outgrew}")
        return failure

    def decode(self, request: DecodeRequest, offer: KvOffer) -> AsyncGenerator[Frame, None]:
        """Stream the frames of a decode. Raises the errors of `ChildClient.decode`."""
        offer = replace(offer, free_bytes=self.free_kv_bytes())
        return self.client.decode(request, self.decode_timeout_s, offer)


class OtherRanks(Protocol):
    """The other ranks of a ring group, which lie on other nodes, while the child is rank 0."""

    def env(self) -> Mapping[str, str]:
        """The environment of the child."""
        ...

    async def lost(self) -> str:
        """Wait until the group cannot go on; the reason completes "because it ..."."""
        ...


async def end_with(others: OtherRanks, process: EngineProcess) -> None:
    """End rank 0 once another rank is lost, unless it ends by itself, as ranks do."""
    lost = await others.lost()
    if not await process.has_exited_within(ALONE_S):
        process.kill(lost)


class EngineCheck(Protocol):
    """A check of successive children by what they say. Raises GroupRefused."""

    async def prepare(self) -> None:
        """Find out what a child has to say, before it takes its memory."""
        ...

    async def admit(
        self, client: ChildClient, facts: ModelFacts, told: Callable[[LoadProgress], None]
    ) -> None:
        """Check a child that has loaded, before it serves. Raises the errors of its decode too."""
        ...

    async def audit(self, client: ChildClient, facts: ModelFacts) -> None:
        """Check a child that serves, if it is time; asked after each probe."""
        ...

    def status(self) -> Json:
        """The last result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The child to run, and what makes its client. `env` None = the agent's, `runtime_dir` None =
    the system's default. `others` forms a ring group around each child, None = it runs alone; what
    that raises gives the model up. `check` None = a child serves as soon as it is loaded."""

    model_id: str
    command: Command
    client: Callable[[Child], ChildClient] = engine_client
    runtime_dir: Path | None = None
    env: Mapping[str, str] | None = None
    others: Callable[[], AbstractAsyncContextManager[OtherRanks]] | None = None
    check: EngineCheck | None = None
