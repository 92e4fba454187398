"""Whatever is loaded, replaced, used and unloaded: no slot is written while somebody uses it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya.adapters.files.packed import PackedAdapter, Precision, digest, pack, unpack
from kakeya.core.errors import Conflict, MemoryRefused, NotFound
from kakeya.engine.adapters.slots import EngineAdapters, SlottedAdapter
from tests.engine.adapter_rig import FOLDERS, take

SLOTS = 3
PACKED = [pack(folder, Precision.INT8) for folder in FOLDERS[:4]]


class Watched:
    """Slots that remember what was written last, and forbid writing those in use."""

    count = SLOTS

    def __init__(self) -> None:
        self.written: dict[int, PackedAdapter] = {}
        self.in_use: set[int] = set()

    nbytes = slots = 0

    def missing_bytes(self, adapter: PackedAdapter, slots: int) -> int:
        return 0

    def grow(self, slots: int) -> None:
        assert self.slots < slots <= SLOTS
        self.slots = slots

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        assert 1 <= slot <= self.slots
        assert slot not in self.in_use
        self.written[slot] = adapter


class Uses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Watched()
        self.adapters = EngineAdapters(self.bank)
        self.loaded: dict[str, bytes] = {}
        self.slots: dict[str, int] = {}
        self.uses: list[tuple[SlottedAdapter, bytes]] = []

    def note(self) -> None:
        self.bank.in_use = {use.slot for use, _ in self.uses}

    def is_busy(self, name: str) -> bool:
        """Whether somebody computes with what this name means now."""
        return self.slots.get(name) in {use.slot for use, _ in self.uses}

    @rule(
        name=st.sampled_from("abcde"),
        at=st.integers(0, len(PACKED) - 1),
        out=st.sampled_from(["", *"abcde"]),
    )
    def load(self, name: str, at: int, out: str) -> None:
        packed = PACKED[at]
        taken = {use.slot for use, _ in self.uses} | set(self.slots.values())
        try:
            loaded = take(self.adapters, name, packed, out)
        except MemoryRefused:
            assert len(taken) == SLOTS
            assert out == name or out not in self.loaded
            return
        except Conflict:
            assert out != name
            assert self.is_busy(out)
            return
        if out != name:
            self.loaded.pop(out, None)
            self.slots.pop(out, None)
        self.loaded[name], self.slots[name] = packed, loaded.slot

    @rule(name=st.sampled_from("abcde"))
    def enter(self, name: str) -> None:
        try:
            use = self.adapters.enter(name)
        except NotFound:
            assert name not in self.loaded
            return
        self.uses.append((use, self.loaded[name]))
        self.note()

    @rule(at=st.integers(0, 20))
    def leave(self, at: int) -> None:
        if self.uses:
            use, _ = self.uses.pop(at % len(self.uses))
            self.adapters.leave(use)
            self.note()

    @rule(name=st.sampled_from("abcde"))
    def unload(self, name: str) -> None:
        try:
            assert self.adapters.unload(name) == (name in self.loaded)
        except Conflict:
            assert self.is_busy(name)
            return
        self.loaded.pop(name, None)
        self.slots.pop(name, None)

    @invariant()
    def everybody_has_what_was_loaded(self) -> None:
        assert set(self.adapters.ids()) == set(self.loaded)
        for use, packed in self.uses:
            assert use.content == digest(packed)
            found, wanted = self.bank.written[use.slot], unpack(packed)
            assert found.rank == wanted.rank
            assert [t.path for t in found.tensors] == [t.path for t in wanted.tensors]
            assert bytes(found.tensors[0].a) == bytes(wanted.tensors[0].a)


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
