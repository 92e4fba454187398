"""The sizes of a node's models and the times of their loads: estimated at first, then measured, and
kept over restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kakeya.backends.resident import ResidentModel
from kakeya.backends.sizes import LeaseSize, lease_sizes
from kakeya.core.errors import ConfigError, NotFound
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.memory.estimate.history import WORKING_SET, SizeHistory, SizeRecord
from kakeya.memory.estimate.size_file import SizeFile, hub_folder


class ModelSizes:
    """See the module. `by_id` are the leases before the first measurement of a run."""

    def __init__(self, data_dir: Path) -> None:
        self._file = SizeFile(data_dir)
        self.history = SizeHistory()
        self._by_id: dict[str, LeaseSize] = {}
        self.by_id: Mapping[str, LeaseSize] = MappingProxyType(self._by_id)

    async def load(self) -> None:
        """Read what was measured in earlier runs."""
        self.history = await asyncio.to_thread(self._file.load)

    def save(self, records: tuple[SizeRecord, ...]) -> None:
        """Keep what was measured. Blocks; raises OSError."""
        self._file.save(records)

    async def sized(
        self,
        sources: Mapping[str, tuple[str, str]],
        budget: int,
        *,
        stated_bytes: Mapping[str, int],
        fixed_kv_bytes: Mapping[str, int],
    ) -> Mapping[str, LeaseSize]:
        """Size the lease of each model; it is not noted. Raises as `lease_sizes`."""
        return await asyncio.to_thread(
            lease_sizes,
            sources,
            budget,
            history=self.history,
            hub=hub_folder(os.environ, Path.home()),
            stated_bytes=stated_bytes,
            fixed_kv_bytes=fixed_kv_bytes,
            platform=sys.platform,
        )

    def add(self, model_id: str, size: LeaseSize) -> None:
        """Size one more model."""
        self._by_id[model_id] = size

    def remove(self, model_id: str) -> None:
        """Forget the size of a model."""
        self._by_id.pop(model_id, None)

    async def estimate_alone(
        self, alone: Mapping[str, ResidentModel], sources: Mapping[str, str], budget: int
    ) -> None:
        """Size the models of ring groups, by the ids of these, in one process too.

        One that exceeds the budget gets no size. Groups lose their digests: the history knows whole
        models.
        """
        for group, model in alone.items():
            with contextlib.suppress(ConfigError):
                self._by_id |= await asyncio.to_thread(
                    lease_sizes,
                    {model.model_id: (sources[model.model_id], model.capability)},
                    budget,
                    history=self.history,
                    hub=hub_folder(os.environ, Path.home()),
                )
            share = self._by_id[group]
            self._by_id[group] = replace(share, estimate=replace(share.estimate, digest=""))

    def lease_bytes(self, model_id: str) -> int:
        """The lease of a model. Raises NotFound."""
        if model_id not in self.by_id:
            known = ", ".join(self.by_id) or "none"
            raise NotFound(f"no model of this node is called {model_id[:80]!r}; there are {known}")
        return self.by_id[model_id].bytes

    def load_s(self, capability: str, model_id: str) -> float | None:
        """How long the load of a model took; None = it was not measured."""
        size = self.by_id.get(model_id)
        return None if size is None else self.history.load_s(size.estimate.digest, capability)

    def note_load(self, key: ResidentKey, load_s: float) -> None:
        """Note the time of a load."""
        digest = self.by_id[key.model_key].estimate.digest
        self.history.note_load(digest, key.capability, load_s)

    @property
    def working_set_bytes(self) -> int | None:
        """The limit that Metal told the last engine; None = no engine ran on it yet."""
        return self.history.newest_bytes(*WORKING_SET)
