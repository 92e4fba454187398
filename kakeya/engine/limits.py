"""Memory bounds of an engine: how it keeps to them, and how it gives memory back.

The bound is on the process as the system counts it. The interpreter and libraries cannot shrink, so
the model's framework gets the rest, its share: the bound less everything else that is resident.
Other memory grows with use (the heap keeps freed pages, Python holds objects), so the share is
found anew whenever memory is asked back. Meanwhile spare buffers make place for that growth, and an
engine beyond its bound gives all of them back.

At its limit, mlx 0.32 does nothing on the CPU: the number is stored, allocations go on beyond it,
and an allocation that the system refuses ends the process. On Metal its documentation calls the
limit a guideline for the evaluation of graphs: beyond it, allocations fail once there is no more
memory, swap included. So the engine hands the limit on, and enforces it by its own look after each
step: beyond it, spare buffers go, then idle KV, then KV of parked generations, and then the weakest
running generation is parked (see `room`).
The cache limit holds everywhere, and is set to the bytes that arrays leave of the bound.

Slots for adapters come out of the same share, and are allocated long after the bounds were set: the
KV bound is lowered to the bytes that they leave, so that a promised context can be filled.
"""

from __future__ import annotations

from collections.abc import Callable

from kakeya.core.errors import MemoryRefused
from kakeya.core.process import resident_bytes, trim_heap
from kakeya.core.units import format_bytes
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import KEPT_BUFFER_BYTES, Model
from kakeya.engine.queue.room import RETRY_S, KvRoom
from kakeya.generation.facts import Footprint
from kakeya.memory.estimate.estimate import STEP_BYTES

_LEAST_KV_TOKENS = 2048
"""Slots of adapters leave KV for so much, or for the whole bound where that is less."""
_NOTED_BYTES = 1 << 20
"""The share does not change by less."""
_LOOK_EVERY_UNITS = 8
"""Units of work between two looks at resident memory, which take 30 us each."""


