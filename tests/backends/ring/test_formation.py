"""Memory that was lent for a group is given back, whichever rank fails, and when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.backends.ring.formation import Formation
from kakeya.backends.ring.host import RankOrder
from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.core.errors import (
    ConfigError,
    KakeyaError,
    LoadFailed,
    MemoryRefused,
    PeerUnavailable,
)
from kakeya.generation.progress import LoadProgress

FACTS = {"weights": "abc"}
FAULTS = ("", "away", "refused", "other weights", "no start", "lost", "slow")


@dataclass
class FakeSeat:
    """A rank at a fake member."""

    member: FakeMember
    label: str = "mini"
    address: str = "10.0.0.2:5757"
    leader_host: str = "10.0.0.1"
    bytes: int = 1
    progress: LoadProgress | None = None
    ends: int = 0
    fault: str = ""
    lost: asyncio.Future[str] = field(default_factory=asyncio.Future)

    @property
    def facts(self) -> Mapping[str, str]:
        return {"weights": "def"} if self.member.fault == "other weights" else FACTS

    async def start(self, hosts: str) -> None:
        await asyncio.sleep(0)
        if self.member.fault == "no start":
            raise PeerUnavailable("mini: its process does not start")
        if self.member.fault == "lost":
            self.lost.set_result("rank 1 on mini is lost")

    async def end(self) -> None:
        self.ends += 1
        raise PeerUnavailable("it ended by itself")


@dataclass
class FakeMember:
    """A node that lends memory, with a fault."""

    fault: str
    ledger: list[int]

    @asynccontextmanager
    async def lent(self, order: RankOrder) -> AsyncIterator[FakeSeat]:
        if self.fault == "slow":
            await asyncio.sleep(3600)
        if self.fault == "refused":
            raise MemoryRefused("mini lends rank 1 no 900 MB: 100 MB are free")
        assert self.ledger == list(range(1, order.rank)), "memory is lent in the order of ranks"
        self.ledger.append(order.rank)
        try:
            yield FakeSeat(self)
        finally:
            self.ledger.remove(order.rank)


class FakeMembers:
    """The nodes of a group by their number."""

    own_id = "0"

    def __init__(self, faults: list[str]) -> None:
        self.ledger: list[int] = []
        self._faults = faults

    def get(self, node_id: str) -> FakeMember:
        fault = self._faults[int(node_id) - 1]
        if fault == "away":
            raise PeerUnavailable(f"node {node_id} is away")
        return FakeMember(fault, self.ledger)


def formation(members: FakeMembers, ranks: int, **more: object) -> Formation:
    seats = tuple(RingSeat(node=str(number)) for number in range(ranks))
    spec = RingSpec(name="toy", source="kakeya-tiny", split="tensor", seats=seats)
    here = lambda _: Path()  # noqa: E731
    return Formation(spec, members, here, None, facts=lambda _: FACTS, **more)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4), st.integers(0, 6))
def test_all_that_was_lent_is_given_back(faults: list[str], patience: int) -> None:
    members = FakeMembers(faults)
    group = formation(members, len(faults) + 1)

    async def attempt() -> None:
        with contextlib.suppress(KakeyaError):
            async with group.form() as formed:
                assert members.ledger == list(range(1, len(faults) + 1))
                assert "MLX_HOSTFILE" in formed.env()
                assert Path(formed.env()["MLX_HOSTFILE"]).exists()
                await formed.lost()

    async def attempts() -> None:
        for _ in range(2):  # what failed once can be tried again
            trying = asyncio.create_task(attempt())
            await asyncio.wait((trying,), timeout=patience / 100)
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
            assert members.ledger == []
            assert list(group.ranks) == []

    asyncio.run(attempts())


async def test_a_rank_with_other_weights_is_refused_by_name() -> None:
    group = formation(FakeMembers(["", "other weights"]), 3)
    with pytest.raises(ConfigError, match="rank 2 on mini has weights def, and rank 0 abc"):
        async with group.form():
            pass
    assert isinstance(group.refusal, ConfigError)


async def test_a_node_without_a_port_gives_all_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_port() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kakeya.backends.ring.formation._free_port", no_port)
    members = FakeMembers([""])
    group = formation(members, 2)
    with pytest.raises(LoadFailed, match="Too many open files"):
        async with group.form():
            pass
    assert isinstance(group.refusal, LoadFailed)
    assert members.ledger == []
