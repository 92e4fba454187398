"""The right to use an adapter that is in a slot of its engine, or on its way there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from kakeya.adapters.files.store import AdapterRecord
from kakeya.adapters.tiers import Adapter


class AdapterUse:
    """The right to an adapter, which keeps its slot; a `with` that gives it back, once."""

    __slots__ = ("_adapter", "_on_end", "adapter_id", "record")

    def __init__(
        self, on_end: Callable[[Adapter], None], adapter: Adapter, record: AdapterRecord
    ) -> None:
        self.adapter_id = adapter.adapter_id
        self.record = record
        self._adapter: Adapter | None = adapter
        self._on_end = on_end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back; harmless twice."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._on_end(adapter)
