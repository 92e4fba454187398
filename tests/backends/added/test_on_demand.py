"""Pulls for requests: when one is begun, how several requests share it, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kakeya.backends.added.on_demand import OnDemandPulls
from kakeya.core.errors import LoadFailed, ModelLoading, PeerUnavailable
from kakeya.core.units import GIB, MIB
from kakeya.weights.config import WeightsConfig
from kakeya.weights.partial import DiskRefused
from kakeya.weights.progress import PullState
from kakeya.weights.weights import NodeWeights
from tests.waiting import until

WAIT_S = 120.0


class Disk:
    """The pulls of a node: each waits for `may_end`, and fails with `fault` if there is one."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, bool]] = []
        self.may_end = asyncio.Event()
        self.fault: Exception | None = None
        self.served: set[str] = set()
        self.has_memory = self.is_served = True
        self.index = SimpleNamespace(last_found=())
        self.unserved: Callable[[str], str] = lambda name: ""

    async def pull(
        self, name: str, *, from_node: str, keep: bool, may_use_hub: bool
    ) -> AsyncIterator[PullState]:
        self.begun.append((name, may_use_hub))
        yield PullState(
            name=name, phase="fetching", bytes=4 * MIB, done_bytes=MIB, bytes_per_s=MIB,
            sources=("left",),
        )  # fmt: skip
        await self.may_end.wait()
        if self.fault is not None:
            raise self.fault
        if self.is_served:
            self.served.add(name)

    def pulled(self, name: str) -> str | None:
        return f"the model {name}" if name in self.served else None

    def has_room(self, disk_bytes: int) -> bool:
        return self.has_memory


@asynccontextmanager
async def pulls_of(disk: Disk, **settings: Any) -> AsyncIterator[OnDemandPulls]:
    config = WeightsConfig(folder=Path("/none"), **settings)
    home: Any = SimpleNamespace(has_room=disk.has_room, pulled=disk.pulled)
    pulls = OnDemandPulls(home, cast("NodeWeights", disk), config, most_s=WAIT_S)
    yield pulls
    await pulls.aclose()


async def test_a_pull_is_begun_that_its_request_can_wait_for() -> None:
    disk = Disk()
    async with pulls_of(disk) as pulls:
        assert pulls.refusal("m", GIB, 100 * MIB) == ""
        assert "and a request waits 120 s; bring it with `kakeya models pull m`" in pulls.refusal(
            "m", GIB, MIB
        )
        disk.index.last_found = (SimpleNamespace(name="mine"),)
        assert "start the node with --model mine" in pulls.refusal("mine", 1, 100 * MIB)
        disk.unserved = lambda name: "it needs 9 GiB"
        assert "is not served here: it needs 9 GiB" in pulls.refusal("mine", 1, 100 * MIB)
        disk.has_memory = False
        assert "no memory for its 1.0 GiB" in pulls.refusal("m", GIB, 100 * MIB)
    async with pulls_of(Disk(), pull_mb_per_s=1.0) as slow:
        assert "would take about" in slow.refusal("m", GIB, 100 * MIB)


def test_a_node_that_serves_no_pulled_models_pulls_none_for_requests() -> None:
    for settings in ({"pull_on_demand": False}, {"serve": False}):
        config = WeightsConfig(folder=Path("/none"), **settings)
        assert not OnDemandPulls(cast("Any", None), cast("Any", None), config, most_s=1.0).is_on


async def test_requests_share_a_pull_which_asks_no_hub() -> None:
    disk = Disk()
    async with pulls_of(disk) as pulls:
        waiting = [asyncio.create_task(pulls.bring("org/m", WAIT_S)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        wait = pulls.waits_for("org/m")
        assert wait is not None
        said = "bringing org/m here, from left, 1.0 MiB of 4.0 MiB, about 3 s"
        assert wait.describe() == said
        assert pulls.refusal("org/m", GIB, 1.0) == "", "it is under way"
        disk.may_end.set()
        assert set(map(str, await asyncio.gather(*waiting))) == {"the model org/m"}
        assert disk.begun == [("org/m", False)]
        assert pulls.waits_for("org/m") is None


async def test_a_pull_goes_on_when_its_request_is_over() -> None:
    disk = Disk()
    async with pulls_of(disk) as pulls:
        with pytest.raises(ModelLoading, match=r"m is not here yet \(bringing m here") as late:
            await pulls.bring("m", 0.01)
        assert late.value.retry_after_s == 3.0
        again = asyncio.create_task(pulls.bring("m", WAIT_S))
        left = asyncio.create_task(pulls.bring("m", WAIT_S))
        await asyncio.sleep(0)
        left.cancel()
        disk.may_end.set()
        assert str(await again) == "the model m"
        assert len(disk.begun) == 1


async def test_a_pull_that_fails_says_why_and_may_be_tried_again() -> None:
    disk = Disk()
    disk.may_end.set()
    disk.fault = PeerUnavailable("nothing comes any more")
    async with pulls_of(disk) as pulls:
        for _ in range(2):
            with pytest.raises(PeerUnavailable, match="nothing comes any more"):
                await pulls.bring("m", WAIT_S)
        disk.fault = DiskRefused("the disk is full")
        with pytest.raises(LoadFailed, match="m was not pulled: the disk is full"):
            await pulls.bring("m", WAIT_S)
        assert len(disk.begun) == 3
        disk.fault, disk.is_served = None, False
        disk.unserved = lambda name: "it needs 9 GiB"
        with pytest.raises(LoadFailed, match="is not served here: it needs 9 GiB"):
            await pulls.bring("m", WAIT_S)


async def test_a_stop_ends_what_waits_for_a_pull_and_says_so() -> None:
    disk = Disk()
    async with pulls_of(disk) as pulls:
        waiting = asyncio.create_task(pulls.bring("m", WAIT_S))
        await until(lambda: disk.begun)
    for late in (waiting, pulls.bring("m", WAIT_S)):
        with pytest.raises(PeerUnavailable, match="m is not here yet, and this node is stopping"):
            await late
    assert len(disk.begun) == 1
