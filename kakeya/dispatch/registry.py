"""The tasks of a node as they are at this moment, and whether a cloud may stand in for its models.

Both change without a restart: tasks by reading the file again, the guard by its owner. What the
owner says of the guard is kept in the data directory, and wins over the settings from then on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from kakeya.core.errors import ConfigError, InvalidArgument, StoreFailed
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.dispatch.tasks import Reread, TaskChoice, TaskSpec, choose, observe
from kakeya.generation.model import LoadableModel

_log = logging.getLogger(__name__)
_GUARD = "allowCloudFallback"


class TaskRegistry:
    """The one place in which a task becomes a model."""

    def __init__(
        self,
        tasks: Mapping[str, TaskSpec] | None = None,
        *,
        reread: Reread = dict,
        allows_cloud: bool = True,
        file: Path | None = None,
    ) -> None:
        """`file` keeps what the owner says of the guard; None = nothing is kept."""
        self.tasks = tasks or {}
        self._reread = reread
        self._file = file
        self._writing = asyncio.Lock()
        self.allows_cloud = allows_cloud
        """Whether a cloud may stand in where it is not the first of a ladder."""

    async def restore(self) -> None:
        """Take the guard as it was kept, if it was."""
        if self._file is not None:
            kept = await asyncio.to_thread(_kept, self._file)
            self.allows_cloud = self.allows_cloud if kept is None else kept

    def choose(self, name: str, models: Iterable[LoadableModel]) -> TaskChoice | None:
        """Choose the model of a task, of those that are served; None = there is no such task."""
        spec = self.tasks.get(name)
        if spec is None:
            return None
        by_id = {model.model_id: model for model in models}
        candidates = [
            observe(one, at, by_id.get(one))
            for at, step in enumerate(spec.candidates)
            for one in step
        ]
        return choose(name, spec, candidates, allows_cloud=self.allows_cloud)

    async def reload(self) -> None:
        """Read the tasks again. Raises InvalidArgument where the file has a fault, or there is
        none; the tasks then stay as they are."""
        try:
            self.tasks = await asyncio.to_thread(self._reread)
        except ConfigError as wrong:
            raise InvalidArgument(f"{wrong.message}; the tasks stay as they were") from wrong
        event(_log, "tasks were read again", tasks=", ".join(self.tasks) or "none")

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
        """The guard and the tasks as JSON."""
        tasks = {name: spec.describe() for name, spec in self.tasks.items()}
        return {_GUARD: self.allows_cloud, "tasks": tasks}


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
