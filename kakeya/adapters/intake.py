"""Examines adapters that are registered: packs them, and compares them with base and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kakeya.adapters.files.base import Layers, base_fingerprint, check_layers, read_layers
from kakeya.adapters.files.packed import Precision, digest, pack, unpack
from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.registry import check_client, check_name
from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The wish to register an adapter in a folder, for a base."""

    name: str
    base: str
    folder: Path
    owner: str = ""
    precision: Precision = Precision.INT8


ReadLayers = Callable[[Path], Awaitable[Layers]]


class AdapterIntake:
    """Examines adapters; `bases` returns the models that may have some, with their folders."""

    def __init__(
        self,
        bases: Callable[[], Mapping[str, str]],
        *,
        most_rank: int,
        most_bytes: int,
        wall: Callable[[], float],
        layers: ReadLayers = read_layers,
    ) -> None:
        self._bases = bases
        self._most_rank = most_rank
        self._most_bytes = most_bytes
        self._wall = wall
        self._read_layers = layers
        self._layers: dict[str, Layers] = {}
        """Of the bases that were asked for, by their fingerprint."""

    async def take(self, wanted: Registration) -> tuple[AdapterRecord, bytes]:
        """Pack an adapter and describe it. Raises InvalidArgument, and NotFound for the base."""
        check_name(wanted.name)
        check_client(wanted.owner)
        folder = await self._base(wanted.base)
        fingerprint = await asyncio.to_thread(base_fingerprint, folder)
        if fingerprint not in self._layers:
            self._layers[fingerprint] = await self._read_layers(folder)
        return await asyncio.to_thread(self._examined, wanted, fingerprint)

    async def fingerprint(self, base: str) -> str:
        """The fingerprint of a base's weights on disk; "" where they cannot be read."""
        try:
            return await asyncio.to_thread(base_fingerprint, await self._base(base))
        except (InvalidArgument, NotFound):
            return ""

    async def _base(self, base: str) -> Path:
        folders = self._bases()
        if base not in folders:
            known = ", ".join(folders) or "none"
            raise NotFound(
                f"this node decodes with no model {base[:80]!r} that takes adapters (ring groups "
                f"take none); there are: {known}"
            )
        folder = Path(folders[base])
        if not await asyncio.to_thread(folder.is_dir):
            raise InvalidArgument(
                f"{base} is not on this disk yet; use it once, then add adapters for it"
            )
        return folder

    def _examined(self, wanted: Registration, fingerprint: str) -> tuple[AdapterRecord, bytes]:
        packed = pack(wanted.folder, wanted.precision, base=fingerprint)
        adapter = unpack(packed)
        check_layers(adapter, self._layers[fingerprint])
        if adapter.rank > self._most_rank:
            raise InvalidArgument(
                f"the adapter has rank {adapter.rank}, and engines are started for at most "
                f"{self._most_rank}; set adapters.rank (KAKEYA_ADAPTERS_RANK) to "
                f"{adapter.rank} and start the node again"
            )
        if len(packed) > self._most_bytes:
            raise InvalidArgument(
                f"the adapter takes {format_bytes(len(packed))}, and pages hold at most "
                f"{format_bytes(self._most_bytes)} in a row; raise adapters.slab_mb "
                "(KAKEYA_ADAPTERS_SLAB_MB) and start the node again"
            )
        record = AdapterRecord(
            name=wanted.name,
            base=wanted.base,
            owner=wanted.owner,
            rank=adapter.rank,
            precision=adapter.precision.value,
            digest=digest(packed),
            packed_bytes=len(packed),
            fingerprint=fingerprint,
            registered_at=round(self._wall(), 3),
        )
        return record, packed
