"""The tasks of a running node: read again, and the guard that outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError, InvalidArgument, StoreFailed
from kakeya.dispatch.profiles import ClientProfile, ProfileSpec
from kakeya.dispatch.registry import LiveSettings, TaskRegistry
from kakeya.dispatch.tasks import TaskSpec
from kakeya.generation.manifest import Manifest

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
    renewed = LiveSettings(tasks=NEW, manifests={"m": Manifest(pin=True)})
    applied: list[Mapping[str, Manifest]] = []
    tasks = TaskRegistry(OLD, reread=lambda: renewed, apply=applied.append)
    await tasks.reload()
    assert tasks.tasks == NEW
    assert applied == [renewed.manifests]

    def fault(*_: object) -> LiveSettings:
        raise ConfigError("node.toml: it is wrong")

    for one in (
        TaskRegistry(OLD, reread=fault),
        TaskRegistry(OLD, reread=lambda: renewed, apply=fault),
    ):
        with pytest.raises(InvalidArgument, match=r"node.toml: it is wrong; nothing was changed"):
            await one.reload()
        assert one.tasks == OLD


@pytest.mark.parametrize(
    ("client", "agent", "name"),
    [
        ("build", "python/3", "ci"),
        ("", "claude-cli/2.0 (x)", "coder"),
        ("build", "claude-cli/2.0", "ci"),
        ("builder", "my claude-cli/2", ""),
        ("", "", ""),
    ],
)
def test_a_client_has_the_first_profile_that_fits(client: str, agent: str, name: str) -> None:
    profiles = {
        "ci": ProfileSpec(clients=("build",)),
        "coder": ProfileSpec(agents=("aider/", "claude-cli/")),
    }
    found = TaskRegistry(profiles=profiles).profile_of(client, agent)
    assert found == ClientProfile(name, profiles.get(name, ProfileSpec()))
