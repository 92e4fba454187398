"""Collectors on this machine: real files, ports and children."""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kakeya.core.programs import Output, run_program
from kakeya.doctor.machine import Machine, listen_fault
from kakeya.doctor.machine_checks import SELF_TEST
from kakeya.doctor.report import Finding, Severity
from tests.doctor.small_nodes import GOOD_TEST, no_program
from tests.doctor.test_machine_checks import MINI_AS_DELIVERED

NO_LIMIT_S = 1000.0
"""A test that is late ends before."""


def find(lines: Sequence[Finding], what: str) -> Finding:
    return next(line for line in lines if line.what == what)


async def test_the_self_test_passes_in_a_child_and_mlx_stays_out_of_this_process(
    tmp_path: Path,
) -> None:
    lines = await Machine(tmp_path, environ={}).examine()
    mlx = find(lines, "mlx")
    assert mlx.level is Severity.OK or "busy" in mlx.detail, mlx
    assert find(lines, "ring").level is Severity.OK
    assert find(lines, "disk").level is not Severity.FAULT
    code = "import sys, kakeya.doctor.examiner, kakeya.cli.doctor; "
    check = await run_program(
        (sys.executable, "-c", code + "assert 'mlx.core' not in sys.modules"), NO_LIMIT_S
    )
    assert check is not None
    assert check.status == 0, check.stderr


async def test_a_folder_that_others_can_read_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    machine = Machine(folder, environ={}, run=no_program)
    assert "no node ran" in find(await machine.examine(), "files").detail
    folder.mkdir(mode=0o700)
    (folder / "identity").mkdir(mode=0o700)
    assert find(await machine.examine(), "files").level is Severity.OK
    folder.chmod(0o755)
    assert find(await machine.examine(), "files").level is Severity.WARNING
    (folder / "identity" / "ca-key.pem").touch(mode=0o644)
    line = find(await machine.examine(), "files")
    assert line.level is Severity.FAULT
    assert "ca-key.pem" in line.detail
    assert line.command == f"chmod -R go-rwx {folder}"
    # The command mends it.
    await run_program(line.command.split(), 5)
    assert find(await machine.examine(), "files").level is Severity.OK


async def test_a_mac_is_asked_for_its_power_settings() -> None:
    asked: list[Sequence[str]] = []

    async def run(command: Sequence[str], limit_s: float) -> Output | None:
        asked.append(command)
        text = MINI_AS_DELIVERED if command[0] == "/usr/bin/pmset" else GOOD_TEST
        return Output(status=0, stdout=text, stderr="")

    mac = Machine(Path("/nowhere"), environ={}, platform="darwin", run=run)
    lines = await mac.examine()
    assert ("/usr/bin/pmset", "-g") in asked
    assert find(lines, "sleep").level is Severity.WARNING
    assert find(lines, "blas").detail == "Accelerate"
    assert await mac.pings("10.0.0.5")
    assert asked[-1] == ("/sbin/ping", "-t", "1", "-c", "1", "10.0.0.5")
    linux = await Machine(Path("/nowhere"), environ={}, platform="linux", run=run).examine()
    assert "sleep" not in {line.what for line in linux}


async def test_a_ring_is_read_from_the_nodes_environment(tmp_path: Path) -> None:
    lines = await Machine(tmp_path, environ={"MLX_RANK": "zero"}, run=no_program).examine()
    assert find(lines, "ring").level is Severity.WARNING


async def test_a_program_does_not_outlive_its_limit(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    code = 'echo $$ >"$0"; exec sleep 60'
    output = await run_program(("sh", "-c", code, str(pid_file)), 2.0)
    assert time.monotonic() - started < 50
    assert output is not None
    assert output.status is None
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists() or sys.platform != "linux"


async def test_a_program_that_is_missing_or_fails() -> None:
    assert await run_program(("no-such-program-here",), 1) is None
    output = await run_program((sys.executable, "-c", "raise SystemExit(3)"), NO_LIMIT_S)
    assert output == Output(status=3, stdout="", stderr="")


def test_a_port_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listen_fault(f"127.0.0.1:{port}") == errno.EADDRINUSE
    assert listen_fault(f"127.0.0.1:{port}") == 0
    assert listen_fault("203.0.113.77:50051") == errno.EADDRNOTAVAIL
    assert listen_fault("nonsense") == errno.EINVAL


def test_the_model_of_the_self_test_is_shipped() -> None:
    assert (Path(SELF_TEST[-1]) / "config.json").is_file()
