"""`kakeya lease run`: wait for memory, then become the command.

The same process goes on as the command, so that signals, the terminal and the exit status are the
command's own, and no process stands between that could be killed alone. A guard process
(`memory/leases/guard.py`) ends the lease when the last of the command's processes has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from kakeya.cli.show.labels import NodeLabels
from kakeya.core.errors import ConfigError, InvalidArgument, KakeyaError
from kakeya.core.units import MIB, format_bytes
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.leases.desk import LeaseDesk, open_desk
from kakeya.memory.leases.guard import start_guard
from kakeya.memory.leases.lease import ProcessLease, Wish, in_order
from kakeya.memory.leases.processes import MARK
from kakeya.node.datadir import make_folder

LATER, CANNOT_RUN, NOT_FOUND = 75, 126, 127


def run(folder: Path, options: argparse.Namespace) -> int:
    """Become the command; returns an exit status only if that failed. Raises ConfigError."""
    command = options.leased[1:] if options.leased[:1] == ["--"] else options.leased
    if not command:
        raise ConfigError("lease run: no command; kakeya lease run --mb N -- COMMAND ...")
    wish = _wish(options, command[0])
    wait_s = seconds(options.wait)
    if shutil.which(command[0]) is None:
        return _cannot_run(command[0])
    make_folder(folder)
    desk = open_desk(folder, os.environ, wait_s=wait_s)
    try:
        lease = asyncio.run(_acquire(desk, wish, wait_s))
    except _Stopped as stopped:
        return 128 + stopped.number
    except KakeyaError as refused:
        print(f"kakeya: {refused.message}", file=sys.stderr)
        return LATER if _may_come_later(refused) else 1
    return _become(command, {**os.environ, MARK: lease.lease_id})


class _Stopped(Exception):
    """A signal came while the command waited for its memory."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


async def _acquire(desk: LeaseDesk, wish: Wish, wait_s: float) -> ProcessLease:
    """Wait for the memory, show the reason of the wait, and start the guard of the lease."""
    task = asyncio.ensure_future(_wait(desk, wish, wait_s))
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if caught:
            raise _Stopped(caught[0]) from None
        raise


async def _wait(desk: LeaseDesk, wish: Wish, wait_s: float) -> ProcessLease:
    began_mono = time.monotonic()
    progress = WaitProgress()
    async with desk:
        try:
            lease = await desk.acquire(wish, wait_s=wait_s, tell=progress.waits_for)
        finally:
            progress.end()
        waited_s = time.monotonic() - began_mono
        if progress.was_shown:
            size = format_bytes(wish.size_bytes)
            print(f"kakeya: {size} after {waited_s:.0f} s", file=sys.stderr)
        try:
            await asyncio.to_thread(start_guard, lease, desk.folder, desk.url)
        except BaseException:
            await asyncio.shield(desk.release(lease.lease_id))
            raise
        return lease


class WaitProgress:
    """The reason of a wait, on stderr: on a terminal one line that changes, else a line each."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self.was_shown = False

    def waits_for(self, what: str) -> None:
        """Show a reason."""
        self.was_shown = True
        text = f"kakeya: waiting for {NodeLabels().within(what)}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line on a terminal."""
        if self.was_shown and self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, with the signal handling that this process got."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these signals, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as problem:
        reason = problem.strerror or problem
        print(f"kakeya: {command[0]} cannot be run: {reason}", file=sys.stderr, flush=True)
        # The guard sees the end of this process, and gives the lease back.
        os._exit(NOT_FOUND if isinstance(problem, FileNotFoundError) else CANNOT_RUN)


def _cannot_run(name: str) -> int:
    is_there = os.sep in name and Path(name).exists()
    reason = "this file may not be run as a program" if is_there else "there is no such command"
    print(f"kakeya: {name} cannot be run: {reason}", file=sys.stderr)
    return CANNOT_RUN if is_there else NOT_FOUND


def _may_come_later(refused: KakeyaError) -> bool:
    return (
        refused.code == "deadline_exceeded"
        or refused.retry_after_s is not None
        or (refused.code in ("lease_refused", "store_failed"))
    )


def _wish(options: argparse.Namespace, command: str) -> Wish:
    if not (options.mb.isascii() and options.mb.isdecimal()) or len(options.mb) > 12:
        raise ConfigError(f"--mb {options.mb[:40]}: a whole number of MB is needed, like 4000")
    known = [one.name.lower() for one in RequestPriority]
    if options.priority not in known:
        raise ConfigError(
            f"--priority {options.priority[:40]}: one of {', '.join(known)} is needed"
        )
    try:
        return Wish(
            name=options.name or Path(command).name[:64],
            size_bytes=int(options.mb) * MIB,
            priority=RequestPriority[options.priority.upper()],
            resources=tuple(in_order(options.resource)),
        )
    except InvalidArgument as wrong:
        raise ConfigError(f"lease run: {wrong.message}") from wrong


def seconds(text: str) -> float:
    """Parse the value of `--wait`; "" = for ever. Raises ConfigError."""
    if not text:
        return float("inf")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ConfigError(f"--wait {text[:40]}: a number of seconds is needed, 0 or more")
