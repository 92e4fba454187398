"""The kinds of backends that answer whole requests: clouds, commands, and those of packages.

A table [KIND.NAME] of the configuration file makes a backend. An installed package adds a kind by
an entry point of the group `kakeya.backends`: the point has the name of the kind, and names a
dataclass of settings that is a `BackendSettings`. Of a package that cannot be loaded, each table
makes a backend that refuses requests with the reason; all else is served.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, is_dataclass
from importlib.metadata import entry_points
from typing import cast

from kakeya.backends.relay.backend import Backend, BackendSettings, Finished
from kakeya.backends.relay.config import CloudSettings, CommandSettings
from kakeya.backends.request import Request
from kakeya.core.errors import LoadFailed
from kakeya.core.figures import Json
from kakeya.core.log import event
from kakeya.text.tools.answer import Part

_log = logging.getLogger(__name__)
GROUP = "kakeya.backends"
_OURS: Mapping[str, type[BackendSettings]] = {"clouds": CloudSettings, "commands": CommandSettings}
_NEEDED = ("problem", "model_ids", "serves", "shared_ids", "describe", "open")
Backends = Mapping[str, Mapping[str, BackendSettings]]
"""The tables of a node, by kind and name."""


def backend_kinds() -> tuple[str, ...]:
    """The names of all kinds, ours first. Loads none of them."""
    added = {point.name for point in entry_points(group=GROUP)} - _OURS.keys()
    return (*_OURS, *sorted(added))


def settings_of_kind(kind: str) -> type[BackendSettings]:
    """The settings class of one of the `backend_kinds`. Raises LoadFailed where its package does
    not give one."""
    if kind in _OURS:
        return _OURS[kind]
    (point, *_) = entry_points(group=GROUP, name=kind)
    try:
        return _checked(point.load())
    except Exception as fault:  # foreign code
        reason = str(fault) or repr(fault)
        event(
            _log,
            "kind of backends left out",
            level=logging.WARNING,
            plugin=kind,
            origin=point.value,
            error=reason,
        )
        raise LoadFailed(f"{point.value} cannot be used: {reason}") from fault


def _checked(found: object) -> type[BackendSettings]:
    lacking = [name for name in _NEEDED if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or not is_dataclass(found) or lacking:
        lacks = f" with {', '.join(lacking)}" if lacking else ""
        raise LoadFailed(f"{found!r} is no settings of a backend; a dataclass{lacks} is needed")
    return cast("type[BackendSettings]", found)


@dataclass(frozen=True, slots=True)
class LostSettings:
    """The table of a package that cannot be loaded: it refuses requests with the reason.

    How the package calls its models is unknown: each name that holds that of the table as a word,
    as KIND:NAME/MODEL does, counts as one of them.
    """

    reason: str

    def problem(self) -> str:
        """As `BackendSettings`."""
        return ""

    def model_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        return (name,)

    def serves(self, name: str, model_id: str) -> bool:
        """As `BackendSettings`."""
        return name in re.split("[:/]", model_id)

    def shared_ids(self, name: str) -> tuple[str, ...]:
        """As `BackendSettings`."""
        return ()

    def describe(self) -> Json:
        """As `BackendSettings`."""
        return {"error": self.reason}

    def open(self, name: str) -> Backend:
        """As `BackendSettings`."""
        return _LostBackend(self.reason)


class _LostBackend:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    def health(self) -> str:
        return self._reason

    def check(self, asked: Request) -> tuple[str, ...]:
        raise LoadFailed(self._reason)

    async def handle(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        raise LoadFailed(self._reason)
        yield  # a generator by its form
