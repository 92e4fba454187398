"""What of a node's settings is live: its tasks, the profiles of its clients, the manifests of its
models, and whether a cloud may stand in for these.

All change without a restart: the guard by its owner, the others by reading the file again. What the
owner says of the guard is kept in the data directory, and wins over the settings from then on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.core.errors import ConfigError, InvalidArgument, StoreFailed
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.dispatch.profiles import NO_PROFILE, ClientProfile, ProfileSpec
from kakeya.dispatch.tasks import TaskCandidate, TaskChoice, TaskSpec, choose, observe
from kakeya.generation.manifest import Manifest

_log = logging.getLogger(__name__)
_GUARD = "allowCloudFallback"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """What a reading of the file gives to a node that runs. `needs_restart` are the keys that
    differ from those of its start and count from its next one on."""

    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)
    profiles: Mapping[str, ProfileSpec] = field(default_factory=dict)
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    needs_restart: tuple[str, ...] = ()


class TaskRegistry:
    """The one place in which a task becomes a model."""

    def __init__(
        self,
        tasks: Mapping[str, TaskSpec] | None = None,
        *,
        profiles: Mapping[str, ProfileSpec] | None = None,
        manifests: Mapping[str, Manifest] | None = None,
        reread: Callable[[], LiveSettings] = LiveSettings,
        apply: Callable[[Mapping[str, Manifest]], None] = lambda _: None,
        allows_cloud: bool = True,
        file: Path | None = None,
    ) -> None:
        """`reread` reads the file again, in a thread, and `apply` gives models their manifests;
        both raise ConfigError. `file` keeps what the owner says of the guard; None = nothing is
        kept."""
        self.live = LiveSettings(
            tasks=tasks or {}, profiles=profiles or {}, manifests=manifests or {}
        )
        self._reread = reread
        self._apply = apply
        self._file = file
        self._writing = asyncio.Lock()
        self.allows_cloud = allows_cloud
        """Whether a cloud may stand in where it is not the first of a ladder."""

    async def restore(self) -> None:
        """Take the guard as it was kept, if it was."""
        if self._file is not None:
            kept = await asyncio.to_thread(_kept, self._file)
            self.allows_cloud = self.allows_cloud if kept is None else kept

    def choose(self, name: str, find: Callable[[str], TaskCandidate | None]) -> TaskChoice | None:
        """Choose the model of a task, each of which `find` finds; None = there is no such task."""
        spec = self.tasks.get(name)
        if spec is None:
            return None
        candidates = [
            observe(one, at, find(one)) for at, step in enumerate(spec.candidates) for one in step
        ]
        return choose(name, spec, candidates, allows_cloud=self.allows_cloud)

    @property
    def tasks(self) -> Mapping[str, TaskSpec]:
        """The tasks by name."""
        return self.live.tasks

    def profile_of(self, client: str, agent: str) -> ClientProfile:
        """The profile of a client, by its name and its User-Agent."""
        fitting = (
            ClientProfile(name, spec)
            for name, spec in self.live.profiles.items()
            if spec.fits(client, agent)
        )
        return next(fitting, NO_PROFILE)

    async def reload(self) -> None:
        """Read the file again. Raises InvalidArgument where it has a fault, or there is none; all
        stays as it is then."""
        async with self._writing:
            try:
                live = await asyncio.to_thread(self._reread)
                self._apply(live.manifests)
            except ConfigError as wrong:
                raise InvalidArgument(f"{wrong.message}; nothing was changed") from wrong
            self.live = live
        event(
            _log,
            "the settings were read again",
            tasks=", ".join(live.tasks) or "none",
            profiles=", ".join(live.profiles) or "none",
            needs_restart=", ".join(live.needs_restart) or "none",
        )

    async def allow_cloud(self, allowed: bool) -> None:
        """Set the guard; returns once that is on disk. Raises StoreFailed if it cannot be kept."""
        async with self._writing:
            if self._file is not None:
                data = json.dumps({_GUARD: allowed}).encode()
                try:
                    await asyncio.to_thread(write_atomically, self._file, data)
                except OSError as problem:
                    raise StoreFailed(
                        f"{self._file}: {problem.strerror or problem}; the guard stays as it was"
                    ) from problem
            self.allows_cloud = allowed
        event(_log, "cloud models as fallbacks", allowed=allowed)

    def describe(self) -> dict[str, object]:
        """All of it as JSON."""
        live = self.live
        return {
            _GUARD: self.allows_cloud,
            "tasks": {name: spec.describe() for name, spec in live.tasks.items()},
            "profiles": {name: spec.describe() for name, spec in live.profiles.items()},
            "models": {name: said.describe() for name, said in live.manifests.items()},
            "needs_restart": list(live.needs_restart),
        }


def _kept(file: Path) -> bool | None:
    try:
        said = json.loads(file.read_bytes())[_GUARD]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as problem:
        event(
            _log, "the kept guard cannot be read", level=logging.WARNING, file=file, fault=problem
        )
        return None
    return said if isinstance(said, bool) else None
