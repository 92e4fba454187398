"""Capabilities that installed distributions offer, by entry points of `kakeya.capabilities`.

Each names a function that returns a `Capability`. One with an argument gets the arbiter, for who
asks for models by itself, keeps projected images, or listens to events. A function that fails is
reported and left out; the others are registered.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.memory.capability import Capability
from kakeya.memory.memory_arbiter import MemoryArbiter

GROUP = "kakeya.capabilities"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What became of an entry point; no error = registered."""

    name: str
    origin: str
    error: str | None = None


def load_capabilities(
    arbiter: MemoryArbiter | None, points: Iterable[EntryPoint] | None = None
) -> tuple[PluginReport, ...]:
    """Register all capabilities that are installed, or those of `points`.

    Without an arbiter none is: a model that nobody counts must not be loaded. Imports foreign code,
    so it belongs to the start of a node, before its event loop has work.
    """
    found = entry_points(group=GROUP) if points is None else points
    return tuple(_load(arbiter, point) for point in sorted(found, key=lambda one: one.name))


def _load(arbiter: MemoryArbiter | None, point: EntryPoint) -> PluginReport:
    try:
        _register(arbiter, point)
    except Exception as fault:  # noqa: BLE001 - somebody else's code
        reason = str(fault) or repr(fault)
        event(
            _log,
            "capability not registered",
            level=logging.WARNING,
            plugin=point.name,
            origin=point.value,
            error=reason,
        )
        return PluginReport(point.name, point.value, reason)
    return PluginReport(point.name, point.value)


def _register(arbiter: MemoryArbiter | None, point: EntryPoint) -> None:
    if arbiter is None:
        raise errors.ConfigError("there is no memory arbiter; the capability stays off")
    make = point.load()
    capability = make(arbiter) if _wants_arbiter(make) else make()
    if not isinstance(capability, Capability):
        raise errors.ConfigError(
            f"{point.value} returned {type(capability).__name__}; a Capability is needed"
        )
    arbiter.register(capability)


def _wants_arbiter(make: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False  # built in: it does not tell
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )
