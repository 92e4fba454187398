"""The configuration of a node: flags, environment and one TOML file become frozen dataclasses.

Each subsystem gets its own section, never the whole. `table.py` says what can be set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kakeya.adapters.config import AdapterConfig
from kakeya.adapters.tiers import TierRules
from kakeya.config.sources import CONFIG_FLAG, CONFIG_VARIABLE, parse_flags, read_file
from kakeya.config.table import (
    ADVERTISE,
    BIND,
    DATA_DIR,
    FANOUT,
    HTTP,
    INSECURE_LAN,
    INTERVAL,
    JOIN,
    LABEL,
    LEASE_STORE,
    LOG_FORMAT,
    MEMORY_BUDGET,
    MEMORY_PINNED,
    MEMORY_RESERVE,
    MEMORY_SIZES,
    MEMORY_STAY_WARM,
    MEMORY_UNLOAD_AFTER,
    MODELS,
    NETWORKS,
    NO_MDNS,
    NODE_ID,
    PEERS,
    PROPOSERS,
    SESSION_CAPACITY,
    SESSION_IDLE,
    SETTINGS,
    TTL,
)
from kakeya.config.table_pages import (
    ADAPTER_HOT_USES,
    ADAPTER_RANK,
    ADAPTER_SLAB,
    ADAPTER_SLOTS,
    ADAPTER_WARM,
    ADAPTER_WARM_PLACES,
    ADAPTER_WINDOW,
    PAGE_FIT,
    PAGE_HEADROOM,
    PAGE_SIZE,
    PRECACHE_DISK,
    PRECACHE_KEEP_ALIVE,
    PRECACHE_KEY_FILE,
    PRECACHE_MEMORY,
    PRECACHE_PARALLEL,
    PRECACHE_PEERS,
    PRECACHE_PROMPTS,
    PRECACHE_SWEEP,
    PRECACHE_TENANT,
)
from kakeya.core.errors import ConfigError
from kakeya.core.folders import default_folder
from kakeya.core.settings import Sources, is_loopback, nearest
from kakeya.core.units import KIB, MIB
from kakeya.fleet.cards.cards import MAX_ID_BYTES, is_valid_node_id
from kakeya.generation.spec import ModelSpec, parse_model, parse_proposer
from kakeya.memory.config import MemoryConfig
from kakeya.memory.pages.content import Fit
from kakeya.prefix.config import PrecacheConfig
from kakeya.sessions.config import SessionConfig

KEEP_ALIVE_LEAST_S, SWEEP_LEAST_S = 30.0, 60.0
"""Shorter periods would only cost: a value below is raised to these."""
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "KAKEYA_PYTHON", "KAKEYA_LEASE_ID"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where the node answers.

    `bind` "" = loopback, and the local networks once the node has an identity; `advertise` "" =
    what gRPC is bound to.
    """

    bind: str
    http: str
    advertise: str
    insecure_lan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How the node finds others and gossips; seconds.

    A card survives `ttl_s / interval_s` silent rounds. `join` "" = no token was given; `networks`
    are CIDR ranges beside the private ones whose addresses gossip may dial.
    """

    peers: tuple[str, ...]
    join: str
    mdns: bool
    networks: tuple[str, ...]
    ttl_s: float
    interval_s: float
    fanout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Everything that can be set.

    `node_id` "" = the one kept in the data directory, `label` "" = the host's name.
    """

    node_id: str
    label: str
    data_dir: Path
    log_format: Literal["text", "json"]
    listen: ListenConfig
    fleet: FleetConfig
    sessions: SessionConfig
    memory: MemoryConfig
    adapters: AdapterConfig
    precache: PrecacheConfig
    models: tuple[ModelSpec, ...]
    warnings: tuple[str, ...] = ()


def load(argv: Sequence[str], environ: Mapping[str, str]) -> NodeConfig:
    """Read flags, environment and file. Raises ConfigError; `--help` exits."""
    flags = parse_flags(argv)
    file_name = flags.get(CONFIG_FLAG) or environ.get(CONFIG_VARIABLE, "")
    file = read_file(Path(str(file_name)).expanduser()) if file_name else {}
    sources = Sources(flags=flags, environ=environ, file=file, file_name=str(file_name))
    return _build(sources)


