"""`kakeya update`: a clone with an upstream, and a node that serves the new version or does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kakeya.cli.service import update as update_module
from kakeya.cli.service.command import program
from kakeya.cli.service.update import NodeKeeper, git_source, pip_source, update
from kakeya.core.errors import ConfigError
from kakeya.node.datadir import DataDir, RunInfo


def git(place: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    said = subprocess.run(
        ["git", *who, "-C", str(place), *words], capture_output=True, text=True, check=True
    )
    return said.stdout.strip()


def commit(place: Path, text: str) -> str:
    (place / "file").write_text(text)
    git(place, "add", "file")
    git(place, "commit", "--quiet", "-m", text)
    return git(place, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    origin = tmp_path / "origin"
    subprocess.run(["git", "init", "--quiet", "-b", "main", str(origin)], check=True)
    commit(origin, "one")
    subprocess.run(["git", "clone", "--quiet", str(origin), str(tmp_path / "clone")], check=True)
    return tmp_path / "clone"


class Node(NodeKeeper):
    """A node that serves no version of `bad`."""

    def __init__(self, place: Path, bad: str = "") -> None:
        super().__init__(place)
        self.file = place / "file"
        self.bad = bad
        self.done: list[str] = []

    def stop(self) -> None:
        self.done.append("stop")

    def start(self) -> None:
        text = self.file.read_text()
        self.done.append(f"start {text}")
        if text == "slow":
            raise KeyboardInterrupt
        if text == self.bad:
            raise ConfigError("it ended at once")

    def end(self) -> None:
        self.done.append("end")


def without_pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if "pip" in command:
        return subprocess.CompletedProcess(command, 0, "", "")
    return program(command)


def test_a_clone_follows_its_upstream(clone: Path, tmp_path: Path) -> None:
    node, source = Node(clone), git_source(clone, program)
    assert update(source, node, without_pip, "").endswith("that is the newest version")
    assert node.done == []
    new = commit(tmp_path / "origin", "two")
    assert (
        update(source, node, without_pip, "") == f"updated from {source.version[:12]} to {new[:12]}"
    )
    assert node.done == ["stop", "start two"]
    assert git_source(clone, program).version == new


def test_a_version_that_does_not_serve_is_taken_back(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "origin", "two")
    node, source = Node(clone, bad="two"), git_source(clone, program)
    with pytest.raises(ConfigError, match=r"not updated: it ended at once; \w{12} runs again"):
        update(source, node, without_pip, "")
    assert node.done == ["stop", "start two", "end", "start one"]
    assert git_source(clone, program).version == source.version


def test_ctrl_c_brings_the_version_of_before_back(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "origin", "slow")
    node, source = Node(clone), git_source(clone, program)
    with pytest.raises(ConfigError, match="not updated: Ctrl-C"):
        update(source, node, without_pip, "")
    assert node.done == ["stop", "start slow", "end", "start one"]


def test_ctrl_c_while_the_node_drains_starts_it_again_as_it_was(clone, tmp_path, capsys) -> None:
    class Draining(Node):
        def stop(self) -> None:
            super().stop()
            os.kill(os.getpid(), signal.SIGINT)

    commit(tmp_path / "origin", "two")
    node, source = Draining(clone), git_source(clone, program)
    with pytest.raises(ConfigError, match=r"not updated: Ctrl-C; \w{12} runs again"):
        update(source, node, without_pip, "")
    assert node.done == ["stop", "start one"]
    assert "the node drains already" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Keeper:
    """launchd: it refuses to stop what it does not know."""

    def __init__(self) -> None:
        self.is_loaded = True

    def stop(self) -> None:
        if not self.is_loaded:
            raise ConfigError("Boot-out failed: 3: No such process")
        self.is_loaded = False

    def start(self) -> None:
        self.is_loaded = True


def test_a_service_that_was_not_started_yet_is_not_stopped_twice(tmp_path, monkeypatch) -> None:
    keeper = Keeper()
    monkeypatch.setattr(update_module, "service_of", lambda folder, kind: keeper)
    monkeypatch.setattr(update_module, "drain", lambda *_, **__: None)
    monkeypatch.setattr(update_module, "until_ready", lambda *_: None)
    monkeypatch.setattr(update_module, "until_healthy", lambda _: None)
    with DataDir(tmp_path) as home:
        home.write_run(RunInfo(pid=7, node_id="n", grpc="a:1", http="a:2", log_file="l"))
        node = NodeKeeper(tmp_path)
    node.stop()
    node.end()
    node.start()
    assert keeper.is_loaded
    node.end()
    assert not keeper.is_loaded


def test_changes_of_the_owner_are_left_alone(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "origin", "two")
    (clone / "file").write_text("mine")
    node = Node(clone)
    with pytest.raises(ConfigError, match=r"has changes of its own \(M file\)"):
        update(git_source(clone, program), node, without_pip, "")
    assert (node.done, (clone / "file").read_text()) == ([], "mine")


def test_a_package_is_brought_by_pip_and_taken_back_by_its_version(tmp_path: Path) -> None:
    asked: list[str] = []

    def pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        wanted = command[6:8] if "--upgrade" in command else command[6:7]
        if is_look := "--dry-run" in command:
            assert command[-2:] == ("--report", "-")
        asked.append(" ".join(("look", *wanted) if is_look else wanted))
        version = {"kakeya==9": "9", "kakeya==0.1.0": "0.1.0"}.get(wanted[-1], "0.2.0")
        if version == "9" and is_look == fails_at_look:
            return subprocess.CompletedProcess(command, 1, "", "No matching distribution")
        found = [{"metadata": {"version": version}}] * (version != "0.1.0")
        return subprocess.CompletedProcess(command, 0, json.dumps({"install": found}), "")

    (tmp_path / "file").write_text("one")
    source, node, fails_at_look = pip_source("0.1.0", pip), Node(tmp_path), True
    assert update(source, node, pip, "") == "updated from 0.1.0 to 0.2.0"
    node.done.clear()
    with pytest.raises(ConfigError, match="No matching distribution"):
        update(source, node, pip, "9")
    assert update(source, node, pip, "0.1.0").endswith("that is the version asked for")
    assert not node.done
    fails_at_look = False
    with pytest.raises(ConfigError, match=r"No matching distribution; 0\.1\.0 runs again"):
        update(source, node, pip, "9")
    assert asked == [
        *("look --upgrade kakeya", "--upgrade kakeya"),
        *("look kakeya==9", "look kakeya==0.1.0"),
        *("look kakeya==9", "kakeya==9", "kakeya==0.1.0"),
    ]


def test_a_commit_that_does_not_exist_drains_no_node(clone: Path) -> None:
    node = Node(clone)
    with pytest.raises(ConfigError, match="rev-parse"):
        update(git_source(clone, program), node, without_pip, "0123abc")
    assert not node.done
