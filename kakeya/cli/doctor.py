"""`kakeya doctor [PEER]`: the running node examines; without one, this command does what it can.

Exit status: 0 without a fault (warnings are possible), 1 with one, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kakeya.cli.show.labels import NodeLabels
from kakeya.cli.show.tables import stdout_console
from kakeya.config.config import SETTINGS
from kakeya.core import units
from kakeya.core.clock import SystemClock
from kakeya.core.errors import DeadlineExceeded, PeerProtocol, PeerUnavailable
from kakeya.core.settings import Illegal, peer_address
from kakeya.doctor.dials import Dialler
from kakeya.doctor.machine import Machine, listen_fault
from kakeya.doctor.machine_checks import check_port, check_proxy
from kakeya.doctor.report import (
    Examination,
    Finding,
    Severity,
    decode_report,
    fault,
    shell,
    warning,
)
from kakeya.doctor.targets import Target, find_targets
from kakeya.doctor.way_checks import Here, check_way
from kakeya.fleet.paths.binding import DEFAULT_PORT
from kakeya.node.control import control_socket
from kakeya.node.datadir import find_running
from kakeya.wire.server.config import ListenConfig

_NODE_S = 11.0
"""The limit for the node's examination, which ends earlier by itself."""
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.FAULT: "bold red"}


def run(options: argparse.Namespace, folder: Path) -> int:
    """Examine, show, and return the exit status.

    `folder` is the data directory. Raises NotFound or InvalidArgument for a PEER that names no
    node.
    """
    with _progress(quiet=options.json or not sys.stderr.isatty()):
        report = examine(options.peer, folder, os.environ)
    if options.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        show_report(report, stdout_console())
    return 1 if report.level is Severity.FAULT else 0


def examine(peer: str, folder: Path, environ: Mapping[str, str]) -> Examination:
    """Let the running node examine; examine alone if none runs or it does not answer."""
    running = find_running(folder)
    if running is None:
        return asyncio.run(examine_alone(peer, folder, environ))
    try:
        report = ask_node(peer, f"unix:{control_socket(folder)}")
    except (PeerUnavailable, DeadlineExceeded, PeerProtocol) as problem:
        detail = f"the node with pid {running.pid} does not examine: {problem.message}"
        line = fault("node", detail, shell("kill", str(running.pid)))
        return asyncio.run(examine_alone(_address_in(peer), folder, environ, line))
    # Clients start from this shell; the environment of the node may be another one.
    proxy = check_proxy(environ)
    if proxy is None or proxy in report.lines:
        return report
    return replace(report, lines=(*report.lines, proxy))


def ask_node(peer: str, address: str) -> Examination:
    """Let the node that answers at a control address examine. Raises its KakeyaError."""
    # Imported here: without a node the command skips the import of gRPC, which takes long.
    import grpc

    from kakeya.v1.fleet_pb2 import ExamineRequest
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub
    from kakeya.wire.channels import sync_channel
    from kakeya.wire.status import error_from_rpc

    with sync_channel(address) as channel:
        try:
            answer = ControlServiceStub(channel).Examine(ExamineRequest(peer=peer), timeout=_NODE_S)
        except grpc.RpcError as failure:
            raise error_from_rpc(failure, "the node") from failure
    return decode_report(answer.report)


async def examine_alone(
    peer: str, folder: Path, environ: Mapping[str, str], node: Finding | None = None
) -> Examination:
    """Examine this machine and the plain connection to an address, without the help of a node.

    `node` is the finding about a running node; None = none runs, so that its ports should be free.
    Raises PeerUnavailable for a PEER that only a running node could know.
    """
    started = time.monotonic()
    machine = Machine(folder, environ=environ)
    if peer and not _address_in(peer):
        raise PeerUnavailable(
            f"no node runs in {folder}, and only a running node can find {peer!r}; start it "
            "with kakeya-node, or give HOST:PORT"
        )
    target = find_targets(peer, ())[0] if peer else None
    found, way = await asyncio.gather(machine.examine(), _look_at(target, machine))
    lines = [*found, *way]
    if node is not None:
        lines.append(node)
    else:
        lines += _check_ports(environ)
        detail = f"none runs in {folder}; only a running node can ask its peers"
        command = "kakeya-node"
        killed = await asyncio.to_thread(find_running, folder, or_killed=True)
        if killed is not None and killed.service:
            detail += "; it was killed, and its service starts it again within 30 s"
            command = f"kakeya service status --as {killed.service}"
        lines.append(warning("node", detail, command))
    return Examination(node="", lines=tuple(lines), seconds=time.monotonic() - started)


