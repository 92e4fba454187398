"""`kakeya service` on a machine of which the keeper alone is a stand-in."""

from __future__ import annotations

import argparse
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.cli.main import main
from kakeya.cli.service import command as command_module
from kakeya.cli.service.command import (
    Service,
    absolute,
    find_user,
    folder_behind_sudo,
    program_as_owner,
    systemd_version,
)
from kakeya.cli.service.files import ServiceKind, ServicePlan, ServiceUser, plan_service
from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.folders import default_folder
from kakeya.node.datadir import DataDir, RunInfo


class Keeper:
    """systemd: it starts a node when a unit is enabled, unless it `refuses`."""

    def __init__(self, folder: Path, *, refuses: str = "") -> None:
        self.folder = folder
        self.refuses = refuses
        self.asked: list[str] = []
        self.home: DataDir | None = None

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(" ".join(command))
        if "enable" in command:
            if self.refuses:
                return subprocess.CompletedProcess(command, 1, "", self.refuses)
            self.home = DataDir(self.folder)
            self.home.write_run(
                RunInfo(pid=7, node_id="n", grpc="a:1", http="a:2", log_file="l", service="user")
            )
        if "disable" in command and self.home is not None:
            self.home.close()
            self.home = None
        return subprocess.CompletedProcess(command, 0, "ActiveState=active\nOther=1\n", "")


