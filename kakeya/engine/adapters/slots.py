"""Slots of the engine: the adapter in each, and how many sequences compute with it.

A slot that a running sequence uses is never written. An adapter that is loaded again with another
content gets another slot: sequences that began with the old one end with it, new ones use the new
one, and the old slot is free when its last sequence has ended. Belongs to the model thread.

There is a slot for the first adapter, and twice as many when the next one finds none free; one
more where there is no room for that. The first slots may take room of KV, later ones may not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kakeya.adapters.files.packed import PackedAdapter
from kakeya.core.errors import (
    Conflict,
    InvalidArgument,
    KakeyaError,
    MemoryRefused,
    NotFound,
    PageFreed,
)
from kakeya.core.units import format_bytes
from kakeya.engine.adapters.pages import ReadAdapter
from kakeya.engine.model import AdapterBank
from kakeya.engine.queue.room import RETRY_S

_FIRST_SLOTS = 8
"""Slots that may take room of KV."""


@dataclass(slots=True, eq=False)
class SlottedAdapter:
    """An adapter in a slot; `content` is equal only for equal adapters, `users` run with it."""

    adapter_id: str
    slot: int
    content: str
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """The slot of an adapter, and the bytes of all slots there are."""

    slot: int
    nbytes: int


class EngineAdapters:
    """Fills slots, and lends adapters to sequences."""

    def __init__(
        self,
        bank: AdapterBank,
        room_bytes: Callable[[bool], int | None] = lambda keeps_kv: None,
        grown: Callable[[], None] = lambda: None,
    ) -> None:
        """`room_bytes` returns the bytes that new slots may take, within the room of KV or beside
        it; None = without a bound. `grown` is called when new slots were allocated."""
        self._bank = bank
        self._room_bytes = room_bytes
        self._grown = grown
        self._loaded: dict[str, SlottedAdapter] = {}
        self._free = list(range(bank.slots, 0, -1))

    def load(self, adapter_id: str, read: ReadAdapter, instead_of: str = "") -> LoadedAdapter:
        """Take an adapter into a slot; a no-op for one that is there.

        `instead_of` is idle and leaves its slot. Raises MemoryRefused without a free slot or room
        for it, InvalidArgument when it does not fit the model, Conflict when `instead_of` is in
        use; nothing is changed then. PageFreed when `read` was closed, or its pages went meanwhile.
        """
        if not adapter_id:
            raise InvalidArgument("an adapter needs a name", param="adapter_id")
        adapter = read.adapter
        if adapter is None:
            raise PageFreed(f"adapter {adapter_id!r} was to be loaded when its pages were let go")
        try:
            return self._load(adapter_id, adapter, read, instead_of)
        except KakeyaError as refusal:
            # An error keeps the frames of its traceback, and with them views of the pages.
            raise refusal.with_traceback(None) from None

    def unload(self, adapter_id: str) -> bool:
        """Free a slot; False where it held none. Raises Conflict for one in use."""
        self._check_idle(adapter_id)
        held = self._loaded.pop(adapter_id, None)
        if held is None:
            return False
        self._free.append(held.slot)
        return True

    def ids(self) -> tuple[str, ...]:
        """Ids of the adapters in slots."""
        return tuple(self._loaded)

    def enter(self, adapter_id: str) -> SlottedAdapter:
        """Begin to compute with an adapter, until `leave`. Raises NotFound."""
        held = self._loaded.get(adapter_id)
        if held is None:
            raise NotFound(f"adapter {adapter_id!r} is not loaded in this engine; load it first")
        held.users += 1
        return held

    def leave(self, use: SlottedAdapter) -> None:
        """End the use of an adapter; once for each `enter`."""
        use.users -= 1
        if not use.users and self._loaded.get(use.adapter_id) is not use:
            self._free.append(use.slot)

    def _load(
        self, adapter_id: str, adapter: PackedAdapter, read: ReadAdapter, instead_of: str
    ) -> LoadedAdapter:
        held = self._loaded.get(adapter_id)
        if instead_of == adapter_id:
            instead_of = ""
        self._check_idle(instead_of)
        if held is not None and held.content == read.content:
            self.unload(instead_of)
        else:
            is_own = held is not None and not held.users
            is_free = is_own or bool(self._free) or instead_of in self._loaded
            slots = self._slots_for(adapter, needs_one=not is_free)
            before = self._bank.nbytes
            if slots > self._bank.slots:
                self._free = list(range(slots, self._bank.slots, -1))
                self._bank.grow(slots)
            self.unload(instead_of)
            slot = held.slot if held is not None and is_own else self._free.pop()
            try:
                self._bank.load(slot, adapter)
                # The agent may have given up to wait, and the pages with it.
                read.check()
            except BaseException:
                self._free.append(slot)
                if held is not None and held.slot == slot:
                    del self._loaded[adapter_id]
                raise
            held = self._loaded[adapter_id] = SlottedAdapter(adapter_id, slot, read.content)
            if self._bank.nbytes != before:
                self._grown()
        return LoadedAdapter(slot=held.slot, nbytes=self._bank.nbytes)

    def _check_idle(self, adapter_id: str) -> None:
        held = self._loaded.get(adapter_id)
        if held is not None and held.users:
            raise Conflict(
                f"{held.users} generations compute with adapter {adapter_id!r}; "
                "unload it when they have ended"
            )

    def _slots_for(self, adapter: PackedAdapter, *, needs_one: bool) -> int:
        """How many slots there have to be for a load: the first adapter that names a layer
        allocates all slots of that layer. Raises MemoryRefused."""
        now, most = self._bank.slots, self._bank.count
        more = (max(1, min(2 * now, most)), now + 1) if needs_one else (now,)
        missing = [self._bank.missing_bytes(adapter, slots) for slots in more]
        if needs_one and now == most:
            raise MemoryRefused(
                f"no slot is free: all {most} hold an adapter; unload another first"
            )
        room = self._room_bytes(needs_one and now >= _FIRST_SLOTS) if missing[-1] else None
        for slots, size in zip(more, missing, strict=True):
            if room is None or size <= room:
                return slots
        raise MemoryRefused(
            f"slots for this adapter take {format_bytes(missing[-1])}, and the engine's limit "
            f"leaves {format_bytes(room or 0)}",
            retry_after_s=RETRY_S,
        )
