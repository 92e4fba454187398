"""Tiers of adapters: which deserve a slot of an engine, pages, or only the disk. Pure.

    HOT    in a slot of its engine     >= 10 uses in the last 60 s, and among the first for whom
                                       the engine has slots
    WARM   packed, in pages            >= 1 use, and among the next 1000
    COLD   compressed, on disk         everything; it is always there too

A rank alone would keep unused adapters hot, and a threshold alone has no bound, so both must hold.
An adapter keeps its rating until its uses fall to half of the threshold, and until another has a
quarter more: two adapters with nearly equal use do not change places all the time.

A rating says what an adapter deserves; `is_hot` and `is_warm` say where its bytes are. An adapter
that is rated hot and lies on disk only is brought to warm first, so that no slot waits for a disk.
A request brings its adapter into a slot whatever the rating: the adapter that idles longest makes
room, those that are rated hot last. A slot keeps its adapter until another needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kakeya.adapters.usage_window import AccessWindow
from kakeya.core.errors import Conflict, InvariantBroken, NotFound
from kakeya.core.settings import number, setting, whole


class Tier(IntEnum):
    """The place that an adapter has or deserves; the higher, the sooner it is used."""

    COLD = 0
    WARM = 1
    HOT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The numbers behind ratings."""

    window_s: float = setting(
        "uses within this time rate an adapter",
        number(1, 86400, "seconds"),
        60.0,
        key="adapters.window_s",
    )
    slices: int = 12
    hot_uses: int = setting(
        "so many uses make an adapter hot", whole(1, 100_000, "uses"), 10, key="adapters.hot_uses"
    )
    warm_uses: int = 1
    warm_places: int = setting(
        "the most adapters that are rated warm",
        whole(0, 100_000, "adapters"),
        1000,
        key="adapters.warm_places",
    )
    round_s: float = setting(
        "an exact adapter that idles so long in pages is rounded to int8 there; 0: it stays exact",
        number(0, 86400, "seconds"),
        0.0,
        key="adapters.compression_threshold_s",
    )
    stay: float = 0.5  # the share of the uses it took that is enough to stay
    lead: float = 1.25  # how many times the uses of a rated one another must have
    linger_s: float = 30.0  # how long a warm one stays after its last use left the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move to make: bring an adapter to a tier, first taking `instead_of` out of its slot."""

    adapter_id: str
    to: Tier
    instead_of: str = ""


class Adapter:
    """One adapter in the table, which alone changes it."""

    __slots__ = (
        "adapter_id", "base", "is_coming", "is_doubtful", "is_hot", "is_moving", "is_retired",
        "is_rounded", "is_warm", "is_yielding", "leases", "rating", "row", "used_s", "waiting",
    )  # fmt: skip

    def __init__(self, adapter_id: str, base: str, row: int) -> None:
        self.adapter_id = adapter_id
        self.base = base
        self.row = row
        self.rating = Tier.COLD
        self.is_coming = False  # its load was sent to an engine: later requests are behind it
        self.is_doubtful = False  # could not be brought into a slot the last time
        self.is_hot = False
        self.is_warm = False
        self.is_rounded = False  # in its pages, or it would take no fewer of them
        self.is_moving = False  # a move of it is under way
        self.is_retired = False  # takes no new leases
        self.is_yielding = False  # its new requests wait in the queue, because others waited long
        self.leases = 0
        self.used_s = 0.0
        self.waiting = 0  # requests that wait for it, also while its model is loaded

    @property
    def tier(self) -> Tier:
        """The quickest place where its bytes are."""
        if self.is_hot:
            return Tier.HOT
        return Tier.WARM if self.is_warm else Tier.COLD

    @property
    def is_idle(self) -> bool:
        """Whether it could be taken out of its slot now."""
        return not self.leases and not self.is_moving