class EngineLimits:
    """The bounds of one engine; made and used on the model thread.

    `room` says which sequences may run within the KV bound.
    """

    def __init__(
        self,
        model: Model,
        slots: KvSlots,
        *,
        resident: Callable[[], int | None] = resident_bytes,
        trim: Callable[[], bool] = trim_heap,
    ) -> None:
        self._model = model
        self._slots = slots
        self.room = KvRoom(slots, model.facts)
        self.drop_parked: Callable[[int], int] = lambda size: 0
        """Takes KV of parked generations until so many bytes are gone or none is left; returns the
        bytes that went at once."""
        self.wants_answered: Callable[[], None] = lambda: None
        """Notes that bounds were set in answer to `KvWant`."""
        self._resident = resident
        self._trim = trim
        self._limit_bytes = 0
        self._share_bytes: int | None = None
        self._first_share_bytes = 0
        self._rest_bytes = self._units = 0
        self._cache_bytes = self._cut_bytes = KEPT_BUFFER_BYTES
        self._kv_bytes = slots.budget_bytes
        """The KV bound that was set; slots of adapters may lower the bound that holds."""
        self._model_bytes = model.memory().active_bytes - self._idle_bytes() - self._slot_bytes()

    def set(self, memory_bytes: int, cache_bytes: int, kv_bytes: int) -> Footprint:
        """Bound memory, spare buffers and KV; 0 = unchanged. Idle bytes above go at once.

        Raises MemoryRefused when the model alone takes more, InvalidArgument for a KV bound in
        which nothing fits; nothing is changed then.
        """
        if kv_bytes:
            self.room.check_bound(kv_bytes)
        share = self._share(memory_bytes) if memory_bytes else None
        if share is not None:
            self._limit_bytes = memory_bytes
            self._share_bytes = self._first_share_bytes = share
        if cache_bytes:
            self._cache_bytes = self._cut_bytes = cache_bytes
        if share is not None or cache_bytes:
            self._model.limit(share, cache_bytes or None)
        if kv_bytes:
            self._kv_bytes = kv_bytes
        self.fit_kv()
        now = self.footprint()
        over = now.resident_bytes - self._limit_bytes if self._limit_bytes else 0
        return self.shrink(over) if over > 0 else now

    def fit_kv(self) -> None:
        """Bound KV by the bound that was set, and by the bytes that slots of adapters leave."""
        allowed = self._kv_bytes
        if self._share_bytes is not None and self._slot_bytes():
            left = self._share_bytes - self._model_bytes - self._slot_bytes()
            allowed = min(allowed, max(left, self._least_kv_bytes()))
        if allowed != self._slots.budget_bytes:
            self._slots.set_budget(allowed)

    def slot_room_bytes(self, keeps_kv: bool) -> int | None:
        """Bytes that more slots of adapters may take, beside the whole KV bound, or beside the KV
        of running generations and the least KV; None = without a bound."""
        room = self.room_bytes()
        if self._share_bytes is None or room is None:
            return None
        kv = max(self.room.lent_bytes, self._kv_bytes if keeps_kv else self._least_kv_bytes())
        left = self._share_bytes - self._model_bytes - self._slot_bytes() - kv
        return max(0, min(room, left))

    def shrink(self, size: int) -> Footprint:
        """Give `size` idle bytes back, or as many as there are; returns the footprint after it."""
        missing = size - self._model.memory().cache_bytes
        if missing > 0:
            missing -= self._slots.shed(missing)
        if missing > 0:
            idle = self._model.idle_bytes()
            self._model.shed(missing)
            missing -= idle - self._model.idle_bytes()
        if missing > 0:
            self.drop_parked(missing)
        # What was dropped lies among the spare buffers now.
        return self._tidied()

    def holds(self) -> bool:
        """Whether the model keeps to its share; idle parts are dropped first where needed."""
        if self._share_bytes is None:
            return True
        if self._units % _LOOK_EVERY_UNITS == 0:
            self._look()
        self._units += 1
        memory = self._model.memory()
        left = self._share_bytes - memory.active_bytes
        # Spare buffers make place for whatever else is resident, and not only for its share.
        spare = self._limit_bytes - self._rest_bytes - memory.active_bytes
        self._fit_cache(memory.cache_bytes, max(0, min(left, spare)))
        if left >= 0:
            return True
        self.shrink(memory.cache_bytes - left)
        return self._model.memory().active_bytes <= self._share_bytes

    def refusal(self) -> MemoryRefused:
        """The error of a generation that ends so that the engine can go on."""
        return MemoryRefused(
            f"the generation outgrew the engine's bounds ({self._bounds()}); ask for fewer tokens"
        )

    def parked_refusal(self) -> MemoryRefused:
        """The error of a parked generation that lost its KV."""
        return MemoryRefused(
            "the generation was parked for more urgent or older ones, and these needed its KV "
            f"within the engine's bounds ({self._bounds()}); it can go on from its history",
            retry_after_s=RETRY_S,
        )

    def _bounds(self) -> str:
        bounds = f"{format_bytes(self._slots.budget_bytes)} of KV"
        return (
            f"{bounds}, {format_bytes(self._limit_bytes)} in all" if self._limit_bytes else bounds
        )

    def room_bytes(self) -> int | None:
        """Bytes that the model may still take, idle KV not counted; None = without a bound."""
        if self._share_bytes is None:
            return None
        return max(0, self._share_bytes - self._model.memory().active_bytes + self._idle_bytes())

    def footprint(self) -> Footprint:
        """The memory that is occupied at this moment."""
        memory = self._model.memory()
        held = memory.active_bytes + memory.cache_bytes
        return Footprint(
            resident_bytes=self._resident() or held,
            mlx_active_bytes=memory.active_bytes,
            mlx_cache_bytes=memory.cache_bytes,
            idle_kv_bytes=self._idle_bytes(),
            limit_bytes=self._limit_bytes,
        )

    def _fit_cache(self, cache_bytes: int, left: int) -> None:
        """Bound spare buffers by the bytes that arrays leave of the share.

        The bound rises again only when they leave twice as much: setting it at each step would cost
        more than the buffers save.
        """
        if cache_bytes > left:
            self._cut_bytes = left
        elif self._cut_bytes < self._cache_bytes and left > 2 * self._cut_bytes:
            self._cut_bytes = min(left, self._cache_bytes)
        else:
            return
        self._model.limit(None, self._cut_bytes)

    def _look(self) -> None:
        """Notice other resident memory; beyond the bound, spare buffers and free heap go at once.

        Idle KV goes only when the agent asks for memory back: it may still save a prefill.
        """
        now = self.footprint()
        if now.resident_bytes > self._limit_bytes:
            now = self._tidied()
        self._rest_bytes = self._other_bytes(now)

    def _tidied(self) -> Footprint:
        """Give unused buffers back to the system, and freed pages that the C library keeps."""
        self._model.tidy()
        self._trim()
        now = self.footprint()
        self._fit_share(now)
        return now

    def _share(self, memory_bytes: int) -> int:
        """The framework's share of a bound."""
        now = self.footprint()
        other = self._other_bytes(now)
        fixed = now.mlx_active_bytes - now.idle_kv_bytes - self.room.lent_bytes
        if memory_bytes - other < fixed:
            raise MemoryRefused(
                f"a bound of {format_bytes(memory_bytes)} is less than the model itself occupies, "
                f"which is {format_bytes(other + fixed)}"
            )
        return memory_bytes - other

    def _fit_share(self, now: Footprint) -> None:
        """Find the share anew: the bound less other resident memory.

        Promised KV can be filled all the same: a smaller share costs spare buffers only.
        """
        if self._share_bytes is None:
            return
        promised = self._model_bytes + self._slot_bytes() + self._slots.budget_bytes + STEP_BYTES
        left = self._limit_bytes - self._other_bytes(now)
        share = min(max(left, promised), self._first_share_bytes)
        if abs(share - self._share_bytes) >= _NOTED_BYTES:
            self._share_bytes = share
            self._model.limit(share, None)

    def _other_bytes(self, now: Footprint) -> int:
        """Resident bytes that are not the framework's."""
        return max(0, now.resident_bytes - now.mlx_active_bytes - now.mlx_cache_bytes)

    def _slot_bytes(self) -> int:
        return self._model.adapters.nbytes if self._model.adapters is not None else 0

    def _least_kv_bytes(self) -> int:
        return min(self._kv_bytes, self.room.kv_bytes(_LEAST_KV_TOKENS))

    def _idle_bytes(self) -> int:
        return self._slots.held_bytes + self.room.parked_bytes + self._model.idle_bytes()
