"""`kakeya service` on a machine of which the keeper alone is a stand-in."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kakeya.cli.main import main
from kakeya.cli.service import command as command_module
from kakeya.cli.service.command import Service, find_user, systemd_version
from kakeya.cli.service.files import ServiceKind, ServicePlan, ServiceUser, plan_service
from kakeya.core.errors import ConfigError, Conflict
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


def test_a_node_that_no_service_keeps_is_not_taken_over(plan, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    with DataDir(folder), pytest.raises(Conflict, match="stop it with kakeya drain"):
        Service(plan, folder, Keeper(folder)).install()
    assert not plan.file.exists()


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
