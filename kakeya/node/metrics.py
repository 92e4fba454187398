"""What the floors below the gateway count, as Prometheus metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kakeya.backends.resident import ResidentModel
from kakeya.core.tasks import TaskHealth
from kakeya.fleet.gossip.gossip import GossipStats
from kakeya.fleet.gossip.service import GossipServiceStats
from kakeya.fleet.identity.invite import InviteStats
from kakeya.fleet.paths.discovery import DiscoveryStats
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import ModelSpec
from kakeya.sessions.service import RuntimeStats


def model_metrics(models: Sequence[tuple[ModelSpec, ResidentModel | None]]) -> Iterator[Metric]:
    """State, restarts and load of the engine children."""
    ready = GaugeMetricFamily("kakeya_model_ready", "1 while it serves", labels=["model"])
    restarts = CounterMetricFamily(
        "kakeya_engine_restarts", "Engine children started again", labels=["model"]
    )
    decodes = GaugeMetricFamily(
        "kakeya_model_decodes", "Decodes at this moment", labels=["model", "state"]
    )
    for spec, backend in models:
        if backend is not None:
            ready.add_metric([spec.model_id], float(backend.state is ModelState.READY))
            restarts.add_metric([spec.model_id], backend.restarts)
            decodes.add_metric([spec.model_id, "running"], backend.running)
            decodes.add_metric([spec.model_id, "waiting"], backend.waiting)
    yield from (ready, restarts, decodes)


def fleet_metrics(
    known: int, suspects: int, gossip: GossipStats, served: GossipServiceStats
) -> Iterator[Metric]:
    """The view of the fleet, and both sides of gossip."""
    yield GaugeMetricFamily("kakeya_fleet_nodes", "Nodes with a live card", value=known)
    yield GaugeMetricFamily("kakeya_fleet_suspects", "Nodes that do not answer", value=suspects)
    for name, text, count in (
        ("rounds", "Gossip rounds", gossip.rounds),
        ("exchanges", "Exchanges that peers answered", gossip.exchanges),
        ("failures", "Exchanges that failed", gossip.failures),
        ("sent_bytes", "Bytes of cards sent in rounds", gossip.sent_bytes),
        ("served", "Exchanges that this node answered", served.exchanges),
        ("refused", "Exchanges that this node refused", served.refused),
    ):
        yield CounterMetricFamily(f"kakeya_gossip_{name}", text, value=count)
    dropped = CounterMetricFamily(
        "kakeya_gossip_cards_dropped", "Cards dropped in rounds, by fault", labels=["fault"]
    )
    for fault, count in gossip.dropped.items():
        dropped.add_metric([fault.value], count)
    yield dropped


def route_metrics(downgrades: int, mdns: DiscoveryStats | None) -> Iterator[Metric]:
    """Better links that were lost, and what mDNS shows."""
    yield CounterMetricFamily("kakeya_route_downgrades", "Better links lost", value=downgrades)
    if mdns is not None:
        running, seen = float(mdns.is_running), mdns.sightings
        yield GaugeMetricFamily("kakeya_mdns_running", "1 while multicast works", value=running)
        yield GaugeMetricFamily("kakeya_mdns_sightings", "Nodes of this fleet seen", value=seen)
        yield CounterMetricFamily("kakeya_mdns_ignored", "Sightings refused", value=mdns.ignored)


def invite_metrics(door: InviteStats) -> Iterator[Metric]:
    """What became of invites, and who knocked without one."""
    family = CounterMetricFamily("kakeya_invites", "Invites and tries to join", labels=["outcome"])
    for outcome, count in asdict(door).items():
        family.add_metric([outcome], count)
    yield family


def state_metrics(failures: int) -> Iterator[Metric]:
    """How often the disk took nothing."""
    yield CounterMetricFamily("kakeya_state_failures", "State not saved", value=failures)


def session_metrics(stats: RuntimeStats) -> Iterator[Metric]:
    """Sessions and generations over gRPC."""
    yield GaugeMetricFamily("kakeya_sessions", "Sessions now", value=stats.sessions.active)
    yield GaugeMetricFamily(
        "kakeya_generates_running", "Generate calls now", value=stats.generates_running
    )
    ended = CounterMetricFamily("kakeya_generates", "Generate calls that ended", labels=["end"])
    ended.add_metric(["done"], stats.generates_done)
    ended.add_metric(["failed"], stats.generates_failed)
    ended.add_metric(["cancelled"], stats.generates_cancelled)
    yield ended
    yield CounterMetricFamily(
        "kakeya_generate_tokens", "Tokens sent by Generate", value=stats.tokens_out
    )
    sessions = CounterMetricFamily("kakeya_sessions_ended", "Sessions by end", labels=["end"])
    for end, count in (
        ("closed", stats.sessions.closed),
        ("expired", stats.sessions.expired),
        ("failed", stats.sessions.failed),
        ("refused", stats.sessions.refused),
    ):
        sessions.add_metric([end], count)
    yield sessions


def task_metrics(tasks: Sequence[TaskHealth]) -> Iterator[Metric]:
    """Background tasks: a failure here is a fault of ours."""
    running = GaugeMetricFamily("kakeya_task_running", "1 while it runs", labels=["task"])
    failures = CounterMetricFamily("kakeya_task_failures", "Restarts", labels=["task"])
    for task in tasks:
        running.add_metric([task.name], float(task.running))
        failures.add_metric([task.name], task.failures)
    yield from (running, failures)


def loop_metrics(stalls: int, worst_lag_s: float) -> Iterator[Metric]:
    """The event loop: how often it was stuck, and the longest that it let anybody wait."""
    yield CounterMetricFamily("kakeya_loop_stalls", "Times the loop was stuck", value=stalls)
    yield GaugeMetricFamily("kakeya_loop_worst_lag_seconds", "Longest wait", value=worst_lag_s)
