"""The tables of backends: read, checked, and tasks over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.backends.registry import GROUP, LostSettings
from kakeya.config.config import NodeConfig, load, read_again
from kakeya.core.errors import ConfigError

WEST = '[clouds.west]\nurl = "https://api.example.com/v1/"\nkey_env = "WEST_KEY"\n'
ECHO = '[commands.echo]\nargv = ["cat", "-u", "-u", ""]\n'
TASK = "[tasks.t]\ncandidates = {}\n"


@pytest.fixture
def read(tmp_path: Path):
    def reading(text: str) -> NodeConfig:
        file = tmp_path / "node.toml"
        file.write_text(text)
        return load(["--config", str(file)], {})

    return reading


def test_tables_are_read_and_describe_themselves_without_secrets(read, monkeypatch):
    monkeypatch.setenv("WEST_KEY", "sk-very-secret")
    config = read(WEST + ECHO)
    west, echo = config.backends["clouds"]["west"], config.backends["commands"]["echo"]
    assert west.describe() == {
        "url": "https://api.example.com/v1",
        "key_env": "WEST_KEY",
        "key_file": None,
        "models": [],
        "timeout_s": 120.0,
        "shared": False,
    }
    assert echo.argv == ("cat", "-u", "-u", "")
    told = {"program": "cat", "timeout_s": 120.0, "at_once": 4, "shared": False}
    assert echo.describe() == told
    shared = read(WEST + "shared = true\n" + ECHO + "shared = true\n").backends
    assert shared["clouds"]["west"].shared_ids("west") == ("cloud:west/*",)
    assert shared["commands"]["echo"].shared_ids("echo") == ("echo",)
    assert "sk-very-secret" not in repr(config)
    assert load([], {}).backends == {}


def test_tasks_may_name_what_the_tables_reach(read):
    config = read(WEST + ECHO + TASK.format('["kakeya-tiny", "cloud:west/big", "echo"]'))
    assert config.tasks["t"].names == ("kakeya-tiny", "cloud:west/big", "echo")
    profile = '[profiles.p]\nclients = ["a"]\nmodel = "cloud:west/big"\n'
    config = read(WEST + profile)
    assert config.profiles["p"].model == "cloud:west/big"
    read(WEST.replace("v1", "v2") + ECHO + profile)
    assert read_again(config).needs_restart == ("clouds.west", "commands.echo")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[clouds.west]\n", r"\[clouds.west\]: url is missing"),
        ('[clouds.west]\nurl = "api.example.com"\n', "clouds.west.url: .* is no URL"),
        ('[clouds.west]\nurl = "https://u:p@a/v1"\n', "a URL has no user"),
        (WEST + 'key_file = "k"\n', "give one of them"),
        ('[clouds.west]\nurl = "http://a"\nkey_env = "sk-se-cret"\n', "not the key$"),
        (WEST + "timeout = 3\n", r"unknown key clouds.west.timeout; did you mean"),
        (WEST.replace("west", '"we/st"'), "letters, digits"),
        ("[commands.echo]\n", "argv is missing"),
        ('[commands.echo]\nargv = "cat"\n', "no command line"),
        (ECHO.replace("echo", "kakeya-tiny"), "another model is called kakeya-tiny"),
        (ECHO + TASK.replace("tasks.t", "tasks.echo").format('["echo"]'), "a model has this name"),
        (TASK.format('["cloud:west/big"]'), "cannot be served, as this node reaches no cloud"),
        (WEST + TASK.format('["cloud:east/big"]'), "with NAME one of west"),
        (WEST + 'models = ["a"]\n' + TASK.format('["cloud:west/b"]'), "may be asked for"),
        ("clouds = 3\n", "clouds is no table"),
        ("[cloud.west]\n", "unknown key cloud.west; did you mean clouds"),
    ],
)
def test_a_wrong_table_is_refused_with_a_sentence(read, text, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read(text)
    assert "sk-se-cret" not in refused.value.message


def test_a_package_that_is_lost_stops_no_node(read, tmp_path, monkeypatch):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmoons = no_such_module:Settings\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = read("[moons.io]\nany = 1\n" + TASK.format('["moon:io/m", "kakeya-tiny"]'))
    (lost,) = config.backends["moons"].values()
    assert isinstance(lost, LostSettings)
    assert "no_such_module" in lost.reason
