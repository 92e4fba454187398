"""Capabilities that installed distributions offer, by entry points of `kakeya.capabilities`.

Each entry point names a function that returns a `Capability`. A function with an argument gets the
arbiter: to request models by itself, to keep projected images, or to listen to events. A function
that fails is reported and left out; the others are registered.

Modules are imported in a thread, since that may take seconds. The functions are called on the event
loop, so they may start tasks there, and have to return at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability

GROUP = "kakeya.capabilities"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """The outcome of an entry point; no error = registered, as `capability`."""

    name: str
    origin: str
    error: str | None = None
    capability: str = ""


async def load_capabilities(
    arbiter: MemoryArbiter | None, points: Iterable[EntryPoint] | None = None
) -> tuple[PluginReport, ...]:
    """Register all installed capabilities, or those of `points`, in the order of names.

    Without an arbiter none is registered: a model that is not in a ledger must not be loaded.
    """
    if points is None:
        points = await asyncio.to_thread(entry_points, group=GROUP)
    return tuple([await _load(arbiter, one) for one in sorted(points, key=lambda one: one.name)])


async def _load(arbiter: MemoryArbiter | None, point: EntryPoint) -> PluginReport:
    try:
        owner = _required(arbiter)
        make = await asyncio.to_thread(point.load)
        capability = _register(owner, make, point.value)
    except Exception as fault:  # noqa: BLE001 - foreign code
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
    return PluginReport(point.name, point.value, capability=capability)


def _required(arbiter: MemoryArbiter | None) -> MemoryArbiter:
    if arbiter is None:
        raise errors.ConfigError("there is no memory arbiter; the capability stays off")
    return arbiter


def _register(arbiter: MemoryArbiter, make: Callable[..., object], origin: str) -> str:
    capability = make(arbiter) if _wants_arbiter(make) else make()
    if not isinstance(capability, Capability):
        raise errors.ConfigError(
            f"{origin} returned {type(capability).__name__}; a Capability is needed"
        )
    arbiter.register(capability)
    return capability.name


def _wants_arbiter(make: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False  # built in: it does not tell
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )
