"""The configuration of a node: flags, environment and one TOML file become frozen dataclasses.

Each part declares its settings in a class of its own and gets that class, never the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from kakeya.adapters.config import AdapterConfig
from kakeya.backends.registry import Backends, backend_kinds
from kakeya.config.backends import differing, listed, reaches, read_backends
from kakeya.config.reader import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    Sources,
    parse_flags,
    read_file,
    read_part,
    read_tables,
    settings_of,
)
from kakeya.core.errors import ConfigError
from kakeya.core.folders import default_folder
from kakeya.core.log import LogFormat, LogLevel
from kakeya.core.settings import (
    METADATA,
    Illegal,
    folder,
    label,
    nearest,
    one_of,
    setting,
    switch,
    text,
)
from kakeya.core.units import KIB, MIB
from kakeya.dispatch.profiles import ProfileSpec, check_profiles
from kakeya.dispatch.registry import LiveSettings
from kakeya.dispatch.tasks import TaskSpec, check_tasks
from kakeya.fleet.cards.cards import MAX_ID_BYTES, is_valid_node_id
from kakeya.fleet.config import FleetConfig
from kakeya.gateway.config import HttpConfig
from kakeya.generation.config import ModelsConfig, ModelTable
from kakeya.generation.manifest import LIVE, NO_MANIFEST, Manifest
from kakeya.generation.spec import ModelRole, ModelSpec, where_pulled
from kakeya.memory.config import MemoryConfig
from kakeya.prefix.config import KEEP_ALIVE_LEAST_S, SWEEP_LEAST_S, PrecacheConfig
from kakeya.sessions.config import SessionConfig
from kakeya.text.template import check_template
from kakeya.weights.config import WeightsConfig
from kakeya.wire.server.config import ListenConfig

_OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "KAKEYA_PYTHON", "KAKEYA_LEASE_ID", "KAKEYA_API_KEY", "KAKEYA_SERVICE"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """All settings of a node, in the order of `--help`; its own ones are `[node]` in the file."""

    listen: ListenConfig = field(default_factory=ListenConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    node_id: str = setting(
        "the id of this node in the fleet (drawn once and kept)",
        text,
        "",  # the one in the data directory
        argument="ID",
        key="node.id",
        flag="--node-id",
    )
    label: str = setting(
        "the readable name of this node (the host's name)",
        label,
        "",  # the host's name
        argument="NAME",
    )
    fleet: FleetConfig = field(default_factory=FleetConfig)
    chosen: ModelsConfig = field(default_factory=ModelsConfig)
    data_dir: Path = setting(
        "where this node keeps its files; one folder per node",
        folder,
        Path(),  # `load` puts the folder of this user and system in its place
        argument="DIR",
        earlier=("KAKEYA_HOME",),
    )
    log_format: LogFormat = setting(
        "format of the log (text)",
        one_of("text", "json"),
        "text",
        argument="text|json",
    )
    log_level: LogLevel = setting(
        "the least level that the log has (info); debug has each round of gossip",
        one_of("debug", "info", "warning", "error"),
        "info",
        argument="LEVEL",
    )
    log_file: Path | None = setting(
        "write the log to this file, renamed at 8 MiB, instead of stderr",
        folder,
        None,
        argument="FILE",
    )
    allow_cloud_fallback: bool = setting(
        "models of clouds may stand in where they are not the first of a task (true); what PUT "
        "/api/v1/config says wins",
        switch,
        True,
        earlier=("MODEL_BOSS_ALLOW_CLOUD_FALLBACK",),
    )
    sessions: SessionConfig = field(default_factory=SessionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    precache: PrecacheConfig = field(default_factory=PrecacheConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    models: tuple[ModelSpec, ...] = ()
    config_file: Path | None = None
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)
    profiles: Mapping[str, ProfileSpec] = field(default_factory=dict)
    backends: Backends = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    sources: Sources | None = field(default=None, repr=False)
    """What it was read from; None = it was not read."""


SETTINGS = {one.key: one for one in settings_of(NodeConfig, "node")}
"""All settings by their key in the file."""


def load(argv: Sequence[str], environ: Mapping[str, str]) -> NodeConfig:
    """Read flags, environment and file. Raises ConfigError; `--help` exits."""
    flags = parse_flags(SETTINGS.values(), argv)
    name = str(flags.get(CONFIG_FLAG) or environ.get(CONFIG_VARIABLE, ""))
    path = Path(name).expanduser().absolute() if name else None
    home = default_folder(environ, platform=sys.platform, home=Path.home())
    sources = Sources(
        flags=flags,
        environ=environ,
        file=read_file(SETTINGS.values(), path, _tables()) if path else {},
        file_name=name,
        usual={"node.data_dir": home},
    )
    return _read(sources, path)


def _read(sources: Sources, path: Path | None) -> NodeConfig:
    config = read_part(NodeConfig, "node", sources)
    _check(config)
    models = _models(config, sources)
    backends = read_backends(sources, [one.model_id for one in models])
    tasks = _tasks(sources, models, backends)
    return replace(
        config,
        precache=replace(
            config.precache,
            keep_alive_s=max(KEEP_ALIVE_LEAST_S, config.precache.keep_alive_s),
            sweep_s=max(SWEEP_LEAST_S, config.precache.sweep_s),
        ),
        models=models,
        config_file=path,
        tasks=tasks,
        profiles=_profiles(sources, models, tasks, backends),
        backends=backends,
        warnings=_warnings(config, sources.environ),
        sources=sources,
    )


def read_again(config: NodeConfig) -> LiveSettings:
    """Read the file of a running node again. Raises ConfigError for a fault anywhere in it."""
    path, before = config.config_file, config.sources
    if path is None or before is None:
        raise ConfigError("the node was started without --config FILE.toml: no file has its tasks")
    sources = replace(before, file=read_file(SETTINGS.values(), path, _tables()))
    tasks = _tasks(sources, config.models, config.backends)
    profiles = _profiles(sources, config.models, tasks, config.backends)
    whole = _read(sources, path)
    said = manifests_of(whole.models)
    stale = [one.key for one in SETTINGS.values() if before.value(one) != sources.value(one)]
    stale += differing(config.backends, whole.backends)
    started = manifests_of(config.models)
    for name in dict.fromkeys((*started, *said)):
        stale += _stale(name, started.get(name, NO_MANIFEST), said.get(name, NO_MANIFEST))
    return LiveSettings(
        tasks=tasks,
        profiles=profiles,
        manifests={
            name: manifest.with_live(said.get(name, manifest)) for name, manifest in started.items()
        },
        needs_restart=tuple(stale),
    )


def manifests_of(models: Iterable[ModelSpec]) -> Mapping[str, Manifest]:
    """The manifests by the names of their models; n-grams have none."""
    return {one.model_id: one.manifest for one in models if not one.is_ngram}


def _stale(name: str, started: Manifest, said: Manifest) -> Iterator[str]:
    """The keys of a model's table that differ and are not live."""
    for one in fields(ModelTable):
        before, after = (getattr(table, one.name, None) for table in (started, said))
        if one.name not in LIVE and (before or None) != (after or None):
            yield one.metadata[METADATA].named(f"models.{name}", one.name).key


