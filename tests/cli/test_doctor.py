"""The command: alone, with a node on a real control socket, with one that does not answer."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path

import grpc.aio
import pytest
from rich.console import Console

from kakeya.cli.doctor import ask_node, examine, examine_alone, printable, show_report
from kakeya.core.errors import KakeyaError, PeerUnavailable
from kakeya.doctor.examiner import Examiner
from kakeya.doctor.report import Examination, Severity, fault, ok, warning
from kakeya.node.datadir import LOCK, RUN, RunInfo
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server
from kakeya.wire.status import abort
from tests.doctor.small_nodes import closed_port, small_node

FREE = {"KAKEYA_BIND": "127.0.0.1:0", "KAKEYA_HTTP": "127.0.0.1:0"}


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kakeya.cli.main",
        "doctor",
        "--data-dir",
        str(folder),
        *arguments,
    ]
    environ = os.environ | FREE
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environ
    )


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """A data directory as a running node holds it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run = {"pid": 4711, "node_id": "one", "grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}
    (folder / RUN).write_text(json.dumps(run))
    try:
        yield
    finally:
        os.close(lock)


class _Control(ControlServiceServicer):
    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner

    async def Examine(
        self,
        request: pb.ExamineRequest,
        context: grpc.aio.ServicerContext[pb.ExamineRequest, pb.ExamineResponse],
    ) -> pb.ExamineResponse:
        try:
            return pb.ExamineResponse(report=await self._examiner.examine_json(request.peer))
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise


@asynccontextmanager
async def controlled(folder: Path, examiner: Examiner) -> AsyncIterator[None]:
    server = grpc.aio.server()
    add_ControlServiceServicer_to_server(_Control(examiner), server)
    server.add_insecure_port(f"unix:{folder / 'control.sock'}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def test_alone_it_looks_at_the_machine_and_says_what_needs_a_node(short_path: Path) -> None:
    report = await examine_alone("", short_path / "none", FREE)
    whats = {line.what for line in report.lines}
    assert {"disk", "files", "mlx", "ring", "networks", "node"} <= whats
    assert sum(line.what.startswith("port ") for line in report.lines) == 2
    node = next(line for line in report.lines if line.what == "node")
    assert (node.level, node.command) == (Severity.WARNING, "kakeya-node")


async def test_alone_it_finds_a_port_that_is_taken_and_dials_an_address(short_path: Path) -> None:
    killed = RunInfo(pid=7, node_id="n", grpc="127.0.0.1:1", http="127.0.0.1:2", service="user")
    (short_path / RUN).write_text(json.dumps(asdict(killed)))
    with socket.create_server(("127.0.0.1", 0)) as taken, closed_port() as closed:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        report = await examine_alone(closed, short_path, FREE | {"KAKEYA_BIND": bind})
    lines = {line.what: line for line in report.lines}
    assert lines[f"port {bind}"].level is Severity.FAULT
    assert "refuses port" in lines[f"reach {closed}"].detail
    assert lines["node"].command == "kakeya service status --as user"
    with pytest.raises(PeerUnavailable, match="only a running node can find 'some label'"):
        await examine_alone("some label", short_path, FREE)


def test_the_command_alone_exits_by_the_worst_line(short_path: Path) -> None:
    fine = doctor(short_path, "--json")
    assert fine.returncode == 0, fine.stdout + fine.stderr
    assert json.loads(fine.stdout)["level"] == "warning"
    with closed_port() as closed:
        bad = doctor(short_path, closed)
    assert bad.returncode == 1
    assert f"to mend reach {closed} (on {closed}):\n    kakeya-node\n" in bad.stdout
    assert re.search(r"1 fault and \d warning", bad.stdout)


async def test_the_running_node_examines(short_path: Path) -> None:
    folder = short_path / "data"
    async with small_node(folder, "one") as one, small_node(short_path, "two") as two:
        one.meet(two)
        two.meet(one)
        with held_folder(folder):
            async with controlled(folder, one.examiner()):
                done = await _in_thread(folder, "--json")
                wrong = await _in_thread(folder, "tow")
                shell = {"http_proxy": "http://proxy:3128"}
                behind_proxy = await asyncio.to_thread(examine, "", folder, shell)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["node"], report["level"]) == ("one", "ok")
    assert {line["peer"] for line in report["lines"]} == {"", "two"}
    assert wrong.returncode == 1
    assert [line.what for line in behind_proxy.lines if "http_proxy" in line.detail] == ["proxy"]
    assert "no live node is called 'tow'; did you mean two?" in wrong.stderr


async def _in_thread(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(doctor, folder, *arguments)


def test_a_node_that_does_not_answer_is_a_fault_and_the_machine_is_looked_at(
    short_path: Path,
) -> None:
    folder = short_path / "data"
    with held_folder(folder):
        started = time.monotonic()
        done = doctor(folder, "some label", "--json")
    assert time.monotonic() - started < 100
    assert done.returncode == 1
    lines = {line["what"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["node"]["level"] == "fault"
    assert lines["node"]["command"] == "kill 4711"
    assert "mlx" in lines
    assert not any(what.startswith("port ") for what in lines)


def test_a_silent_control_socket_ends_in_time(short_path: Path) -> None:
    path = short_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        started = time.monotonic()
        with pytest.raises(KakeyaError):
            ask_node("", f"unix:{path}")
    assert time.monotonic() - started < 60


# --- shown


def shown(report: Examination, width: int = 70) -> str:
    text = io.StringIO()
    show_report(report, Console(file=text, width=width, no_color=True))
    return text.getvalue()


LONG = "sudo " + "x" * 200


def test_a_table_then_the_commands_in_one_piece_faults_first() -> None:
    lines = (
        ok("disk", "fine"),
        warning("sleep", "it sleeps", "sudo pmset -a sleep 0"),
        fault("reach 10.0.0.5:1", "refused", LONG, on="mini", peer="mini"),
    )
    text = shown(Examination(node="one", lines=lines, seconds=1.25))
    assert LONG in text
    assert text.index("to mend reach 10.0.0.5:1 (on mini):") < text.index("to mend sleep:")
    assert text.rstrip().endswith("1 fault and 1 warning, in 1.2 s")
    assert "all is well" in shown(Examination(node="one", lines=lines[:1], seconds=1))
    faults = Examination(node="one", lines=(lines[2], lines[2]), seconds=1)
    text = shown(faults)
    assert "2 faults, in" in text
    assert text.count(LONG) == 1


def test_a_hostile_label_neither_drives_the_terminal_nor_is_markup() -> None:
    evil = "\x1b[2J[bold]x[/bold]\r\n[/]"
    text = shown(
        Examination(node=evil, lines=(fault(evil, evil, evil, on=evil, peer=evil),), seconds=1)
    )
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[bold]x[/bold]" in text
    assert printable("a\u202eb\x07") == "a?b?"
