"""Every setting of a node, in one table: its flag, variable, key in the file, meaning, default."""

from __future__ import annotations

from pathlib import Path

from kakeya.config.table_pages import PAGE_SETTINGS
from kakeya.core import settings as s
from kakeya.core.settings import Setting
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S, DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT
from kakeya.generation.spec import ModelSpec, parse_model, parse_proposer
from kakeya.memory.arbiter.policy import RESERVE_BYTES
from kakeya.memory.arbiter.resident import TEXT_TARGET
from kakeya.memory.leases.place import VARIABLE as LEASE_VARIABLE
from kakeya.memory.leases.place import lease_store_url
from kakeya.sessions.store import CAPACITY, IDLE_TTL_S

_NO_NAMES: tuple[str, ...] = ()
_NO_SIZES: tuple[tuple[str, int], ...] = ()
_NO_MODELS: tuple[ModelSpec, ...] = ()


def _model_size(raw: object) -> tuple[str, int]:
    model_id, equals, size_mb = s.text(raw).rpartition("=")
    if not equals or not model_id:
        raise s.Illegal(f"{raw!r} says of no model how large it is; give MODEL=MB")
    return model_id, s.whole(1, 64 * 1024 * 1024, "MB")(size_mb)


def _lease_store(raw: object) -> str:
    try:
        return lease_store_url("" if raw == "" else s.text(raw))
    except ValueError as problem:
        raise s.Illegal(str(problem)) from None


