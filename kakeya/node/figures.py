"""Figures of the parts without a file of their own: models, fleet, tasks, the loop."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import kakeya
from kakeya.backends.resident import ResidentModel
from kakeya.core.figures import Figure, counter, from_zero, gauge
from kakeya.core.tasks import TaskHealth
from kakeya.fleet.cards.cards import CardFault
from kakeya.fleet.gossip.gossip import GossipStats
from kakeya.fleet.gossip.service import GossipServiceStats
from kakeya.fleet.identity.invite import InviteStats
from kakeya.fleet.liveness.news import NEWS
from kakeya.fleet.paths.discovery import DiscoveryStats
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import ModelSpec

_MDNS_ERRNOS = tuple(
    str(number)
    for number in (
        *(errno.EPERM, errno.EACCES, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
        *(errno.EADDRNOTAVAIL, errno.ENOBUFS),
    )
)
"""Refusals of multicast by firewalls, permissions and lost interfaces."""


def model_figures(models: Sequence[tuple[ModelSpec, ResidentModel | None]]) -> Iterator[Figure]:
    """State, restarts and load of the engine children."""
    known = {spec.model_id: model for spec, model in models if model is not None}
    yield gauge(
        "kakeya_model_ready{model}",
        "1 while a model is in memory and serves",
        {name: float(model.state is ModelState.READY) for name, model in known.items()},
    )
    yield counter(
        "kakeya_engine_restarts{model}",
        "Engine children started again",
        {name: model.restarts for name, model in known.items()},
    )
    running = {(name, "running"): model.running for name, model in known.items()}
    waiting = {(name, "waiting"): model.waiting for name, model in known.items()}
    yield gauge(
        "kakeya_model_decodes{model,state}",
        "Generations of a model at this moment",
        running | waiting,
    )


def gossip_figures(gossip: GossipStats) -> Iterator[Figure]:
    """The rounds of this node."""
    yield counter("kakeya_gossip_rounds", "Gossip rounds", gossip.rounds, "rounds")
    yield counter(
        "kakeya_gossip_exchanges", "Exchanges that peers answered", gossip.exchanges, "exchanges"
    )
    yield counter("kakeya_gossip_failures", "Exchanges that failed", gossip.failures, "failures")
    yield gauge("kakeya_gossip_round_seconds", "Time of the last round", gossip.last_round_s)
    yield counter("kakeya_gossip_sent_bytes", "Bytes of cards sent in rounds", gossip.sent_bytes)
    yield counter(
        "kakeya_gossip_cards_dropped{fault}",
        "Cards dropped in rounds, by fault",
        from_zero(gossip.dropped, CardFault),
        {fault: f"dropped.{fault}" for fault in gossip.dropped},
    )


def fleet_figures(
    known: int, suspects: int, gossip: GossipStats, served: GossipServiceStats
) -> Iterator[Figure]:
    """The view of the fleet, and the exchanges that peers began with this node."""
    yield gauge("kakeya_fleet_nodes", "Nodes with a live card", known)
    yield gauge("kakeya_fleet_suspects", "Nodes that do not answer", suspects)
    yield counter("kakeya_gossip_served", "Exchanges that this node answered", served.exchanges)
    yield counter("kakeya_gossip_refused", "Exchanges that this node refused", served.refused)
    yield counter(
        "kakeya_gossip_ttls_clamped",
        "Cards kept with a TTL moved into the bounds",
        gossip.clamped + served.cards_clamped,
    )


def peer_figures(
    news: Mapping[str, int], round_trips_s: Mapping[str, float], skews_s: Mapping[str, float]
) -> Iterator[Figure]:
    """What happened to peers, and their links and clocks by label."""
    told = from_zero(news, NEWS.values())
    yield counter("kakeya_fleet_news{news}", "Changes of peers, by what happened", told)
    words = "Least round trip to a peer of the last minutes, over the link in use"
    yield gauge("kakeya_link_round_trip_seconds{peer}", words, round_trips_s)
    words = "How far the clock of a peer is ahead of this machine's"
    yield gauge("kakeya_clock_skew_seconds{peer}", words, skews_s)


def route_figures(downgrades: int, mdns: DiscoveryStats | None) -> Iterator[Figure]:
    """Better links that were lost, and the nodes that mDNS shows."""
    yield counter("kakeya_route_downgrades", "Better links to peers that were lost", downgrades)
    if mdns is not None:
        running = float(mdns.is_running)
        yield gauge("kakeya_mdns_running", "1 while multicast works", running)
        yield gauge("kakeya_mdns_sightings", "Nodes of this fleet seen", mdns.sightings)
        yield counter("kakeya_mdns_ignored", "Sightings that were refused", mdns.ignored)
        refusals = {str(number): count for number, count in mdns.refusals.items()}
        yield counter(
            "kakeya_mdns_refusals{errno}",
            "Multicast packets that the system refused",
            from_zero(refusals, _MDNS_ERRNOS),
        )


def invite_figures(stats: InviteStats) -> Iterator[Figure]:
    """Invites by outcome, and tries to join without one."""
    yield counter("kakeya_invites{outcome}", "Invites and tries to join", asdict(stats))


def state_figures(failures: int) -> Iterator[Figure]:
    """Failed writes of the state file."""
    yield counter("kakeya_state_failures", "Writes of the state file that failed", failures)


def node_figures(uptime_s: float, warnings: int) -> Iterator[Figure]:
    """The node as a whole."""
    yield gauge("kakeya_info{version}", "1, with the version", {kakeya.__version__: 1.0})
    yield gauge("kakeya_uptime_seconds", "Time since the start of the node", uptime_s)
    yield gauge("kakeya_warnings", "Warnings about the node that kakeya status tells", warnings)


def task_figures(tasks: Sequence[TaskHealth]) -> Iterator[Figure]:
    """Background tasks: a failure here is a fault of this program."""
    running = {task.name: float(task.running) for task in tasks}
    yield gauge("kakeya_task_running{task}", "1 while a background task runs", running)
    failures = {task.name: task.failures for task in tasks}
    yield counter(
        "kakeya_task_failures{task}", "Restarts of a background task after a fault", failures
    )


def loop_figures(stalls: int, worst_lag_s: float) -> Iterator[Figure]:
    """The event loop: the times that it was stuck, and the longest wait for it."""
    yield counter("kakeya_loop_stalls", "Times that the event loop was stuck", stalls)
    yield gauge("kakeya_loop_worst_lag_seconds", "Longest wait for the event loop", worst_lag_s)
