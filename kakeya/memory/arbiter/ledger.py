"""The byte ledger: all holders of memory within one budget. It decides nothing.

    committed   residents that stay + tenants, less the bytes that they were told to give up
                + foreign bytes: the budget must hold this once all plans are carried out
    free        the less of budget - committed and the available bytes of the machine, where
                known, less bytes that loads under way still take and lent bytes not used yet,
                plus the bytes of residents that leave
    spare       free, less promised bytes and the margin that keeps the machine calm: for loads
                that can be done without

The available bytes are of the machine's last reading, plus loads and evictions since. Loads under
way have taken the bytes by which they fell since these loads began.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace

from kakeya.core import errors
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.policy import PressureLevel, ShrinkTenant, Tenant
from kakeya.memory.arbiter.resident import Resident, ResidentKey, State


@dataclass(slots=True)
class Ledger:
    """One node's bytes."""

    budget_bytes: int
    available_bytes: int | None = None
    """Bytes that the machine can give without pressure; None = not measured."""
    _unloaded_bytes: int | None = None
    """Available bytes as if loads under way had taken nothing yet."""
    _margin_bytes: int = 0
    """Available bytes that must stay unused so that there is no pressure."""
    _residents: dict[ResidentKey, Resident] = field(default_factory=dict)
    _tenants: dict[str, Tenant] = field(default_factory=dict)
    _foreign: dict[str, int] = field(default_factory=dict)
    _foreign_unfilled: dict[str, int] = field(default_factory=dict)
    """Bytes that foreign holders hold and do not use yet."""
    _promised: dict[str, int] = field(default_factory=dict)
    """Bytes that tenants were told to give up, until the end of the shrink."""
    _given: dict[str, int] = field(default_factory=dict)
    """Bytes that tenants gave up of that so far: they report slab by slab."""
    _stubborn: dict[str, int] = field(default_factory=dict)
    """Size of tenants that gave up less than they had offered. While a tenant holds as much, its
    offers count as nothing; else it would be asked again and again."""
    _growing: dict[str, int] = field(default_factory=dict)
    """Bytes reserved for tenants that grow, less the growth since."""
    changes: int = 0
    """Counts what was written down, but for the budget."""
    _last: tuple[tuple[object, ...], Snapshot] | None = field(
        default=None, compare=False, repr=False
    )
    """The last snapshot, with all that it hangs on."""

    def __contains__(self, key: ResidentKey) -> bool:
        return key in self._residents

    def find(self, key: ResidentKey) -> Resident | None:
        """The resident of a key; None = absent."""
        return self._residents.get(key)

    def get(self, key: ResidentKey) -> Resident:
        """The resident of a key. Raises NotFound."""
        resident = self._residents.get(key)
        if resident is None:
            raise errors.NotFound(f"{key} is not resident; `kakeya status` lists the residents")
        return resident

    @property
    def residents(self) -> tuple[Resident, ...]:
        """All residents that are not absent."""
        return tuple(self._residents.values())

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants, as if they had given up the promised bytes."""
        return tuple(self._after(tenant) for tenant in self._tenants.values())

    @property
    def foreign(self) -> dict[str, int]:
        """Bytes of foreign holders, by holder."""
        return dict(self._foreign)

    def put(self, resident: Resident) -> None:
        """Write down a resident's next state; an absent one is forgotten."""
        self.changes += 1
        if resident.state is State.READY and resident.measured_bytes is None:
            self._unloaded_less(self._taken_of(resident.key))
        if resident.state is State.ABSENT:
            self._residents.pop(resident.key, None)
        else:
            self._residents[resident.key] = resident
        self._note_unloaded()

    def measured(self, resident: Resident, size: int, unfilled_bytes: int = 0) -> Resident:
        """Write down the measured bytes of a resident, and how many of them it does not use yet."""
        if not 0 <= unfilled_bytes <= size:
            raise errors.InvalidArgument(
                f"{resident.key} measured {size} bytes, {unfilled_bytes} of them not used yet; "
                "0 or more, and no more than all, is due"
            )
        before = (resident.measured_bytes or 0) - resident.unfilled_bytes
        grown = size - unfilled_bytes - before
        corrected = replace(resident, measured_bytes=size, unfilled_bytes=unfilled_bytes)
        taken = min(self._taken_of(resident.key), max(0, grown))
        self.put(corrected)
        self._add_available(taken - grown)
        self._unloaded_less(taken)
        return corrected

    def gone(self, resident: Resident) -> None:
        """Remove a resident; its bytes are available again."""
        self.put(resident.moved(State.ABSENT))
        self._add_available((resident.measured_bytes or 0) - resident.unfilled_bytes)

    def report(self, tenant: Tenant) -> None:
        """Write down the bytes that a tenant reports."""
        name, before = tenant.name, self._tenants.get(tenant.name)
        if tenant == before:
            return
        self.changes += 1
        self._tenants[name] = tenant
        if before is None:
            return
        if name in self._growing:
            grown = max(0, tenant.held_bytes - before.held_bytes)
            self._reserve(name, -min(grown, self._growing[name]))
            self._add_available(-grown)
        given = min(max(0, before.held_bytes - tenant.held_bytes), self._outstanding(name))
        if given:
            self._given[name] = self._given.get(name, 0) + given
            self._add_available(given)

    def grow(self, name: str, size: int) -> None:
        """Reserve bytes for a tenant until it reports them. Raises NotFound."""
        if name not in self._tenants:
            raise errors.NotFound(
                f"no tenant is called {name!r}; there are {sorted(self._tenants)}"
            )
        self._reserve(name, size)

    def grown(self, name: str) -> None:
        """End a tenant's reservation."""
        self.changes += 1
        self._growing.pop(name, None)

    def forget(self, name: str) -> None:
        """Remove a tenant and all notes of it."""
        self.changes += 1
        self._tenants.pop(name, None)
        for notes in (self._promised, self._given, self._stubborn, self._growing):
            notes.pop(name, None)

    def _reserve(self, name: str, size: int) -> None:
        self.changes += 1
        self._growing[name] = self._growing.get(name, 0) + size
        if not self._growing[name]:
            del self._growing[name]

    def promise(self, shrinks: Iterable[ShrinkTenant]) -> None:
        """Count the bytes of these shrinks as free."""
        self.changes += 1
        for shrink in shrinks:
            self._promised[shrink.name] = self._promised.get(shrink.name, 0) + shrink.bytes

    def shrunk(self, shrink: ShrinkTenant, tenant: Tenant) -> None:
        """End a promise with the tenant's report after it."""
        self.changes += 1
        before = self._tenants[shrink.name]
        dropped = max(0, before.held_bytes - tenant.held_bytes)
        dropped += max(0, before.lent_bytes - tenant.lent_bytes)
        if self._given.pop(tenant.name, 0) + dropped < shrink.bytes:
            self._stubborn[tenant.name] = tenant.held_bytes + tenant.lent_bytes
        left = self._promised.get(shrink.name, 0) - shrink.bytes
        self._promised[shrink.name] = max(0, left)
        self._tenants[tenant.name] = tenant
        self._add_available(dropped)

    def observe(
        self, available_bytes: int | None, spare_bytes: int | None, *, is_partial: bool = False
    ) -> None:
        """Write down the machine's available bytes, and how many of them make no pressure; None
        = not known. A partial reading raises no figure: the last one counts, with the loads and
        evictions since."""
        self.changes += 1
        if is_partial and self.available_bytes is not None:
            told = self.available_bytes if available_bytes is None else available_bytes
            available_bytes = min(self.available_bytes, told)
        self.available_bytes = available_bytes
        self._note_unloaded()
        self._margin_bytes = 0
        if available_bytes is not None and spare_bytes is not None:
            self._margin_bytes = max(0, available_bytes - spare_bytes)

    def hold(self, holder: str, size: int, unfilled_bytes: int = 0) -> None:
        """Write down the bytes that a foreign process occupies or may occupy; 0 = none."""
        if not 0 <= unfilled_bytes <= size:
            raise errors.InvalidArgument(
                f"{holder!r} holds {size} bytes, {unfilled_bytes} of them not used yet; 0 or more, "
                "and no more than all, is due"
            )
        self.changes += 1
        self._foreign[holder], self._foreign_unfilled[holder] = size, unfilled_bytes
        if not size:
            del self._foreign[holder], self._foreign_unfilled[holder]

    def outline(self) -> Ledger:
        """A copy in which the most urgent lease of each resident stands for all of them."""
        copy = deepcopy(self)
        for one in copy.residents:
            if len(one.leases) > 1:
                first = min(one.leases, key=lambda lease: one.leases[lease].rank)
                copy.put(replace(one, leases={first: one.leases[first]}))
        return copy

    def snapshot(
        self,
        level: PressureLevel,
        waiting: tuple[ResidentKey, ...],
        kept: tuple[ResidentKey, ...],
    ) -> Snapshot:
        """The whole ledger at this moment, beside what the arbiter knows of the machine and of
        requests."""
        # An idle node asks several times a second, and little changes in minutes.
        moment = (self.changes, self.budget_bytes, level, waiting, kept)
        if self._last is None or self._last[0] != moment:
            self._last = (
                moment,
                Snapshot(
                    budget_bytes=self.budget_bytes,
                    committed_bytes=self.committed_bytes,
                    free_bytes=self.free_bytes,
                    spare_bytes=self.spare_bytes,
                    promised_bytes=self.promised_bytes,
                    available_bytes=self.available_bytes,
                    level=level,
                    residents=self.residents,
                    tenants=self.tenants,
                    foreign=self.foreign,
                    unfilled_bytes=self.unfilled_bytes,
                    waiting=waiting,
                    kept=kept,
                ),
            )
        return self._last[1]

    def check_integrity(self) -> None:
        """Check that notes are of what is there, figures 0 or more, and the last snapshot true
        while nothing was written down. Raises InvariantBroken."""
        if self._last is not None and self._last[0][:2] == (self.changes, self.budget_bytes):
            last = self._last[1]
            fresh = replace(self, _last=None).snapshot(last.level, last.waiting, last.kept)
            if fresh != last:
                raise errors.InvariantBroken("ledger", f"its snapshot is {last}, not {fresh}")
        notes = {*self._promised, *self._given, *self._stubborn, *self._growing}
        if strangers := notes - set(self._tenants):
            raise errors.InvariantBroken("ledger", f"notes of no tenant: {sorted(strangers)}")
        if self._foreign.keys() != self._foreign_unfilled.keys():
            raise errors.InvariantBroken("ledger", f"{self._foreign} but {self._foreign_unfilled}")
        for key, one in self._residents.items():
            if one.key != key or one.state is State.ABSENT or one.unfilled_bytes > one.bytes:
                raise errors.InvariantBroken("ledger", f"under {key} is {one}")
        figures = (*self._promised.values(), *self._given.values(), *self._growing.values())
        known = self.available_bytes if self.available_bytes is not None else 0
        if min(known, self._margin_bytes, *figures, *self._foreign.values()) < 0:
            raise errors.InvariantBroken("ledger", f"a figure is below 0: {self}")

    @property
    def has_promises(self) -> bool:
        """Whether a tenant has not finished a shrink yet."""
        return any(self._promised.values())

    @property
    def committed_bytes(self) -> int:
        """Bytes that the budget must hold once all plans are carried out."""
        stays = sum(r.bytes for r in self._residents.values() if not r.is_leaving)
        tenants = sum(tenant.held_bytes for tenant in self._tenants.values()) - self.promised_bytes
        growing = sum(self._growing.values())
        return stays + tenants + growing + sum(self._foreign.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that a load may take; negative when more is committed than there is."""
        return self._free_beyond(0)

    @property
    def spare_bytes(self) -> int:
        """Bytes for a load that can be done without. Promised bytes are not among them: the
        tenant may not give them after all."""
        return self._free_beyond(self._margin_bytes) - self.promised_bytes

    def _free_beyond(self, margin: int) -> int:
        free = self.budget_bytes - self.committed_bytes
        if self.available_bytes is None:
            return free
        coming = self._loading_bytes - self._taken_bytes
        coming += self.unfilled_bytes + sum(self._growing.values())
        leaving = sum(r.bytes - r.unfilled_bytes for r in self._residents.values() if r.is_leaving)
        there = self.available_bytes - coming + leaving + self.promised_bytes
        return min(free, there - margin)

    @property
    def unfilled_bytes(self) -> int:
        """Bytes that are lent and not used yet, so that the machine shows them as available.
        Loads under way are not among them; `_free_beyond` counts these as a whole."""
        there = (r for r in self._residents.values() if not r.is_leaving)
        residents = sum(r.unfilled_bytes for r in there if r.state is not State.LOADING)
        return residents + sum(self._foreign_unfilled.values())

    @property
    def promised_bytes(self) -> int:
        """Bytes that tenants still have to give up."""
        return sum(self._owed(tenant) for tenant in self._tenants.values())

    def _after(self, tenant: Tenant) -> Tenant:
        if self._is_stubborn(tenant):
            return replace(tenant, expired_bytes=0, spare_bytes=0, lent_bytes=0)
        outstanding = self._outstanding(tenant.name)
        if not outstanding:
            return tenant
        promised = self._owed(tenant)
        more = outstanding - promised
        expired = min(promised, tenant.expired_bytes)
        return replace(
            tenant,
            held_bytes=tenant.held_bytes - promised,
            expired_bytes=tenant.expired_bytes - expired,
            spare_bytes=tenant.spare_bytes - (promised - expired),
            lent_bytes=max(0, tenant.lent_bytes - more),
        )

    def _owed(self, tenant: Tenant) -> int:
        """Bytes that a tenant still has to give up, and can."""
        outstanding = self._outstanding(tenant.name)
        if not outstanding or self._is_stubborn(tenant):
            return 0
        return min(outstanding, tenant.expired_bytes + tenant.spare_bytes)

    def _outstanding(self, name: str) -> int:
        return max(0, self._promised.get(name, 0) - self._given.get(name, 0))

    def _is_stubborn(self, tenant: Tenant) -> bool:
        return self._stubborn.get(tenant.name) == tenant.held_bytes + tenant.lent_bytes

    @property
    def _loading_bytes(self) -> int:
        return sum(r.bytes for r in self._residents.values() if r.state is State.LOADING)

    @property
    def _taken_bytes(self) -> int:
        """Bytes of loads under way that the machine's figure shows as taken."""
        if self.available_bytes is None or self._unloaded_bytes is None:
            return 0
        return min(self._loading_bytes, max(0, self._unloaded_bytes - self.available_bytes))

    def _taken_of(self, key: ResidentKey) -> int:
        """The part of `_taken_bytes` that may be of one load."""
        resident = self._residents.get(key)
        if resident is None or resident.state is not State.LOADING:
            return 0
        return min(self._taken_bytes, resident.bytes)

    def _unloaded_less(self, size: int) -> None:
        """Count the bytes of a load that ended as taken for good."""
        if self._unloaded_bytes is not None:
            self._unloaded_bytes = max(0, self._unloaded_bytes - size)

    def _note_unloaded(self) -> None:
        if self._unloaded_bytes is None or not self._loading_bytes:
            self._unloaded_bytes = self.available_bytes

    def _add_available(self, size: int) -> None:
        if self.available_bytes is not None:
            self.available_bytes = max(0, self.available_bytes + size)
        if self._unloaded_bytes is not None:
            self._unloaded_bytes = max(0, self._unloaded_bytes + size)
