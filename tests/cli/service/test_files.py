"""The files of a service, read by the programs that will read them."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.cli.service.files import (
    LABEL,
    ServiceKind,
    ServicePlan,
    ServiceUser,
    plan_service,
    why_ended,
)
from kakeya.config.config import load

ALICE = ServiceUser(name="alice", uid=501, gid=20, home=Path("/Users/alice Ä"))
KINDS = pytest.mark.parametrize("kind", list(ServiceKind))
ODD = ("--label", 'a "mini" $HOME %n \\', "--http", "0.0.0.0:8210")


def plan(
    kind: ServiceKind, platform: str, systemd: int = 252, user: ServiceUser = ALICE
) -> ServicePlan:
    return plan_service(
        kind,
        user,
        python="/opt/kakeya venv/bin/python",
        flags=ODD,
        folder=user.home / "data",
        platform=platform,
        systemd=systemd,
    )


@KINDS
def test_launchd_starts_the_node_again_with_paths_of_its_user(kind: ServiceKind) -> None:
    made = plan(kind, "darwin")
    found = plistlib.loads(made.content)
    assert (found["KeepAlive"], found["RunAtLoad"], found["Label"]) == (True, True, LABEL)
    assert found["ThrottleInterval"] > 10
    assert "/opt/homebrew/bin" in found["EnvironmentVariables"]["PATH"]
    assert found["EnvironmentVariables"]["KAKEYA_SERVICE"] == kind.value
    assert found["StandardErrorPath"] == "/Users/alice Ä/Library/Logs/kakeya/launchd.log"
    assert ("UserName" in found) is (kind is ServiceKind.SYSTEM) is made.needs_root
    if kind is ServiceKind.SYSTEM:
        assert made.file == Path("/Library/LaunchDaemons/dev.kakeya.node.plist")
        assert made.load == (("/bin/launchctl", "bootstrap", "system", str(made.file)),)
    else:
        assert made.unload == (("/bin/launchctl", "bootout", "gui/501/dev.kakeya.node"),)
        assert "logged in at the screen" in made.condition


@KINDS
def test_the_node_understands_its_arguments(kind: ServiceKind) -> None:
    python, *arguments = plistlib.loads(plan(kind, "darwin").content)["ProgramArguments"]
    assert (python, *arguments[:2]) == (
        "/opt/kakeya venv/bin/python",
        "-m",
        "kakeya.node.daemon",
    )
    config = load(arguments[2:], {})
    assert config.log_file == Path("/Users/alice Ä/Library/Logs/kakeya/node.log")
    assert config.label == ODD[1]


@KINDS
@pytest.mark.parametrize("systemd", [252, 254])
def test_a_unit_says_what_systemd_needs(kind: ServiceKind, systemd: int) -> None:
    made = plan(kind, "linux", systemd)
    lines = made.content.decode().splitlines()
    assert ("User=alice" in lines) is (kind is ServiceKind.SYSTEM)
    own_shm = "TemporaryFileSystem=/dev/shm:mode=1777,size=50%"
    assert (own_shm in lines) is (kind is ServiceKind.SYSTEM), "a logout would empty the system's"
    assert "Restart=always" in lines
    assert ("RestartMaxDelaySec=60" in lines) is (systemd == 254)
    assert 'Environment="HOME=/Users/alice Ä"' in lines
    odd = replace(ALICE, home=Path("/home/$alice"))
    (home,) = (
        line
        for line in plan(kind, "linux", user=odd).content.decode().splitlines()
        if line.startswith('Environment="HOME')
    )
    assert home == 'Environment="HOME=/home/$alice"', "$ is one of commands alone"
    (command,) = (line for line in lines if line.startswith("ExecStart="))
    assert r'"a \"mini\" $$HOME %%n \\"' in command
    assert made.links[0].name == made.file.name
    assert [line for line in lines if not line] == ["", ""]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
@KINDS
def test_systemd_finds_no_fault_in_a_unit(kind: ServiceKind, tmp_path: Path) -> None:
    me = ServiceUser(name="root", uid=os.getuid(), gid=os.getgid(), home=tmp_path)
    said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True)
    made = plan_service(
        kind,
        me,
        python=sys.executable,
        flags=ODD,
        folder=tmp_path / "data",
        platform="linux",
        systemd=int(said.stdout.split()[1]),
    )
    unit = tmp_path / made.file.name
    unit.write_bytes(made.content)
    manager = "--system" if kind is ServiceKind.SYSTEM else "--user"
    checked = subprocess.run(
        ["systemd-analyze", manager, "--man=no", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert "kakeya" not in checked.stderr + checked.stdout
    assert checked.returncode == 0, checked.stderr


def systemd_says(active: str, sub: str, restarts: int, result: str, status: int) -> str:
    return (
        f"NRestarts={restarts}\nResult={result}\nExecMainStatus={status}\nMainPID=0\n"
        f"ActiveState={active}\nSubState={sub}\n"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (systemd_says("active", "running", 3, "success", 0), ""),
        (systemd_says("activating", "start", 3, "success", 0), ""),
        (
            systemd_says("activating", "auto-restart", 3, "exit-code", 1),
            "Result exit-code, ExecMainStatus 1",
        ),
        (systemd_says("active", "running", 4, "success", 0), "Result success, ExecMainStatus 0"),
        (systemd_says("failed", "failed", 3, "signal", 9), "Result signal, ExecMainStatus 9"),
        ("Failed to connect to bus", ""),
    ],
)
def test_systemd_tells_that_a_node_ended_since_its_start(said: str, why: str) -> None:
    at_start = systemd_says("active", "running", 3, "success", 0)  # by restarts of before
    assert why_ended(at_start, said) == (f"the node ended, says its service: {why}" if why else "")


def test_launchd_tells_that_a_node_ended_since_its_start() -> None:
    said = "system/dev.kakeya.node = {{\n\tstate = {}\n\truns = {}\n\tlast exit code = {}\n}}\n"
    at_start = said.format("running", 1, "(never exited)")
    assert why_ended(at_start, at_start) == ""
    ended = said.format("spawn scheduled", 1, "1")
    assert why_ended(at_start, ended) == "the node ended, says its service: last exit code 1"
    killed = at_start.replace(
        "last exit code = (never exited)", "last terminating signal = Killed: 9"
    )
    assert why_ended(at_start, killed).endswith("last terminating signal Killed: 9")


@pytest.mark.parametrize(
    ("said", "is_over"),
    [
        (systemd_says("activating", "auto-restart", 3, "success", 0), False),
        (systemd_says("active", "running", 4, "success", 0), False),
        (systemd_says("activating", "auto-restart", 4, "exit-code", 2), True),
        (systemd_says("active", "running", 5, "exit-code", 2), True),
        (systemd_says("failed", "failed", 4, "exit-code", 2), True),
        ("\tstate = running\n\truns = 8\n\tlast exit code = 0\n", False),
        ("\tstate = running\n\truns = 9\n\tlast exit code = 2\n", True),
    ],
)
def test_one_end_is_what_a_restart_asked_for(said: str, is_over: bool) -> None:
    at_start = systemd_says("active", "running", 3, "success", 0)
    if "runs" in said:
        at_start = "\tstate = running\n\truns = 7\n\tlast exit code = (never exited)\n"
    assert bool(why_ended(at_start, said, ends=1)) is is_over