def _models(config: NodeConfig, sources: Sources) -> tuple[ModelSpec, ...]:
    pulled = config.weights.models_folder(config.data_dir)
    specs = config.chosen.specs(read_tables(ModelTable, "models", sources))
    models = tuple(where_pulled(one, pulled) for one in specs)
    memory, stated = config.memory, dict(config.memory.stated_bytes)
    for one in models:
        said, where = one.manifest, f"{sources.file_name}: models.{one.model_id}"
        if said.pin is False and one.model_id in memory.pinned:
            raise ConfigError(f"{where}.pin is false, and memory.pinned names it; leave one out")
        size = stated.get(one.model_id, said.size_bytes)
        if said.size_bytes not in (None, size):
            raise ConfigError(f"{where}.size_mb and memory.sizes_mb differ; leave one out")
        most_s = memory.unload_after_s
        if most_s is not None and (said.stay_warm_s or 0) > most_s:
            raise ConfigError(
                f"{where}.stay_warm_s is {said.stay_warm_s:g} s, more than memory.unload_after_s, "
                f"{most_s:g} s; a model cannot leave while it is kept warm"
            )
        if said.template is not None:
            try:
                check_template(said.template.source)
            except Illegal as wrong:
                raise ConfigError(f"{where}.template: {wrong}") from wrong
    return models


