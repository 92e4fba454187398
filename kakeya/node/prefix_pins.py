"""Prefixes that somebody asked to keep in pages whatever comes: pins in the trees, by what they are
of, so that they can be ended when their KV has other names."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.units import pack_ids
from kakeya.node.prefix_pages import Lying, Shelf
from kakeya.precache.blocks import BlockId
from kakeya.precache.tree_answer import Pin

_Name = tuple[str, str, bytes]


class PrefixPins:
    """One pin a prefix: model, adapter and tokens."""

    def __init__(self) -> None:
        self._pins: dict[_Name, Pin[Lying]] = {}

    def pin(
        self,
        model_id: str,
        adapter_id: str,
        token_ids: Sequence[int],
        shelf: Shelf,
        ids: Sequence[BlockId],
    ) -> None:
        """Pin what is here of a prefix, in place of what was pinned of it before."""
        name = _name(model_id, adapter_id, token_ids)
        known = self._pins.pop(name, None)
        pin = shelf.tree.pin(ids)
        if known is not None:
            known.unpin()
        if pin is not None:
            self._pins[name] = pin

    def release(self, model_id: str, adapter_id: str, token_ids: Sequence[int]) -> None:
        """End the pin of a prefix; harmless when there is none."""
        pin = self._pins.pop(_name(model_id, adapter_id, token_ids), None)
        if pin is not None:
            pin.unpin()

    def drop(self, adapter_id: str) -> None:
        """End those of an adapter that takes no more requests."""
        for name in [name for name in self._pins if name[1] == adapter_id]:
            self._pins.pop(name).unpin()

    def clear(self) -> None:
        """End all."""
        for pin in self._pins.values():
            pin.unpin()
        self._pins.clear()


def _name(model_id: str, adapter_id: str, token_ids: Sequence[int]) -> _Name:
    return model_id, adapter_id, pack_ids(token_ids)
