"""The tables of backends that are no engines: [clouds.NAME], [commands.NAME], those of packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from kakeya.backends.registry import Backends, LostSettings, backend_kinds, settings_of_kind
from kakeya.backends.relay.backend import BackendSettings
from kakeya.config.reader import Sources, read_tables
from kakeya.core.errors import ConfigError, LoadFailed

_NAME = re.compile(r"[\w.-]+\Z", re.ASCII)


def read_backends(sources: Sources, models: Collection[str]) -> Backends:
    """Read the tables of all kinds. Raises ConfigError for a wrong one, and for a name that one
    of the node's `models`, or two backends, have."""
    kinds = [kind for kind in backend_kinds() if kind in sources.file]
    found = {kind: _tables(kind, sources) for kind in kinds}
    taken = set(models)
    for kind, name, settings in each(found):
        where = f"{sources.file_name}: [{kind}.{name}]"
        if not _NAME.match(name):
            raise ConfigError(f"{where}: the name of a backend has letters, digits, and . _ -")
        if problem := settings.problem():
            raise ConfigError(f"{where}: {problem}")
        for model_id in settings.model_ids(name):
            if model_id in taken:
                raise ConfigError(f"{where}: another model is called {model_id}; give it another")
            taken.add(model_id)
    return found


def each(backends: Backends) -> Iterable[tuple[str, str, BackendSettings]]:
    """All tables, with their kind and name."""
    return (
        (kind, name, settings)
        for kind, tables in backends.items()
        for name, settings in tables.items()
    )


def listed(backends: Backends) -> list[str]:
    """The models that the tables tell of."""
    return [one for _, name, settings in each(backends) for one in settings.model_ids(name)]


def reaches(backends: Backends) -> Callable[[str], bool]:
    """Tells whether a model is one of a backend."""
    return lambda model_id: any(
        settings.serves(name, model_id) for _, name, settings in each(backends)
    )


def differing(one: Backends, other: Backends) -> list[str]:
    """The tables that are not the same in both, as KIND.NAME."""
    both = ({(kind, name): table for kind, name, table in each(some)} for some in (one, other))
    before, after = both
    keys = dict.fromkeys((*before, *after))
    return [".".join(key) for key in keys if before.get(key) != after.get(key)]


def _tables(kind: str, sources: Sources) -> dict[str, BackendSettings]:
    try:
        settings = settings_of_kind(kind)
    except LoadFailed as lost:
        tables = sources.file[kind]
        names = tables if isinstance(tables, dict) else ()
        return {name: LostSettings(lost.message) for name in names}
    return dict(read_tables(settings, kind, sources))
