"""The status of the running node as JSON, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kakeya.backends.relay.relays import Relays
from kakeya.backends.ring.groups import RingGroups
from kakeya.core.clock import Clock
from kakeya.core.figures import Figure, Json, counter
from kakeya.core.tasks import TaskHealth
from kakeya.dispatch.jobs import JobQueue
from kakeya.node import figures
from kakeya.node.fleet import NodeFleet
from kakeya.node.memory import NodeMemory
from kakeya.node.pages import NodePages
from kakeya.node.services import Services
from kakeya.node.state import NodeState
from kakeya.node.state_writer import StateWriter
from kakeya.node.status import NodeView, describe, own_warnings
from kakeya.prefix.warm.ahead import NodePrecache
from kakeya.sessions.figures import session_figures
from kakeya.weights.weights import NodeWeights
from kakeya.wire.server.health import NodeHealth
from kakeya.wire.server.listeners import Listeners
from kakeya.wire.server.watchdog import LoopWatchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The parts that report; `started_mono` is the start of the node."""

    http: str
    started_mono: float
    clock: Clock
    plane: NodeFleet
    memory: NodeMemory
    pages: NodePages
    precache: NodePrecache
    relays: Relays
    services: Services
    weights: NodeWeights
    jobs: JobQueue
    rings: RingGroups
    listeners: Listeners
    health: NodeHealth
    keeper: StateWriter[NodeState]
    watchdog: LoopWatchdog
    tasks: Callable[[], Sequence[TaskHealth]]

    def status(self) -> Json:
        """Describe the node, and the fleet in its view."""
        clients = self.services.clients
        told: Json = {"clients": clients.status(), "requests": clients.waiting()}
        told["images"] = [one.status() for one in self.memory.images.by_id.values()]
        told |= {"jobs": self.jobs.status(), "backends": self.relays.status()}
        told["weights"] = self.weights.status()
        told["rings"] = self.rings.overview()
        told["routes"] = self.services.routes.status() | {"for_peers": self.services.served}
        return describe(self._view()) | told

    def warnings(self) -> list[str]:
        """List warnings about the node itself, a sentence each."""
        return own_warnings(self._view())

    def _view(self) -> NodeView:
        plane, mono = self.plane, self.clock.mono()
        cards = plane.registry.snapshot(mono=mono)
        return NodeView(
            node_id=plane.registry.node_id,
            grpc=plane.reach.grpc,
            http=self.http,
            listeners=self.listeners.addresses,
            uptime_s=mono - self.started_mono,
            now=self.clock.wall(),
            mono=mono,
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
            precache={
                **self.precache.status(),
                "copies": self.services.declared_copies.status(),
            },
            plugins=self.memory.plugins,
            backends=self.relays.problems(),
            damaged=self.pages.adapters.manager.problems(),
            state_error=self.keeper.failures.error,
            jobs_problem=self.jobs.problem,
        )

    def figures(self) -> Iterator[Figure]:
        """Figures of the floors below the gateway."""
        yield from figures.node_figures(self.clock.mono() - self.started_mono, len(self.warnings()))
        yield from (*self.plane.figures(), *self.listeners.figures())
        yield from (*self.services.clients.figures(), *self.relays.figures())
        yield from self.rings.figures()
        yield from figures.model_figures(self.memory.engines.models())
        yield from self.memory.figures()
        yield from self.pages.figures()
        yield from self.services.peers.figures()
        yield from self.precache.figures()
        yield from self.jobs.figures()
        yield from self.weights.figures()
        yield from self.services.routes.figures()
        yield from self.services.copies.figures()
        yield from self.services.declared_copies.figures()
        yield counter("kakeya_served_peers", "Generations for peers", self.services.served)
        yield from session_figures(self.services.runtime.stats)
        tasks = (*self.tasks(), *self.services.runtime.health(), *self.memory.health())
        tasks += (*self.pages.health(), *self.precache.health())
        yield from figures.task_figures(tasks)
        yield from figures.loop_figures(self.watchdog.stalls, self.watchdog.worst_lag_s)
        yield from figures.state_figures(self.keeper.failures.count)
