"""Settings of the fleet: joining, discovery, gossip."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.core.settings import (
    Several,
    network,
    number,
    peer_address,
    setting,
    switch,
    text,
    whole,
)
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S, DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Joining, discovery and gossip. A card survives `ttl_s / interval_s` silent rounds."""

    join: str = setting(
        "join a fleet with the token that kakeya invite printed; needed once",
        text,
        "",  # no token
        argument="TOKEN",
    )
    no_mdns: bool = setting(
        "neither announce this node on the local network nor search for others there",
        switch,
        False,
        argument="",
    )
    join_port: int = setting(
        "the port at which machines join while an invite lives; 0: any free one (0)",
        whole(0, 65535, "as a port"),
        0,
        argument="PORT",
    )
    networks: tuple[str, ...] = setting(
        "CIDR ranges, beside the private ones, whose addresses gossip may dial",
        Several(network),
        (),
        earlier=("KAKEYA_NETWORKS",),
    )
    peers: tuple[str, ...] = setting(
        "gRPC address of another node; any number of times",
        Several(peer_address),
        (),
        argument="HOST:PORT",
    )
    ttl_s: float = setting(
        f"how long peers keep this node's card without news of it ({DEFAULT_TTL_S:g})",
        number(MIN_TTL_S, MAX_TTL_S, "seconds"),
        DEFAULT_TTL_S,
        argument="SECONDS",
        key="fleet.ttl",
    )
    interval_s: float = setting(
        f"pause between two gossip rounds ({DEFAULT_INTERVAL_S:g})",
        number(0.05, 600, "seconds"),
        DEFAULT_INTERVAL_S,
        argument="SECONDS",
        key="fleet.exchange_interval",
    )
    fanout: int = setting(
        f"how many peers one gossip round talks to ({DEFAULT_FANOUT})",
        whole(1, 64, "peers"),
        DEFAULT_FANOUT,
        argument="PEERS",
    )
