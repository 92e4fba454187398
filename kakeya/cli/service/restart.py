"""`kakeya restart`: drain a node, and start it again as it was started, or have its service do so.

A node that was started by hand is replaced: the new one takes the HTTP port from the old one, so
that no client is refused. A service starts the node again by itself once it has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.service.command import Service, service_of
from kakeya.cli.service.drain import MOST_PATIENCE_S, PATIENCE_S, ctrl_c_told, drain
from kakeya.cli.service.start import check_start, start_again, until_left, until_ready
from kakeya.core.errors import InvalidArgument, KakeyaError, PeerUnavailable
from kakeya.node.datadir import RunInfo, find_running

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_TEXT = "drain the node, and start it again as it was started, or by its service"


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    restart = commands.add_parser("restart", help=_TEXT, description=_TEXT, allow_abbrev=False)
    restart.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="for requests that run (default: %(default)g)",
    )
    add_data_dir(restart)
    restart.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other. Raises KakeyaError."""
    if options.command != "restart":
        return None
    if not 0 < options.patience <= MOST_PATIENCE_S:
        raise InvalidArgument(f"--patience is {options.patience:g}; above 0 is needed")
    folder = data_dir_of(options)
    old = find_running(folder)
    if old is None:
        raise PeerUnavailable(f"no node runs in {folder}; start one with kakeya-node")
    with ctrl_c_told("the node leaves already, and starts again; wait"):
        new = restart(folder, old, options.patience)
    if options.json:
        print(json.dumps({"pid": new.pid, "http": new.http, "log_file": new.log_file}))
    else:
        log = f", its log is in {new.log_file}" if new.log_file else ""
        print(f"the node runs again: pid {new.pid}, http {new.http}{log}")
    return 0


def restart(folder: Path, old: RunInfo, patience_s: float) -> RunInfo:
    """Restart the node of a folder, and return its new run. Raises KakeyaError."""
    check_start(old)
    if service := service_of(folder, old.service):
        service.look()
        drain(folder, patience_s, until_replaced=False, tell=_tell)
        return until_ready(folder, old.pid, partial(_why_ended, service))
    failed: list[KakeyaError] = []

    def replaced() -> None:
        try:
            drain(folder, patience_s, until_replaced=True, tell=_tell)
        except KakeyaError as problem:
            failed.append(problem)

    draining = threading.Thread(target=replaced, daemon=True)
    draining.start()
    until_left(folder, lambda: bool(failed))
    if failed:
        raise failed[0]
    new = until_ready(folder, old.pid, started=start_again(old, folder))
    draining.join(patience_s)
    return new


def _why_ended(service: Service) -> str:
    ended = service.why_ended(ends=1)  # the first one was asked for
    return "; ".join([ended, *service.last_lines(1)]) if ended else ""


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