BIND = Setting(
    key="listen.bind",
    flag="--bind",
    variable="KAKEYA_BIND",
    parse=s.bind_address,
    default="",
    metavar="HOST:PORT",
    help="gRPC listens here; port 0 lets the system choose (127.0.0.1:50051; for a member of a "
    "fleet that port on each address of its local networks too, encrypted)",
)
HTTP = Setting(
    key="listen.http",
    flag="--http",
    variable="KAKEYA_HTTP",
    parse=s.bind_address,
    default="127.0.0.1:8210",
    metavar="HOST:PORT",
    help="HTTP listens here; port 0 lets the system choose (127.0.0.1:8210)",
)
ADVERTISE = Setting(
    key="listen.advertise",
    flag="--advertise",
    variable="KAKEYA_ADVERTISE",
    parse=s.peer_address,
    default="",
    metavar="HOST:PORT",
    help="the gRPC address that peers are told (the one that is bound)",
)
INSECURE_LAN = Setting(
    key="listen.insecure_lan",
    flag="--insecure-lan",
    variable="KAKEYA_INSECURE_LAN",
    parse=s.switch,
    default=False,
    help="listen beyond this machine without encryption or authentication; warns at every start",
    switch=True,
)
NODE_ID = Setting(
    key="node.id",
    flag="--node-id",
    variable="KAKEYA_NODE_ID",
    parse=s.text,
    default="",
    metavar="ID",
    help="the name of this node in the fleet (drawn once and kept)",
)
DATA_DIR: Setting[Path | None] = Setting(
    key="node.data_dir",
    flag="--data-dir",
    variable="KAKEYA_HOME",
    parse=s.folder,
    default=None,
    metavar="DIR",
    help="where this node keeps its files; one folder per node",
)
LOG_FORMAT = Setting(
    key="node.log_format",
    flag="--log-format",
    variable="KAKEYA_LOG_FORMAT",
    parse=s.one_of("text", "json"),
    default="text",
    metavar="text|json",
    help="logs go to stderr in this format (text)",
)
LABEL = Setting(
    key="node.label",
    flag="--label",
    variable="KAKEYA_LABEL",
    parse=s.label,
    default="",
    metavar="NAME",
    help="what people call this node (the host's name)",
)
JOIN = Setting(
    key="fleet.join",
    flag="--join",
    variable="KAKEYA_JOIN",
    parse=s.text,
    default="",
    metavar="TOKEN",
    help="become a member of a fleet with what kakeya invite printed; once is enough",
)
NO_MDNS = Setting(
    key="fleet.no_mdns",
    flag="--no-mdns",
    variable="KAKEYA_NO_MDNS",
    parse=s.switch,
    default=False,
    help="neither announce this node on the local network nor look for others there",
    switch=True,
)
NETWORKS = Setting(
    key="fleet.networks",
    variable="KAKEYA_NETWORKS",
    parse=s.several(s.network),
    default=_NO_NAMES,
    repeatable=True,
)
PEERS = Setting(
    key="fleet.peers",
    flag="--peer",
    variable="KAKEYA_PEERS",
    parse=s.several(s.peer_address),
    default=_NO_NAMES,
    metavar="HOST:PORT",
    help="gRPC address of another node; any number of times",
    repeatable=True,
)
TTL = Setting(
    key="fleet.ttl",
    flag="--ttl",
    variable="KAKEYA_TTL",
    parse=s.number(MIN_TTL_S, MAX_TTL_S, "seconds"),
    default=DEFAULT_TTL_S,
    metavar="SECONDS",
    help=f"how long peers believe this node's card without hearing of it again ({DEFAULT_TTL_S:g})",
)
INTERVAL = Setting(
    key="fleet.exchange_interval",
    flag="--exchange-interval",
    variable="KAKEYA_EXCHANGE_INTERVAL",
    parse=s.number(0.05, 600, "seconds"),
    default=DEFAULT_INTERVAL_S,
    metavar="SECONDS",
    help=f"pause between two gossip rounds ({DEFAULT_INTERVAL_S:g})",
)
FANOUT = Setting(
    key="fleet.fanout",
    flag="--fanout",
    variable="KAKEYA_FANOUT",
    parse=s.whole(1, 64, "peers"),
    default=DEFAULT_FANOUT,
    metavar="PEERS",
    help=f"how many peers one gossip round talks to ({DEFAULT_FANOUT})",
)
MODELS = Setting(
    key="models.serve",
    flag="--model",
    variable="KAKEYA_MODELS",
    parse=s.several(parse_model),
    default=_NO_MODELS,
    metavar="ID_OR_PATH[:ROLE]",
    help="serve a model as verifier (the default role) or proposer; any number of times",
    repeatable=True,
)
PROPOSERS = Setting(
    key="models.proposers",
    flag="--proposer",
    variable="KAKEYA_PROPOSERS",
    parse=s.several(parse_proposer),
    default=_NO_MODELS,
    metavar="ngram|ID_OR_PATH",
    help="draft for peers with n-grams or a model; any number of times",
    repeatable=True,
)
SESSION_CAPACITY = Setting(
    key="sessions.capacity",
    variable="KAKEYA_SESSION_CAPACITY",
    parse=s.whole(1, 100_000, "sessions"),
    default=CAPACITY,
)
SESSION_IDLE = Setting(
    key="sessions.idle_ttl",
    variable="KAKEYA_SESSION_IDLE_TTL",
    parse=s.number(1, 7 * 86400, "seconds"),
    default=IDLE_TTL_S,
)
MEMORY_BUDGET = Setting(
    key="memory.budget_mb",
    flag="--memory-budget",
    variable="KAKEYA_MEMORY_BUDGET_MB",
    parse=s.whole(0, 64 * 1024 * 1024, "MB"),
    default=0,
    metavar="MB",
    help="the most that all models of this node may occupy together (0: what the machine has, less "
    "a reserve)",
)
MEMORY_RESERVE = Setting(
    key="memory.reserve_mb",
    variable="KAKEYA_MEMORY_RESERVE_MB",
    parse=s.whole(0, 1024 * 1024, "MB"),
    default=RESERVE_BYTES // MIB,
)
MEMORY_STAY_WARM = Setting(
    key="memory.stay_warm_s",
    variable="KAKEYA_MEMORY_STAY_WARM_S",
    parse=s.number(0, 7 * 86400, "seconds"),
    default=TEXT_TARGET.stay_warm_s,
)
MEMORY_UNLOAD_AFTER = Setting(
    key="memory.unload_after_s",
    variable="KAKEYA_MEMORY_UNLOAD_AFTER_S",
    parse=s.number(0, 7 * 86400, "seconds"),
    default=0.0,
)
MEMORY_PINNED = Setting(
    key="memory.pinned",
    variable="KAKEYA_MEMORY_PINNED",
    parse=s.several(s.text),
    default=_NO_NAMES,
    repeatable=True,
)
MEMORY_SIZES = Setting(
    key="memory.sizes_mb",
    variable="KAKEYA_MEMORY_SIZES_MB",
    parse=s.several(_model_size),
    default=_NO_SIZES,
    repeatable=True,
)
LEASE_STORE = Setting(
    key="leases.store",
    variable=LEASE_VARIABLE,
    parse=_lease_store,
    default="",
)
SETTINGS: tuple[Setting[object], ...] = (
    BIND,
    HTTP,
    ADVERTISE,
    INSECURE_LAN,
    NODE_ID,
    LABEL,
    JOIN,
    NO_MDNS,
    NETWORKS,
    PEERS,
    TTL,
    INTERVAL,
    FANOUT,
    MODELS,
    PROPOSERS,
    DATA_DIR,
    LOG_FORMAT,
    SESSION_CAPACITY,
    SESSION_IDLE,
    MEMORY_BUDGET,
    MEMORY_RESERVE,
    MEMORY_STAY_WARM,
    MEMORY_UNLOAD_AFTER,
    MEMORY_PINNED,
    MEMORY_SIZES,
    LEASE_STORE,
    *PAGE_SETTINGS,
)
