"""Start a node again as it was started before, without a terminal, and wait until it serves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kakeya.config.config import load
from kakeya.core.errors import ConfigError, KakeyaError, PeerUnavailable
from kakeya.node.datadir import RunInfo, find_running, is_held, is_left

READY_S = 120.0
LOG, OUTPUT = "node.log", "node.out"
"""In the data directory: the log of a node that had none but its terminal, and what comes before
the log."""
_LOOK_S, _ASK_S = 0.1, 1.0
_TAIL_CHARS = 1500


def check_start(run: RunInfo) -> None:
    """Raise ConfigError where a node would refuse to start as before, or it is not known how."""
    if not run.python:
        raise ConfigError("this node does not tell how it was started; stop it, and start it again")
    own = {} if run.service else os.environ  # a service has nothing of this terminal
    try:
        with contextlib.chdir(_folder_of(run)):
            load(run.argv, {**own, **run.environ})
    except KakeyaError as wrong:
        raise ConfigError(f"the node would not start again: {wrong.message}") from wrong


def start_again(run: RunInfo, folder: Path) -> subprocess.Popen[bytes]:
    """Start a node as before; it logs to a file of its folder if its log was on a terminal."""
    flags = () if run.log_file else ("--log-file", str(folder / LOG))
    command = (run.python, "-m", "kakeya.node.daemon", *run.argv, *flags)
    with (folder / OUTPUT).open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=_folder_of(run),
            env={**os.environ, **run.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def until_ready(
    folder: Path,
    old_pid: int,
    why_ended: Callable[[], str] = str,
    *,
    started: subprocess.Popen[bytes] | None = None,
) -> RunInfo:
    """Wait for another node in a folder than that of `old_pid`, and return its run.

    Raises PeerUnavailable where none comes, `started` ends, or `why_ended` of its service says more
    than "".
    """
    now_mono = time.monotonic()
    ends_mono, asks_mono = now_mono + READY_S, now_mono + _ASK_S
    while (now_mono := time.monotonic()) < ends_mono:
        run = find_running(folder)
        if run is not None and run.pid != old_pid:
            if started is not None:
                started.returncode = 0  # it goes on without this process, which says so to Popen
            return run
        if started is not None and started.poll() is not None:
            raise PeerUnavailable(f"the node did not start: {_said(folder)}")
        if now_mono >= asks_mono:
            asks_mono = now_mono + _ASK_S
            if reason := why_ended():
                raise PeerUnavailable(reason)
        time.sleep(_LOOK_S)
    raise PeerUnavailable(f"no node serves in {folder} after {READY_S:g} s; see kakeya logs")


def until_left(folder: Path, give_up: Callable[[], bool]) -> None:
    """Wait until a node leaves its folder to another, or is gone, or `give_up`."""
    while is_held(folder) and not is_left(folder) and not give_up():
        time.sleep(_LOOK_S)


def _folder_of(run: RunInfo) -> str:
    """The folder in which relative paths of a run begin, if it is still there."""
    return run.folder if os.access(run.folder, os.R_OK | os.X_OK) else os.curdir


def _said(folder: Path) -> str:
    try:
        text = (folder / OUTPUT).read_text("utf-8", "replace")
    except OSError:
        text = ""
    lines = [line for line in text[-_TAIL_CHARS:].splitlines() if line.strip()]
    return lines[-1] if lines else f"it said nothing; see {folder / OUTPUT}"
