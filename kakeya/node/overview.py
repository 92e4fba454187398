"""The running node seen as a whole: its status as JSON, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from kakeya.core.clock import Clock
from kakeya.core.tasks import TaskHealth
from kakeya.node import metrics
from kakeya.node.fleet import NodeFleet
from kakeya.node.memory import NodeMemory
from kakeya.node.pages import NodePages
from kakeya.node.services import Services
from kakeya.node.state import NodeState
from kakeya.node.state_writer import StateWriter
from kakeya.node.status import Json, NodeView, describe
from kakeya.node.watchdog import LoopWatchdog
from kakeya.prefix.warm.ahead import NodePrecache
from kakeya.wire.server.health import NodeHealth
from kakeya.wire.server.listeners import Listeners


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The parts that have something to tell; `started_mono` is when the node began."""

    http: str
    started_mono: float
    clock: Clock
    plane: NodeFleet
    memory: NodeMemory
    pages: NodePages
    precache: NodePrecache
    services: Services
    listeners: Listeners
    health: NodeHealth
    keeper: StateWriter[NodeState]
    watchdog: LoopWatchdog
    tasks: Callable[[], Sequence[TaskHealth]]

    def status(self) -> Json:
        """Describe the node and the fleet as it sees it."""
        plane, mono = self.plane, self.clock.mono()
        cards = plane.registry.snapshot(mono=mono)
        return describe(
            NodeView(
                node_id=plane.registry.node_id,
                grpc=plane.reach.grpc,
                http=self.http,
                listeners=self.listeners.addresses,
                uptime_s=mono - self.started_mono,
                now=self.clock.wall(),
                not_serving=self.health.reason(),
                cards=cards,
                fleet=plane.view(cards),
                models=self.memory.engines.models(),
                memory=self.memory.status(),
                adapters=self.pages.adapters.status(),
                prefixes={
                    **self.pages.prefixes.status(),
                    "peers": self.services.peers.status(),
                },
                precache=self.precache.status(),
                state_error=self.keeper.error,
            )
        )

    def metrics(self) -> Iterator[Metric]:
        """Count what the floors below the gateway did."""
        yield from self.plane.metrics()
        yield from metrics.model_metrics(self.memory.engines.models())
        yield from self.memory.metrics()
        yield from self.pages.metrics()
        yield from self.services.peers.metrics()
        yield from self.precache.metrics()
        yield from metrics.session_metrics(self.services.runtime.stats)
        tasks = (*self.tasks(), *self.services.runtime.health(), *self.memory.health())
        tasks += (*self.pages.health(), *self.precache.health())
        yield from metrics.task_metrics(tasks)
        yield from metrics.loop_metrics(self.watchdog.stalls, self.watchdog.worst_lag_s)
        yield from metrics.state_metrics(self.keeper.failures)