def _address_in(peer: str) -> str:
    """Return the peer if it is an address, which can be dialled without a node; else ""."""
    try:
        return peer_address(peer)
    except Illegal:
        return ""


async def _look_at(target: Target | None, machine: Machine) -> tuple[Finding, ...]:
    if target is None:
        return ()
    way = target.ways[0]
    clock = SystemClock()
    dial = await Dialler(clock).connect(way.address)
    here = Here(platform=machine.platform, python=machine.python)
    return (check_way(way, dial, target.peer, here, now=clock.wall(), others_work=False),)


def _check_ports(environ: Mapping[str, str]) -> list[Finding]:
    bind, http = SETTINGS["listen.bind"], SETTINGS["listen.http"]
    wanted = (
        (bind.flag, environ.get(bind.variable) or f"127.0.0.1:{DEFAULT_PORT}"),
        (http.flag, environ.get(http.variable) or ListenConfig().http),
    )
    return [check_port(flag, address, listen_fault(address)) for flag, address in wanted]


# --- shown


def show_report(report: Examination, console: Console) -> None:
    """Print the findings of this node, then of each peer, then the commands that mend them."""
    peers = dict.fromkeys(line.peer for line in report.lines)
    for peer in sorted(peers, key=bool):
        title = printable(peer) if peer else printable(report.node) or "this machine"
        console.print(Text(title, style="bold"))
        console.print(_table([line for line in report.lines if line.peer == peer]))
    for (command, on), lines in _mends(report).items():
        subjects = ", ".join(dict.fromkeys(line.what for line in lines))
        heading = f"\nto mend {printable(subjects)}" + (f" (on {printable(on)})" if on else "")
        worst = lines[0].level
        console.print(Text(heading + ":", style=_STYLES[worst]), soft_wrap=True)
        # As one line, so that it can be copied in a terminal of any width.
        console.print(Text(f"    {printable(command)}"), soft_wrap=True)
    console.print(Text(f"\n{_verdict(report)}, in {report.seconds:.1f} s"))


def _mends(report: Examination) -> dict[tuple[str, str], list[Finding]]:
    """List each command once with the findings that it mends; commands for faults come first."""
    bad = [line for line in report.lines if line.level is not Severity.OK]
    mends: dict[tuple[str, str], list[Finding]] = {}
    for line in sorted(bad, key=lambda line: line.level is not Severity.FAULT):
        mends.setdefault((line.command, line.on), []).append(line)
    return mends


def _verdict(report: Examination) -> str:
    counts = Counter(line.level for line in report.lines)
    parts = [
        f"{counts[level]} {level.value}{'s' if counts[level] > 1 else ''}"
        for level in (Severity.FAULT, Severity.WARNING)
        if counts[level]
    ]
    return " and ".join(parts) or "all is well"


def _table(lines: list[Finding]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=32)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(
            Text(line.level.value, style=_STYLES[line.level]),
            Text(printable(line.what)),
            Text(printable(line.detail)),
        )
    return table


def printable(text: str) -> str:
    """Replace control characters of a terminal, since peers choose labels and errors, and shorten
    ids made from keys: the start of one names a node, too."""
    return NodeLabels().within(units.printable(text))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[None]:
    """Show progress on stderr, by the time that an examination usually takes."""
    if quiet:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(f"examining; at most {_NODE_S:g} s", total=None)
        yield