def _tables() -> tuple[str, ...]:
    """Sections whose tables have names, as [tasks.NAME]."""
    return ("models", "tasks", "profiles", *backend_kinds())


def _tasks(
    sources: Sources, models: Sequence[ModelSpec], backends: Backends
) -> Mapping[str, TaskSpec]:
    tasks = read_tables(TaskSpec, "tasks", sources)
    served = [one.model_id for one in models if one.role is ModelRole.VERIFIER]
    return check_tasks(
        tasks,
        [*served, *listed(backends)],
        sources.file_name,
        reaches=reaches(backends),
        clouds=backends.get("clouds", ()),
    )


def _profiles(
    sources: Sources,
    models: Sequence[ModelSpec],
    tasks: Mapping[str, TaskSpec],
    backends: Backends,
) -> Mapping[str, ProfileSpec]:
    served = [one.model_id for one in models if one.role is ModelRole.VERIFIER]
    embedders = [one.model_id for one in models if one.role is ModelRole.EMBEDDER]
    profiles = read_tables(ProfileSpec, "profiles", sources)
    reached = filter(reaches(backends), (one.model for one in profiles.values()))
    names = [*served, *tasks, *reached]
    return check_profiles(profiles, names, embedders, sources.file_name)


def _check(config: NodeConfig) -> None:
    if config.node_id and not is_valid_node_id(config.node_id):
        raise ConfigError(
            f"node id {config.node_id[:40]!r} is not legal; "
            f"give 1 to {MAX_ID_BYTES} bytes without slashes and control characters"
        )
    page_bytes, memory_bytes = config.adapters.page_bytes, config.precache.memory_bytes
    if 0 < memory_bytes < page_bytes:
        raise ConfigError(
            f"precache.memory_mb is {memory_bytes // MIB}, less than one page of "
            f"{page_bytes // KIB} KB (pages.page_kb); give {page_bytes // MIB} or more, or 0 to "
            "keep no prefixes"
        )


def _warnings(config: NodeConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    found, fleet = [], config.fleet
    if config.listen.insecure_lan:
        found.append(
            "--insecure-lan: every machine that reaches this node may use it and read its prompts; "
            "kakeya init makes a fleet that needs no such flag"
        )
    if fleet.ttl_s < 3 * fleet.interval_s:
        found.append(
            f"ttl {fleet.ttl_s:g} s is less than 3 exchange intervals of {fleet.interval_s:g} s; "
            "two lost rounds make this node vanish"
        )
    found.extend(
        f"{name} is an earlier spelling of {one.variable}"
        for one in SETTINGS.values()
        for name in one.earlier
        if environ.get(name) and name.startswith("KAKEYA_")
    )
    known = {one.variable for one in SETTINGS.values()} | _OTHER_VARIABLES
    earlier = {name for one in SETTINGS.values() for name in one.earlier}
    found.extend(
        f"environment variable {name} has no effect{nearest(name, known)}"
        for name in sorted(environ)
        if name.startswith("KAKEYA_") and name not in known | earlier
    )
    periods = (
        ("precache.keep_alive_s", config.precache.keep_alive_s, KEEP_ALIVE_LEAST_S),
        ("precache.sweep_s", config.precache.sweep_s, SWEEP_LEAST_S),
    )
    found.extend(
        f"{key} is {given:g} s, less than the least value; {least_s:g} s are used"
        for key, given, least_s in periods
        if given < least_s
    )
    return tuple(found)
