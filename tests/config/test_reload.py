"""The file of a running node read again: what changes at once, and what needs a restart by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.config.config import load, read_again
from kakeya.core.errors import ConfigError

START = (
    '[models]\nserve = ["kakeya-tiny"]\nrows = 8\n[models.kakeya-tiny]\nsize_mb = 300\n'
    '[models.agent]\npath = "kakeya-tiny-tools"\nthinking = "on"\n'
    '[tasks.t]\ncandidates = ["agent"]\n'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(START)
    return path


def test_a_file_that_did_not_change_needs_no_restart(file: Path) -> None:
    config = load(["--config", str(file)], {})
    live = read_again(config)
    assert (live.tasks, live.profiles) == (config.tasks, config.profiles)
    assert live.manifests == {one.model_id: one.manifest for one in config.models}
    assert live.needs_restart == ()


def test_what_is_live_changes_and_the_rest_is_named(file: Path) -> None:
    config = load(["--config", str(file), "--ttl", "50"], {"KAKEYA_FANOUT": "2"})
    file.write_text(
        '[models]\nserve = ["kakeya-tiny"]\nrows = 4\n'
        "[models.kakeya-tiny]\nsize_mb = 400\npin = true\ntemperature = 0.5\n"
        '[models.agent]\npath = "kakeya-tiny-draft"\ncategory = "vision"\noptions = {}\n'
        '[models.third]\npath = "kakeya-tiny"\n'
        '[profiles.p]\nclients = ["c"]\nmodel = "u"\n[tasks.u]\ncandidates = ["kakeya-tiny"]\n'
        "[memory]\nbudget_mb = 2000\n[fleet]\nttl = 70\nfanout = 5\n"
    )
    live = read_again(config)
    assert list(live.tasks) == ["u"]
    assert list(live.profiles) == ["p"]
    assert live.manifests["kakeya-tiny"].describe() == {
        "size_mb": 300,
        "pin": True,
        "temperature": 0.5,
    }
    assert live.manifests["agent"].describe() == {}
    assert sorted(live.needs_restart) == [
        "memory.budget_mb",
        "models.agent.category",
        "models.agent.path",
        "models.kakeya-tiny.size_mb",
        "models.rows",
        "models.third.path",
    ]
    file.write_text(START)
    assert read_again(config).needs_restart == ()


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (START + "[models.agent.options]\nslots = [1]\n", "models.agent.options: slots is [1]"),
        (START + "[models.agnt]\npin = true\n", "models.agnt has no path"),
        (START + "[fleet]\nttl = 5\n", "fleet.ttl: 5 is out of range"),
        (
            '[models]\nserve = ["kakeya-tiny-draft"]\n'
            '[tasks.t]\ncandidates = ["kakeya-tiny-draft"]',
            "kakeya-tiny-draft is none of the models",
        ),
    ],
)
def test_a_fault_anywhere_is_refused(file: Path, toml: str, words: str) -> None:
    config = load(["--config", str(file)], {})
    file.write_text(toml)
    with pytest.raises(ConfigError) as refused:
        read_again(config)
    assert words in refused.value.message
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_again(config)
    with pytest.raises(ConfigError, match="without --config"):
        read_again(load([], {}))