def _build(sources: Sources) -> NodeConfig:
    listen = ListenConfig(
        bind=sources.value(BIND),
        http=sources.value(HTTP),
        advertise=sources.value(ADVERTISE),
        insecure_lan=sources.value(INSECURE_LAN),
    )
    _refuse_open_http(listen)
    fleet = FleetConfig(
        peers=sources.value(PEERS),
        join=sources.value(JOIN),
        mdns=not sources.value(NO_MDNS),
        networks=sources.value(NETWORKS),
        ttl_s=sources.value(TTL),
        interval_s=sources.value(INTERVAL),
        fanout=sources.value(FANOUT),
    )
    node_id = sources.value(NODE_ID)
    if node_id and not is_valid_node_id(node_id):
        raise ConfigError(
            f"node id {node_id[:40]!r} is not legal; "
            f"give 1 to {MAX_ID_BYTES} bytes without slashes and control characters"
        )
    return NodeConfig(
        node_id=node_id,
        label=sources.value(LABEL),
        data_dir=sources.value(DATA_DIR)
        or default_folder(sources.environ, platform=sys.platform, home=Path.home()),
        log_format=cast('Literal["text", "json"]', sources.value(LOG_FORMAT)),
        listen=listen,
        fleet=fleet,
        sessions=SessionConfig(
            capacity=sources.value(SESSION_CAPACITY), idle_ttl_s=sources.value(SESSION_IDLE)
        ),
        memory=_memory(sources),
        adapters=AdapterConfig(
            slots=sources.value(ADAPTER_SLOTS),
            rank=sources.value(ADAPTER_RANK),
            warm_bytes=sources.value(ADAPTER_WARM) * MIB,
            slab_bytes=sources.value(ADAPTER_SLAB) * MIB,
            page_bytes=sources.value(PAGE_SIZE) * KIB,
            fit=Fit(sources.value(PAGE_FIT)),
            headroom=sources.value(PAGE_HEADROOM),
            rules=TierRules(
                window_s=sources.value(ADAPTER_WINDOW),
                hot_uses=sources.value(ADAPTER_HOT_USES),
                warm_places=sources.value(ADAPTER_WARM_PLACES),
            ),
        ),
        precache=PrecacheConfig(
            memory_bytes=_kv_bytes(sources),
            disk_bytes=sources.value(PRECACHE_DISK) * MIB,
            parallel=sources.value(PRECACHE_PARALLEL),
            keep_alive_s=max(KEEP_ALIVE_LEAST_S, sources.value(PRECACHE_KEEP_ALIVE)),
            sweep_s=max(SWEEP_LEAST_S, sources.value(PRECACHE_SWEEP)),
            peers=sources.value(PRECACHE_PEERS),
            key_file=sources.value(PRECACHE_KEY_FILE),
            tenant=sources.value(PRECACHE_TENANT),
            prompts=sources.value(PRECACHE_PROMPTS),
        ),
        models=_models(sources),
        warnings=_warnings(listen, fleet, sources.environ) + _raised(sources),
    )


def _kv_bytes(sources: Sources) -> int:
    memory_mb, page_kb = sources.value(PRECACHE_MEMORY), sources.value(PAGE_SIZE)
    if 0 < memory_mb * MIB < page_kb * KIB:
        raise ConfigError(
            f"{PRECACHE_MEMORY.key} is {memory_mb}, less than one page of {page_kb} KB "
            f"({PAGE_SIZE.key}); give {page_kb // 1024} or more, or 0 to keep no prefixes"
        )
    return memory_mb * MIB


def _memory(sources: Sources) -> MemoryConfig:
    budget_mb = sources.value(MEMORY_BUDGET)
    stay_warm_s = sources.value(MEMORY_STAY_WARM)
    unload_after_s = sources.value(MEMORY_UNLOAD_AFTER) or None
    if unload_after_s is not None and unload_after_s < stay_warm_s:
        raise ConfigError(
            f"{MEMORY_UNLOAD_AFTER.key} is {unload_after_s:g} s, less than "
            f"{MEMORY_STAY_WARM.key}, {stay_warm_s:g} s; a model cannot leave while it is kept warm"
        )
    return MemoryConfig(
        budget_bytes=budget_mb * MIB if budget_mb else None,
        reserve_bytes=sources.value(MEMORY_RESERVE) * MIB,
        stay_warm_s=stay_warm_s,
        unload_after_s=unload_after_s,
        lease_store=sources.value(LEASE_STORE),
        pinned=sources.value(MEMORY_PINNED),
        stated_bytes=tuple((one, mb * MIB) for one, mb in sources.value(MEMORY_SIZES)),
    )


def _models(sources: Sources) -> tuple[ModelSpec, ...]:
    chosen = sources.value(MODELS) + sources.value(PROPOSERS)
    seen: dict[str, ModelSpec] = {}
    for spec in chosen or (parse_model("kakeya-tiny"), parse_proposer("ngram")):
        other = seen.setdefault(spec.model_id, spec)
        if other is not spec:
            raise ConfigError(
                f"model {spec.model_id} is named twice, as {other.source} ({other.role}) and "
                f"{spec.source} ({spec.role}); one node serves a model id once"
            )
    return tuple(seen.values())


def _refuse_open_http(listen: ListenConfig) -> None:
    # gRPC may listen on a network once the node has an identity, which only the start finds out.
    if not listen.insecure_lan and not is_loopback(listen.http):
        raise ConfigError(
            f"{HTTP.flag} {listen.http} is reachable from other machines without encryption or "
            f"authentication; add {INSECURE_LAN.flag} on a trusted network, or bind 127.0.0.1"
        )


def _raised(sources: Sources) -> tuple[str, ...]:
    """Name the periods that are shorter than is of use: each is the least one then."""
    least = ((PRECACHE_KEEP_ALIVE, KEEP_ALIVE_LEAST_S), (PRECACHE_SWEEP, SWEEP_LEAST_S))
    return tuple(
        f"{setting.key} is {given:g} s, less than the least; {least_s:g} s are used"
        for setting, least_s in least
        if (given := sources.value(setting)) < least_s
    )


def _warnings(
    listen: ListenConfig, fleet: FleetConfig, environ: Mapping[str, str]
) -> tuple[str, ...]:
    found = []
    if listen.insecure_lan:
        found.append(
            f"{INSECURE_LAN.flag}: whoever reaches this node may use it and read along; "
            "kakeya init makes a fleet that needs no such flag"
        )
    if fleet.ttl_s < 3 * fleet.interval_s:
        found.append(
            f"ttl {fleet.ttl_s:g} s is less than 3 exchange intervals of {fleet.interval_s:g} s; "
            "two lost rounds make this node vanish"
        )
    known = {setting.variable for setting in SETTINGS} | _OTHER_VARIABLES
    found.extend(
        f"environment variable {name} has no effect{nearest(name, known)}"
        for name in sorted(environ)
        if name.startswith("KAKEYA_") and name not in known
    )
    return tuple(found)