class AdapterTable:
    """All adapters of a node. Time is given in monotonic seconds."""

    def __init__(self, rules: TierRules | None = None) -> None:
        self.rules = rules or TierRules()
        self._window = AccessWindow(self.rules.window_s, self.rules.slices)
        self._adapters: dict[str, Adapter] = {}
        self._by_row: dict[int, Adapter] = {}
        self._hot: dict[str, dict[str, Adapter]] = {}  # by base: adapters in slots
        self._warm: dict[str, Adapter] = {}
        self._rated: tuple[Adapter, ...] = ()  # above cold, the most used first

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    def add(self, adapter_id: str, base: str) -> Adapter:
        """Add an adapter, cold. Raises Conflict when it is known."""
        if adapter_id in self._adapters:
            raise Conflict(f"adapter {adapter_id} is in the table already")
        adapter = Adapter(adapter_id, base, self._window.add())
        self._adapters[adapter_id] = adapter
        self._by_row[adapter.row] = adapter
        return adapter

    def get(self, adapter_id: str) -> Adapter:
        """Find an adapter. Raises NotFound."""
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise NotFound(f"there is no adapter {adapter_id[:120]!r}") from None

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter that is on disk only, and that no request waits for.

        Raises Conflict for any other.
        """
        if adapter.tier is not Tier.COLD or not adapter.is_idle or adapter.waiting:
            raise Conflict(
                f"adapter {adapter.adapter_id} is in use or waited for, in a slot or in pages"
            )
        del self._adapters[adapter.adapter_id]
        del self._by_row[adapter.row]
        self._window.drop(adapter.row)

    # --- use

    def lease(self, adapter: Adapter, now: float) -> None:
        """Count one use, and keep it where it is until `release`. Raises Conflict: retired."""
        if adapter.is_retired:
            raise Conflict(f"adapter {adapter.adapter_id} is being removed")
        self._window.touch(adapter.row, now)
        adapter.leases += 1
        adapter.used_s = now

    def release(self, adapter: Adapter, now: float) -> None:
        """End one lease. Raises InvariantBroken when there is none."""
        if not adapter.leases:
            raise InvariantBroken("adapter lease", f"{adapter.adapter_id} has none to release")
        adapter.leases -= 1
        adapter.used_s = now

    def uses(self, adapter: Adapter, now: float) -> int:
        """The count of its leases within the window."""
        return self._window.count(adapter.row, now)

    # --- where things are

    def entered_slot(self, adapter: Adapter) -> None:
        """Note that it is in a slot of its engine."""
        adapter.is_hot, adapter.is_doubtful = True, False
        self._hot.setdefault(adapter.base, {})[adapter.adapter_id] = adapter

    def left_slot(self, adapter: Adapter) -> None:
        """Note that it is in no slot, nor certain to come there; harmless when it was not."""
        adapter.is_hot = adapter.is_coming = adapter.is_yielding = False
        self._hot.get(adapter.base, {}).pop(adapter.adapter_id, None)

    def emptied(self, base: str) -> tuple[Adapter, ...]:
        """Note that an engine ended with its slots; returns the adapters that were in them."""
        gone = tuple(self._hot.pop(base, {}).values())
        for adapter in gone:
            adapter.is_hot = adapter.is_yielding = False
        return gone

    def entered_pages(self, adapter: Adapter) -> None:
        """Note that it lies in pages."""
        adapter.is_warm = True
        self._warm[adapter.adapter_id] = adapter

    def left_pages(self, adapter: Adapter) -> None:
        """Note that its pages went; harmless when it had none."""
        adapter.is_warm = adapter.is_rounded = False
        self._warm.pop(adapter.adapter_id, None)

    def hot(self, base: str) -> tuple[Adapter, ...]:
        """Adapters in slots of a model's engine."""
        return tuple(self._hot.get(base, {}).values())

    def warm(self) -> tuple[Adapter, ...]:
        """Adapters in pages."""
        return tuple(self._warm.values())

    def idlers(self, now: float) -> tuple[Adapter, ...]:
        """Adapters that idle in pages for so long that they are rounded there."""
        limit_s = self.rules.round_s
        return tuple(
            adapter
            for adapter in self._warm.values()
            if limit_s and now - adapter.used_s >= limit_s
            if adapter.is_idle and not (adapter.is_rounded or adapter.waiting)
        )

    def victim(self, base: str) -> Adapter | None:
        """The adapter that leaves its slot for another: the longest idle; None = all are in use."""
        idle = (adapter for adapter in self._hot.get(base, {}).values() if adapter.is_idle)
        return min(idle, key=_leaves_first, default=None)

    def yielder(self, base: str) -> Adapter | None:
        """The adapter that should yield, so that its slot comes free for requests that waited long.

        None when one yields already, or none is in use.
        """
        held = tuple(self._hot.get(base, {}).values())
        if any(adapter.is_yielding for adapter in held):
            return None
        return min(
            (adapter for adapter in held if adapter.leases and not adapter.is_moving),
            key=lambda one: (one.rating, one.leases, one.used_s),
            default=None,
        )

    # --- ratings

    def rebalance(self, now: float, slots: Mapping[str, int]) -> tuple[Move, ...]:
        """Rate all adapters by their uses; returns moves, of the most used first; `slots` by base.

        No adapter that is in use, or moving, is moved.
        """
        counts = self._window.counts(now)
        used = np.flatnonzero(counts)
        hot = self._rate_hot(counts, used, slots)
        warm = self._rate_warm(counts, used, hot, now)
        for rating, adapters in ((Tier.COLD, self._rated), (Tier.WARM, warm), (Tier.HOT, hot)):
            for adapter in adapters:
                adapter.rating = rating
        self._rated = (*hot, *warm)
        return (*self._promotions(hot, slots), *self._warmings(warm), *self._coolings())

    def _rate_hot(
        self, counts: NDArray[np.int64], used: NDArray[np.int64], slots: Mapping[str, int]
    ) -> list[Adapter]:
        least = self.rules.hot_uses * self.rules.stay
        candidates: dict[str, list[tuple[float, Adapter]]] = {}
        for row in used[counts[used] >= least].tolist():
            adapter = self._by_row[row]
            uses, was_hot = int(counts[row]), adapter.rating is Tier.HOT
            if adapter.is_retired or (uses < self.rules.hot_uses and not was_hot):
                continue
            weight = uses * (self.rules.lead if was_hot else 1.0)
            candidates.setdefault(adapter.base, []).append((weight, adapter))
        chosen: list[tuple[float, Adapter]] = []
        for base, found in candidates.items():
            found.sort(key=_by_weight)
            chosen += found[: slots.get(base, 0)]
        return [adapter for _, adapter in sorted(chosen, key=_by_weight)]

    def _rate_warm(
        self,
        counts: NDArray[np.int64],
        used: NDArray[np.int64],
        hot: list[Adapter],
        now: float,
    ) -> list[Adapter]:
        rules = self.rules
        lingering = [
            adapter.row
            for adapter in self._rated
            if self._by_row.get(adapter.row) is adapter
            and not counts[adapter.row]
            and now - adapter.used_s <= rules.window_s + rules.linger_s
        ]
        taken = set(hot)
        found: list[tuple[float, Adapter]] = []
        for row in (*used[counts[used] >= rules.warm_uses].tolist(), *lingering):
            adapter = self._by_row[row]
            if adapter not in taken and not adapter.is_retired:
                lead = 1.0 if adapter.rating is Tier.COLD else rules.lead
                found.append((int(counts[row]) * lead, adapter))
        found.sort(key=_by_weight)
        return [adapter for _, adapter in found[: rules.warm_places]]

    def _promotions(self, hot: list[Adapter], slots: Mapping[str, int]) -> Iterator[Move]:
        """Moves into free slots, then into slots of idle adapters that are not rated hot.

        From pages only; an adapter on disk moves to pages first.
        """
        free: dict[str, int] = {}
        idle: dict[str, list[Adapter]] = {}
        for base, places in slots.items():
            held = self._hot.get(base, {}).values()
            free[base] = places - len(held)
            spare = [one for one in held if one.is_idle and one.rating is not Tier.HOT]
            idle[base] = sorted(spare, key=lambda one: -one.used_s)
        for adapter in hot:
            if adapter.is_hot or adapter.is_moving:
                continue
            if adapter.tier is Tier.COLD:
                yield Move(adapter_id=adapter.adapter_id, to=Tier.WARM)
            elif free[adapter.base] > 0:
                free[adapter.base] -= 1
                yield Move(adapter_id=adapter.adapter_id, to=Tier.HOT)
            elif idle[adapter.base]:
                out = idle[adapter.base].pop()
                yield Move(adapter_id=adapter.adapter_id, to=Tier.HOT, instead_of=out.adapter_id)

    def _warmings(self, warm: list[Adapter]) -> Iterator[Move]:
        for adapter in warm:
            if adapter.tier is Tier.COLD and not adapter.is_moving:
                yield Move(adapter_id=adapter.adapter_id, to=Tier.WARM)

    def _coolings(self) -> Iterator[Move]:
        """Moves out of pages, of idle adapters that are rated cold."""
        for adapter in tuple(self._warm.values()):
            if adapter.rating is Tier.COLD and adapter.is_idle:
                yield Move(adapter_id=adapter.adapter_id, to=Tier.COLD)


def _leaves_first(adapter: Adapter) -> tuple[bool, bool, Tier, float]:
    return not adapter.is_retired, not adapter.is_yielding, adapter.rating, adapter.used_s


def _by_weight(found: tuple[float, Adapter]) -> tuple[float, float, str]:
    weight, adapter = found
    return -weight, -adapter.used_s, adapter.adapter_id