@pytest.fixture
def plan(tmp_path: Path) -> ServicePlan:
    me = pwd.getpwuid(os.getuid())
    user = ServiceUser(name=me.pw_name, uid=me.pw_uid, gid=me.pw_gid, home=tmp_path / "home")
    return plan_service(
        ServiceKind.USER,
        user,
        python="/usr/bin/python3",
        flags=(),
        folder=tmp_path / "home" / "data",
        platform="linux",
    )


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_what_is_installed_is_seen_and_goes_without_a_trace(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    keeper = Keeper(folder)
    service = Service(plan, folder, keeper)
    assert service.status()["is_installed"] is False
    assert "nothing is installed" in str(service.uninstall()["says"])
    assert keeper.asked == []
    done = service.install()
    assert done["pid"] == 7
    assert "enable-linger" in str(done["says"])
    assert plan.file.read_bytes() == plan.content
    (plan.logs / "node.log").write_text("a line\n")
    seen = service.status()
    assert seen["system"] == ["ActiveState=active"]
    assert str(plan.links[0]) in str(seen["says"])
    before = keeper.home
    again = Service(plan, folder, keeper)
    assert before is not None
    assert "says" in again.uninstall()
    assert keeper.asked[-2:] == [
        "systemctl --user disable --now kakeya.service",
        "systemctl --user daemon-reload",
    ]
    assert [one for one in files(tmp_path) if not one.startswith("home/data/node.")] == []
    assert not (tmp_path / "home" / ".config" / "systemd").exists()


def test_an_installation_that_fails_leaves_nothing(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    keeper = Keeper(folder, refuses="Failed to connect to bus")
    with pytest.raises(ConfigError, match=r"enable --now kakeya\.service: Failed to connect"):
        Service(plan, folder, keeper).install()
    assert files(tmp_path) == []


def test_a_new_installation_that_fails_brings_the_service_of_before_back(plan, tmp_path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    keeper = Keeper(folder)
    Service(plan, folder, keeper).install()
    (plan.logs / "node.log").write_text("a line\n")

    def refuses_the_other(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        is_other = "enable" in command and plan.file.read_bytes() != plan.content
        keeper.refuses = "the port is taken" if is_other else ""
        return keeper(command)

    other = replace(plan, content=plan.content + b"# other flags\n")
    with pytest.raises(ConfigError, match="the port is taken; a line; the service of before is"):
        Service(other, folder, refuses_the_other).install()
    assert plan.file.read_bytes() == plan.content
    assert keeper.home is not None
    assert (plan.logs / "node.log").exists()


def test_files_that_are_not_of_the_node_stay(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    service = Service(plan, folder, Keeper(folder))
    service.install()
    for name in ("node.log", "node.log.1", "of-the-owner.txt"):
        (plan.logs / name).write_text("x")
    service.uninstall()
    assert [one.name for one in plan.logs.iterdir()] == ["of-the-owner.txt"]
    (plan.logs / "node.log").write_text("of another node")
    plan.file.parent.mkdir(parents=True)
    plan.file.write_text("ExecStart=kakeya-node --log-file /elsewhere/logs/node.log")
    service.uninstall()
    assert (plan.logs / "node.log").exists()


def test_paths_are_whole_since_the_service_starts_in_another_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    given = ["--config", "kakeya.toml", "--http-cert=a=b.pem", "--model=models/", "--model"]
    given += ["big=models/:verifier", "--proposer", "org/name", "--http", "127.0.0.1:0", "--config"]
    assert absolute(given) == [
        *("--config", f"{tmp_path}/kakeya.toml", f"--http-cert={tmp_path}/a=b.pem"),
        *(f"--model={tmp_path}/models", "--model", f"big={tmp_path}/models:verifier"),
        *("--proposer", "org/name", "--http", "127.0.0.1:0", "--config"),
    ]


def test_sudo_means_the_data_and_the_rights_of_its_caller(tmp_path, monkeypatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", me.pw_name)
    monkeypatch.setenv("HOME", "/root/elsewhere")
    found = folder_behind_sudo(argparse.Namespace(data_dir=""))
    assert found == default_folder({}, platform=sys.platform, home=Path(me.pw_dir))
    given = argparse.Namespace(data_dir=str(tmp_path))
    assert folder_behind_sudo(given) == tmp_path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_programs_run_as_the_owner_of_the_folder(tmp_path: Path) -> None:
    assert program_as_owner(tmp_path)(("id", "-u")).stdout == "0\n"
    nobody = pwd.getpwnam("nobody")
    os.chown(tmp_path, nobody.pw_uid, nobody.pw_gid)
    as_owner = program_as_owner(tmp_path)
    assert as_owner(("id", "-u")).stdout == f"{nobody.pw_uid}\n"
    assert as_owner(("sh", "-c", "echo $HOME")).stdout == f"{nobody.pw_dir}\n"


def test_a_node_that_no_service_keeps_is_not_taken_over(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    with DataDir(folder), pytest.raises(Conflict, match="stop it with kakeya drain"):
        Service(plan, folder, Keeper(folder)).install()
    assert not plan.file.exists()


def test_a_node_of_the_other_kind_of_service_is_told(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    Service(plan, folder, Keeper(folder)).install()
    of_system = replace(plan, kind=ServiceKind.SYSTEM, file=tmp_path / "kakeya.service")
    other = Service(of_system, folder, Keeper(folder))
    assert "--as user" in str(other.status()["says"])
    assert "--as user" in str(other.uninstall()["says"])
    if os.geteuid() == 0:
        with pytest.raises(Conflict, match="kakeya service uninstall --as user"):
            other.install()


def test_a_dry_run_lists_every_file_and_touches_none(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command_module, "program", Keeper(tmp_path))
    arguments = ["service", "install", "--dry-run", "--data-dir", str(tmp_path)]
    assert main([*arguments, "--as", "user", "--", "--model", "kakeya-tiny"]) == 0
    shown = capsys.readouterr().out
    assert "kakeya.service" in shown or "dev.kakeya.node.plist" in shown
    assert "needs no root" in shown
    assert "kakeya-tiny" in shown
    me = pwd.getpwuid(os.getuid()).pw_name
    assert main([*arguments, "--json", "--user", me]) == 0
    assert '"needs_root": true' in capsys.readouterr().out
    assert files(tmp_path) == []


def test_flags_that_the_node_would_refuse_are_refused_before(tmp_path, capsys) -> None:
    arguments = ["service", "install", "--as", "user", "--data-dir", str(tmp_path)]
    assert main([*arguments, "--", "--modl", "x"]) == 2
    assert "unknown argument --modl; did you mean --model?" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_the_user_of_a_service_is_the_caller_also_behind_sudo() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    assert find_user("", {"SUDO_USER": me}, 0).name == me
    assert find_user(me, {}, 0).home == Path(pwd.getpwnam(me).pw_dir)
    with pytest.raises(ConfigError, match="--user NAME"):
        find_user("", {}, 0)
    with pytest.raises(ConfigError, match="no user 'nobody-at-all'"):
        find_user("nobody-at-all", {}, 0)


@pytest.mark.parametrize(
    ("said", "version"), [("systemd 252 (252.38-1)\n+PAM", 252), ("no such thing", 0)]
)
def test_the_version_of_systemd_is_read(said: str, version: int, monkeypatch) -> None:
    monkeypatch.setattr(command_module.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert systemd_version(lambda _: subprocess.CompletedProcess([], 0, said, "")) == version
