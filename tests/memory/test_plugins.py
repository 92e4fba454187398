"""The worked example, found by its entry point as an installed distribution's would be."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kakeya.core import errors
from kakeya.core.clock import SystemClock
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine.pressure import Reading
from kakeya.memory.plugins import GROUP, load_capabilities
from tests.memory.example_plugin import SIZES, Image, Question, Weights
from tests.memory.worlds import until

EXAMPLE = "tests.memory.example_plugin:capability"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=GROUP)


def arbiter() -> MemoryArbiter:
    return MemoryArbiter(budget=10**6, clock=SystemClock(), grace_s=0)


async def test_an_installed_distribution_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install() -> None:
        info = tmp_path / "example_reranker-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: example-reranker\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nrerank = {EXAMPLE}\n")

    await asyncio.to_thread(install)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with arbiter() as owner:
        (report,) = await load_capabilities(owner)
        assert (report.name, report.origin, report.error) == ("rerank", EXAMPLE, None)
        question = Question(("red", "fox"), ("a dog", "a red fox", "a fox"))
        answer = await owner.request("rerank", "small", question)
    assert answer == ["a red fox", "a fox", "a dog"]


async def test_a_plug_in_that_works_by_itself_starts_that_on_the_event_loop() -> None:
    async with arbiter() as owner:
        (report,) = await load_capabilities(
            owner, [point("watch", "tests.memory.example_plugin:watcher")]
        )
        assert report.error is None
        await until(lambda: owner.find("brightness", "m") is not None)


async def test_the_example_keeps_the_contract() -> None:
    question = Question(("a",), ("b", "a"))
    async with arbiter() as owner:
        await load_capabilities(owner, [point("rerank", EXAMPLE)])
        with pytest.raises(errors.NotFound, match="no re-ranker is called 'huge'"):
            await owner.request("rerank", "huge", question)
        async with owner.acquire("rerank", "small") as handle:
            weights = handle.backend
            assert await handle.run(question) == ["a", "b"]
            (seen,) = owner.status().residents
            assert seen.measured_bytes == SIZES["small"]
        await owner.request("rerank", "large", question)
        assert isinstance(weights, Weights)
        assert weights.table is None, "swapped within its role"
        owner.observe(Reading(level=PressureLevel.LOW, source="test"))
        await until(lambda: not owner.status().residents)


async def test_one_broken_plug_in_keeps_the_others_in() -> None:
    async with arbiter() as owner:
        reports = await load_capabilities(
            owner,
            [
                point("a-missing", "tests.memory.no_such_module:capability"),
                point("b-wrong", "builtins:dict"),
                point("c-good", EXAMPLE),
                point("d-double", EXAMPLE),
            ],
        )
    errors_by_name = {report.name: report.error for report in reports}
    assert "no_such_module" in str(errors_by_name["a-missing"])
    assert "a Capability is needed" in str(errors_by_name["b-wrong"])
    assert errors_by_name["c-good"] is None
    assert "already registered" in str(errors_by_name["d-double"])


async def test_a_plug_in_that_wants_the_arbiter_keeps_its_images_there() -> None:
    picture = Image(bytes(range(48)), 4, 4)
    async with arbiter() as owner:
        (report,) = await load_capabilities(
            owner, [point("eye", "tests.memory.example_plugin:camera")]
        )
        assert report.error is None
        assert await owner.request("brightness", "m", picture) == (sum(range(48)), 1)
        assert await owner.request("brightness", "m", picture) == (sum(range(48)), 1)
        held = {one.name: one.held_bytes for one in owner.status().tenants}
        assert held["vision-embeddings"] == 4 * 4 * 3
        owner.observe(Reading(level=PressureLevel.LOW, source="test"))
        await until(lambda: not owner.status().residents)
        assert sum(one.held_bytes for one in owner.status().tenants) == 0, "gone with the weights"


async def test_without_an_arbiter_a_capability_stays_off() -> None:
    """S0.3."""
    (report,) = await load_capabilities(None, [point("rerank", EXAMPLE)])
    assert "no memory arbiter" in str(report.error)
