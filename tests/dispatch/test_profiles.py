"""Tables [profiles.NAME]: read, shown, and refused where they fit no client or name no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.config.config import NodeConfig, load
from kakeya.core.errors import ConfigError

TASK = '[tasks.titles]\ncandidates = ["kakeya-tiny"]\n'


def loaded(folder: Path, toml: str) -> NodeConfig:
    file = folder / "node.toml"
    file.write_text(toml)
    return load(["--config", str(file)], {})


def test_profiles_are_read_and_shown(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        TASK + '[profiles.coder]\nagents = ["claude-cli/"]\nmodel = "titles"\n'
        'priority = "high"\nthinking = "off"\n[profiles.ci]\nclients = ["build"]\n',
    )
    assert {name: one.describe() for name, one in config.profiles.items()} == {
        "coder": {
            "clients": [],
            "agents": ["claude-cli/"],
            "model": "titles",
            "embedder": None,
            "priority": "high",
            "thinking": "off",
            "resumable": True,
        },
        "ci": {
            "clients": ["build"],
            "agents": [],
            "model": None,
            "embedder": None,
            "priority": None,
            "thinking": None,
            "resumable": True,
        },
    }
    with_adapter = '[profiles.a]\nclients = ["b"]\nmodel = "kakeya-tiny:style"'
    assert loaded(tmp_path, with_adapter).profiles["a"].model == "kakeya-tiny:style"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[profiles.a]", ["[profiles.a] is of no client", "give clients or agents"]),
        ('[profiles.a]\nclient = ["b"]', ["profiles.a.client;", "mean profiles.a.clients?"]),
        (
            '[profiles.a]\nclients = ["b"]\n[profiles.c]\nclients = ["b"]',
            ["[profiles.c]: b stands in [profiles.a] too"],
        ),
        (
            TASK + '[profiles.a]\nclients = ["b"]\nmodel = "tittles"',
            ["[profiles.a]: tittles is none", "kakeya-tiny, titles", "mean titles?"],
        ),
        ('[profiles.a]\nclients = ["b"]\npriority = "hi"', ["profiles.a.priority", "urgent"]),
        ("profiles = 3", ["profiles is no table"]),
    ],
)
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, toml: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, toml)
    for word in words:
        assert word in refused.value.message
