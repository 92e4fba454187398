"""The tasks of a running node: read again, and the guard that outlives it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError, InvalidArgument, StoreFailed
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.tasks import TaskSpec

OLD, NEW = {"old": TaskSpec()}, {"new": TaskSpec()}


async def test_the_guard_is_kept_over_restarts_and_wins_over_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "node.live.json"

    async def restarted(allows_cloud: bool) -> TaskRegistry:
        tasks = TaskRegistry(allows_cloud=allows_cloud, file=file)
        await tasks.restore()
        return tasks

    first = await restarted(True)
    assert first.allows_cloud
    await first.allow_cloud(False)
    assert not first.allows_cloud
    assert not (await restarted(True)).allows_cloud
    for damaged in ("{", "[]", '{"allowCloudFallback": "no"}'):
        await asyncio.to_thread(file.write_text, damaged)
        for setting in (True, False):
            assert (await restarted(setting)).allows_cloud is setting


async def test_a_guard_that_cannot_be_kept_stays_as_it_was(tmp_path: Path) -> None:
    tasks = TaskRegistry(file=tmp_path / "missing" / "node.live.json")
    with pytest.raises(StoreFailed, match="stays as it was"):
        await tasks.allow_cloud(False)
    assert tasks.allows_cloud


async def test_tasks_are_read_again_or_stay_as_they_were() -> None:
    tasks = TaskRegistry(OLD, reread=lambda: NEW)
    await tasks.reload()
    assert tasks.tasks == NEW

    def fault() -> dict[str, TaskSpec]:
        raise ConfigError("node.toml: it is wrong")

    tasks = TaskRegistry(OLD, reread=fault)
    with pytest.raises(InvalidArgument, match=r"node.toml: it is wrong; the tasks stay as"):
        await tasks.reload()
    assert tasks.tasks == OLD
