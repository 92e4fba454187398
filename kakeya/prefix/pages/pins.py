"""Prefixes that a client asked to keep in pages: pins in the trees, by names that the callers give.
So a pin can be ended when its KV has other names, and two clients that pin the same text have a pin
each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying
from kakeya.prefix.tree.answer import Pin
from kakeya.prefix.tree.node import Node


class PrefixPins:
    """One pin a name, with the adapter that its KV is of."""

    def __init__(self) -> None:
        self._pins: dict[str, tuple[str, Pin[Lying]]] = {}

    def pin(
        self, name: str, adapter_id: str, shelf: FingerprintBlocks, ids: Sequence[BlockId]
    ) -> None:
        """Pin the blocks of a prefix, in place of the earlier pin of this name."""
        pin = shelf.tree.pin(ids)
        self.release(name)
        if pin is not None:
            self._pins[name] = adapter_id, pin

    def bytes_with(self, name: str, nodes: Iterable[Node[Lying]]) -> int:
        """The bytes of all pins, each block counted once, if this name pins these nodes."""
        pinned = set(nodes)
        for other, (_, pin) in self._pins.items():
            if other != name:
                pinned.update(pin.nodes)
        return sum(node.nbytes for node in pinned if node.in_ram)

    def release(self, name: str) -> None:
        """End a pin; harmless when there is none."""
        known = self._pins.pop(name, None)
        if known is not None:
            known[1].unpin()

    def drop(self, adapter_id: str) -> None:
        """End the pins of an adapter that takes no more requests."""
        for name in [name for name, (of, _) in self._pins.items() if of == adapter_id]:
            self.release(name)

    def clear(self) -> None:
        """End all."""
        for name in tuple(self._pins):
            self.release(name)
