"""Commands of leases: run a command with leased memory, list, drain, clean up.

    kakeya lease run --mb 4000 -- python train.py

waits until the machine has the memory, then *becomes* the command: the process stays the same, so
that signals, the terminal and the exit status are the command's own. The lease lasts until the
last of the command's processes has ended, in whatever way.

Exit status of `run`: the command's. Before it starts: 2 for a wrong command line, 75 if the lease
may be granted later, 1 if never, 126 and 127 if the command cannot be run, as in a shell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.core.errors import ConfigError
from kakeya.core.units import format_bytes
from kakeya.node.datadir import make_folder

if TYPE_CHECKING:  # not needed for `kakeya status` to answer
    from kakeya.memory.leases.lease import Book, ProcessLease

PRIORITIES = "urgent|high|normal|low|batch"
_WATCH_S = 0.5
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `lease` to the commands of `kakeya`."""
    text = "memory for other programs: run one with a lease, list, drain, clean up"
    lease = commands.add_parser("lease", help=text, description=text, allow_abbrev=False)
    actions = lease.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser(
        "run",
        help="run a command as soon as its memory is free",
        description="Wait for memory, then run the command in place of this one.",
        usage="kakeya lease run --mb N [options] -- COMMAND ...",
        allow_abbrev=False,
    )
    run.add_argument("--mb", required=True, metavar="N", help="how much memory, in MB")
    run.add_argument("--priority", default="normal", metavar=PRIORITIES, help="(normal)")
    run.add_argument(
        "--name", default="", metavar="TEXT", help="readable name (default: the command)"
    )
    run.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME",
        help="lease this device too, like gpu:0; any number of times",
    )
    run.add_argument("--wait", default="", metavar="S", help="give up after S seconds (never)")
    run.add_argument("leased", nargs=argparse.REMAINDER, metavar="COMMAND")
    shown = actions.add_parser(
        "list", help="jobs that hold memory, and jobs that wait", allow_abbrev=False
    )
    shown.add_argument("--json", action="store_true", help="print JSON")
    drain = actions.add_parser(
        "drain", help="give no new leases, wait until none is held", allow_abbrev=False
    )
    drain.add_argument("--stop", action="store_true", help="tell the holders to end (SIGTERM)")
    drain.add_argument("--off", action="store_true", help="give leases again")
    drain.add_argument("--wait", default="", metavar="S", help="give up after S seconds (never)")
    clean = actions.add_parser(
        "cleanup", help="remove leases of processes that have ended", allow_abbrev=False
    )
    clean.add_argument("--json", action="store_true", help="print JSON")
    for action in (run, shown, drain, clean):
        add_data_dir(action)


def run(options: argparse.Namespace) -> int:
    """Run one of these commands and return its exit status. Raises KakeyaError."""
    folder = data_dir_of(options)
    match options.action:
        case "run":
            from kakeya.cli.leases import run as lease_run

            return lease_run.run(folder, options)
        case "list":
            return asyncio.run(_list(folder, as_json=options.json))
        case "drain":
            return _drain(folder, options)
        case _:
            return asyncio.run(_cleanup(folder, as_json=options.json))


# List.


async def _list(folder: Path, *, as_json: bool) -> int:
    from kakeya.memory.leases.desk import open_desk
    from kakeya.memory.leases.lease import Book

    if not folder.is_dir():  # noqa: ASYNC240 - one look, by a command that does nothing else
        return _show(Book(), [], as_json=as_json)
    async with open_desk(folder, os.environ) as desk:
        seen = await desk.look()
    return _show(seen.book, [seen.shown(one) for one in seen.leases], as_json=as_json)


def _show(book: Book, leases: list[dict[str, object]], *, as_json: bool) -> int:
    granter = book.granter.node_id if book.granter else None
    if as_json:
        facts = {
            "granter": granter,
            "budget_bytes": book.budget_bytes,
            "is_drained": book.drain is not None,
            "leases": leases,
        }
        print(json.dumps(facts))
        return 0
    from kakeya.cli.leases.tables import show_leases

    show_leases(leases, granter=granter, is_drained=book.drain is not None)
    return 0


# Drain, clean up.


def _drain(folder: Path, options: argparse.Namespace) -> int:
    from kakeya.cli.leases.run import seconds

    wait_s = seconds(options.wait)
    if options.off and options.stop:
        raise ConfigError("lease drain: --off gives leases again, --stop ends them; choose one")
    make_folder(folder)
    try:
        return asyncio.run(_drained(folder, options, wait_s))
    except KeyboardInterrupt:
        print(
            "\nkakeya: no longer waiting; still no leases are given until "
            "`kakeya lease drain --off`",
            file=sys.stderr,
        )
        return 130


async def _drained(folder: Path, options: argparse.Namespace, wait_s: float) -> int:
    from kakeya.cli.leases.run import WaitProgress
    from kakeya.memory.leases.desk import open_desk
    from kakeya.memory.leases.rules import named

    async with open_desk(folder, os.environ) as desk:
        if options.off:
            await desk.end_drain()
            print("leases are given again")
            return 0
        await desk.begin_drain()
        if options.stop:
            for lease in await desk.stop_holders():
                print(f"told {named(lease)} to end", file=sys.stderr)
        progress, until_mono, told = WaitProgress(), time.monotonic() + wait_s, ""
        while held := (await desk.look()).granted:
            text = f"{', '.join(map(named, held))} to end"
            if text != told:
                told = text
                progress.waits_for(text)
            if time.monotonic() >= until_mono:
                progress.end()
                print(f"kakeya: still held after {wait_s:g} s: {told}", file=sys.stderr)
                return 1
            await asyncio.sleep(_WATCH_S)
        progress.end()
        print("no leases are held, and none is given until `kakeya lease drain --off`")
        return 0


async def _cleanup(folder: Path, *, as_json: bool) -> int:
    from kakeya.memory.leases.desk import open_desk
    from kakeya.memory.leases.rules import named

    dead: tuple[ProcessLease, ...] = ()
    if folder.is_dir():  # noqa: ASYNC240 - one look, by a command that does nothing else
        async with open_desk(folder, os.environ) as desk:
            dead = await desk.clean_up()
    if as_json:
        print(json.dumps({"removed": [one.lease_id for one in dead]}))
        return 0
    for lease in dead:
        size = format_bytes(lease.wish.size_bytes)
        print(f"removed {lease.lease_id}: {named(lease)} is gone, {size} {lease.state}")
    if not dead:
        print("nothing to remove: all holders live")
    return 0
