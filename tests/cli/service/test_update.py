"""`kakeya update`: a clone with an upstream, and a node that serves the new version or does not."""

from __future__ import annotations

import io
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

from kakeya.cli.service import start as start_module
from kakeya.cli.service import update as update_module
from kakeya.cli.service.command import Service, program
from kakeya.cli.service.files import ServiceKind, ServiceUser, plan_service
from kakeya.cli.service.update import (
    NodeKeeper,
    git_source,
    pack_installed,
    pip_source,
    until_healthy,
    update,
)
from kakeya.core.errors import ConfigError
from kakeya.node.datadir import DataDir, RunInfo
from tests.cli.service import test_command

OLD = "kakeya-0.1.0-py3-none-any.whl"


def git(place: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    said = subprocess.run(
        ["git", *who, "-C", str(place), *words], capture_output=True, text=True, check=True
    )
    return said.stdout.strip()


def commit(place: Path, text: str, *, needs: str = "") -> str:
    """A version of a text, that needs packages of its own, or those that are `needs`."""
    (place / "file").write_text(text)
    (place / "pyproject.toml").write_text(needs or text)
    git(place, "add", "file", "pyproject.toml")
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


@pytest.mark.parametrize("bad", ["", "two"])
def test_a_terminal_that_closes_ends_no_update(clone, tmp_path, monkeypatch, bad: str) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    def pip_hears_it_too(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "pip" in command:
            return program(("sh", "-c", "kill -HUP $$"))
        return program(command)

    commit(tmp_path / "origin", "two")
    node, source = Node(clone, bad), git_source(clone, program)
    before = signal.getsignal(signal.SIGHUP)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Closed())
        if bad:
            with pytest.raises(ConfigError, match="runs again"):
                update(source, node, pip_hears_it_too, "")
        else:
            update(source, node, pip_hears_it_too, "")
    assert node.done == (
        ["stop", "start two", "end", "start one"] if bad else ["stop", "start two"]
    )
    assert signal.getsignal(signal.SIGHUP) is before


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

    def why_ended(self) -> str:
        return ""


def test_a_service_that_was_not_started_yet_is_not_stopped_twice(tmp_path, monkeypatch) -> None:
    keeper = Keeper()
    monkeypatch.setattr(update_module, "service_of", lambda folder, kind: keeper)
    monkeypatch.setattr(update_module, "drain", lambda *_, **__: None)
    monkeypatch.setattr(update_module, "until_ready", lambda *_: None)
    monkeypatch.setattr(update_module, "until_healthy", lambda *_: None)
    with DataDir(tmp_path) as home:
        home.write_run(RunInfo(pid=7, node_id="n", grpc="a:1", http="a:2", log_file="l"))
        node = NodeKeeper(tmp_path)
    node.stop()
    node.end()
    node.start()
    assert keeper.is_loaded
    node.end()
    assert not keeper.is_loaded


class Systemd(test_command.Keeper):
    """systemd: a node of a version other than `one` ends at once, and is started again."""

    def __init__(self, clone: Path, folder: Path) -> None:
        super().__init__(folder)
        self.file = clone / "file"
        self.ended_before: list[bool] = []
        """Of each stop: whether the node had ended by itself."""

    def end(self) -> None:
        """A drained node ends, somewhat later."""
        assert self.home is not None
        home, self.home = self.home, None
        threading.Timer(0.2, home.close).start()

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        said = "ActiveState=active\nSubState=running\nNRestarts=2\nResult=success\n"
        if "disable" in command:
            self.ended_before.append(self.home is None)
        is_bad = self.file.read_text() != "one"
        if not (is_bad and "enable" in command):
            super().__call__(command)
        if "show" in command and is_bad:
            said = "ActiveState=activating\nSubState=auto-restart\nResult=exit-code\n"
        if "journalctl" in command:
            assert "--lines=5" in command
            said = "Traceback\nImportError: no such name\n"
        return subprocess.CompletedProcess(command, 0, said, "")


def test_a_version_that_its_service_starts_again_and_again_is_noticed_soon(
    clone: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    me = pwd.getpwuid(os.getuid())
    user = ServiceUser(name=me.pw_name, uid=me.pw_uid, gid=me.pw_gid, home=tmp_path)
    folder = tmp_path / "data"
    plan = plan_service(
        ServiceKind.USER, user, python="python3", flags=(), folder=folder, platform="linux"
    )
    plan.logs.mkdir(parents=True)
    (plan.logs / "node.log").write_text("a line of the log\n")
    systemd = Systemd(clone, folder)
    service = Service(plan, folder, systemd)
    monkeypatch.setattr(update_module, "service_of", lambda folder, kind: service)
    monkeypatch.setattr(update_module, "drain", lambda *_, **__: systemd.end())
    monkeypatch.setattr(update_module, "until_healthy", lambda *_: None)
    monkeypatch.setattr(start_module, "_ASK_S", 0.0)
    service.start()
    commit(tmp_path / "origin", "two")
    why = "the node ended, says its service: Result exit-code"
    with pytest.raises(ConfigError, match=rf"not updated: {why}; \w{{12}} runs again"):
        update(git_source(clone, program), NodeKeeper(folder), without_pip, "")
    assert (
        f"does not serve: {why}\n  Traceback\n  ImportError: no such name\n  a line of the log\n"
        in capsys.readouterr().err
    )
    assert systemd.ended_before == [True, True]
    assert systemd.home is not None
    systemd.home.close()


def test_a_node_that_ends_while_its_models_load_is_not_waited_for(tmp_path: Path) -> None:
    run = RunInfo(pid=7, node_id="n", grpc="127.0.0.1:1", http="127.0.0.1:1", log_file="")
    with pytest.raises(ConfigError, match="was ready, and ended"):
        until_healthy(run, tmp_path)
    with DataDir(tmp_path) as home:
        home.write_run(replace(run, pid=8))  # its service started another one
        with pytest.raises(ConfigError, match="was ready, and ended"):
            until_healthy(run, tmp_path)


def offline(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A machine whose pip reaches no index."""
    if "pip" not in command:
        return program(command)
    said = "  ERROR: No matching distribution found for hatchling\n\nnote: not pip's fault\n"
    return subprocess.CompletedProcess(command, 1, "", said)


def test_a_version_that_needs_no_other_packages_asks_no_index(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "origin", "two", needs="one")
    node, source = Node(clone), git_source(clone, program)
    assert update(source, node, offline, "").startswith("updated from")
    assert node.done == ["stop", "start two"]


def test_the_node_runs_again_also_where_pip_fails_on_the_way_back(
    clone: Path, tmp_path: Path
) -> None:
    commit(tmp_path / "origin", "two")
    node, source = Node(clone), git_source(clone, program)
    why = "ERROR: No matching distribution found for hatchling"
    with pytest.raises(
        ConfigError, match=rf"not updated: .*{why}; nor gone back .*; what is there"
    ):
        update(source, node, offline, "")
    assert node.done == ["stop", "end", "start one"]
    assert git_source(clone, program).version == source.version


def test_changes_of_the_owner_are_left_alone(clone: Path, tmp_path: Path) -> None:
    commit(tmp_path / "origin", "two")
    (clone / "file").write_text("mine")
    node = Node(clone)
    with pytest.raises(ConfigError, match=r"has changes of its own \(M file\)"):
        update(git_source(clone, program), node, without_pip, "")
    assert (node.done, (clone / "file").read_text()) == ([], "mine")


def installed(site: Path) -> metadata.Distribution:
    info = site / "kakeya-0.1.0.dist-info"
    (site / "kakeya").mkdir(parents=True)
    (site / "kakeya" / "__init__.py").write_text("")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kakeya\nVersion: 0.1.0\n")
    files = ["kakeya/__init__.py", "../bin/kakeya", "kakeya/__pycache__/__init__.pyc"]
    files += [f"{info.name}/{name}" for name in ("METADATA", "RECORD", "INSTALLER")]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return metadata.Distribution.at(info)


def test_an_installed_package_is_packed_into_a_wheel_again(tmp_path: Path) -> None:
    with ZipFile(pack_installed(installed(tmp_path / "site"), tmp_path)) as wheel:
        names = wheel.namelist()
        record = wheel.read("kakeya-0.1.0.dist-info/RECORD").decode()
    info = "kakeya-0.1.0.dist-info"
    assert names == ["kakeya/__init__.py", f"{info}/METADATA", f"{info}/RECORD"]
    assert [line.split(",")[0] for line in record.splitlines()] == names


def test_a_package_that_came_from_a_file_is_asked_of_no_index(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    found, node = installed(tmp_path / "site"), Node(tmp_path / "place")
    noted = {"url": f"file:///wheels%20here/{OLD}", "archive_info": {}}
    (tmp_path / "site" / "kakeya-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(noted))
    for to in ("", "0.2.0"):
        with pytest.raises(ConfigError, match=rf"installed from /wheels here/{OLD}, .* with --to"):
            update(pip_source(found, without_pip), node, without_pip, to)
    assert not node.done


def test_a_package_that_cannot_be_kept_is_not_updated(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    found, node = installed(tmp_path / "site"), Node(tmp_path / "place")
    (tmp_path / "site" / "kakeya" / "__init__.py").unlink()
    report = json.dumps({"install": [{"metadata": {"version": "0.2.0"}}]})

    def pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert "--dry-run" in command
        return subprocess.CompletedProcess(command, 0, report, "")

    with pytest.raises(ConfigError, match="cannot be kept"):
        update(pip_source(found, pip), node, pip, "")
    assert not node.done


def test_a_package_is_brought_by_pip_and_taken_back_as_it_was(tmp_path: Path) -> None:
    asked: list[str] = []

    def pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        (wanted,) = (Path(one).name for one in command[6:] if not one.startswith("-"))
        assert ("--upgrade" in command) == (wanted == "kakeya")
        if is_look := "--dry-run" in command:
            assert command[-2:] == ("--report", "-")
        asked.append(f"look {wanted}" if is_look else wanted)
        version = {"kakeya==9": "9", "kakeya==0.1.0": "0.1.0", OLD: "0.1.0"}.get(wanted, "0.2.0")
        if version == "9" and is_look == fails_at_look:
            return subprocess.CompletedProcess(command, 1, "", "No matching distribution")
        found = [{"metadata": {"version": version}}]
        if version == "0.1.0" and "--force-reinstall" not in command:
            found = []
        return subprocess.CompletedProcess(command, 0, json.dumps({"install": found}), "")

    (tmp_path / "file").write_text("one")
    source = pip_source(installed(tmp_path / "site"), pip)
    node, fails_at_look = Node(tmp_path), True
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
        *("look kakeya", "kakeya"),
        *("look kakeya==9", "look kakeya==0.1.0"),
        *("look kakeya==9", "kakeya==9", "kakeya==0.1.0"),
    ]
    asked.clear()
    assert update(source, node, pip, f"dist/{OLD}") == "updated from 0.1.0 to 0.1.0, again"
    assert asked == [f"look {OLD}", OLD, OLD]


def test_a_commit_that_does_not_exist_drains_no_node(clone: Path) -> None:
    node = Node(clone)
    with pytest.raises(ConfigError, match="rev-parse"):
        update(git_source(clone, program), node, without_pip, "0123abc")
    assert not node.done
