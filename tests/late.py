"""A test that is late fails alone, with the stacks of all threads and tasks, and the run goes on.

    first alarm      the stacks are taken, and the task that the loop runs is cancelled, so that
                     `finally` and `async with` of the test still end what they began. Without a
                     running loop the failure is raised where the main thread waits.
    later alarms     it is raised whatever runs: a test that holds on to a cancellation, or whose
                     clean-up waits too, gets no further than this.
    never            C code that returns to no bytecode hears no signal. For it
                     `faulthandler_timeout` of pyproject.toml ends the process; tests/spread.py
                     counts that test as failed and goes on with another worker.

Each of a test's setup, call and teardown has `late_after_s` of its own; 0 is no bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest

AGAIN = 12
"""Later alarms come so many times in the time of the first: each 20 s of 240."""

RUNNERS = ("/_pytest/", "/pluggy/", "/xdist/", "/execnet/", "/pytest_asyncio/", "tests/late.py")
LATE = pytest.StashKey[str]()
"""The phase of a test, as pytest names it, that was late; of a session: the last of these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("late_after_s", "seconds for each of a test's setup, call and teardown", "string")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _bounded(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _bounded(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        with _bounded(item, "teardown"):
            return (yield)
    finally:
        if LATE in item.stash:
            _kill_children(f"PYTEST_CURRENT_TEST={item.nodeid} ({item.stash[LATE]})")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    """End without the threads of late tests, for which the interpreter would wait."""
    yield
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    is_worker = hasattr(session.config, "workerinput")
    if LATE in session.stash and not is_worker and not all(one.daemon for one in others):
        sys.stdout.flush()
        os._exit(int(exitstatus))


@contextlib.contextmanager
def _bounded(item: pytest.Item, phase: str) -> Iterator[None]:
    bound_s = float(item.config.getini("late_after_s") or 0)
    if not bound_s or threading.current_thread() is not threading.main_thread():
        yield
        return
    taken: list[str] = []

    def ring(_signal: int, frame: FrameType | None) -> None:
        first, running = not taken, _running(frame)
        if first:
            item.stash[LATE] = item.session.stash[LATE] = phase
            taken.append(_stacks(running[0] if running else None))
        if first and running:
            loop, main = running
            loop.call_soon_threadsafe(main.cancel)
        else:
            raise pytest.fail.Exception(f"{phase} is late", pytrace=False)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, bound_s, bound_s / AGAIN)
    try:
        yield
    except BaseException:
        if not taken:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if taken:
        pytest.fail(f"{phase} took more than {bound_s:g} s. Then:\n{taken[0]}", pytrace=False)


def _running(
    frame: FrameType | None,
) -> tuple[asyncio.AbstractEventLoop, asyncio.Future[object]] | None:
    """The loop of the main thread and what it runs until, by the frame of `run_until_complete`."""
    while frame is not None:
        if frame.f_code.co_name == "run_until_complete":
            return frame.f_locals["self"], frame.f_locals["future"]
        frame = frame.f_back
    return None


def _stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = [line for line in file if not any(runner in line for runner in RUNNERS)]
    tasks = asyncio.all_tasks(loop) if loop is not None else ()
    return "\n".join(["".join(lines), *(_awaited(task) for task in tasks)])


def _awaited(task: asyncio.Task[object]) -> str:
    """Where a task waits: `Task.print_stack` shows its outermost frame alone."""
    lines, step = [f"Task {task.get_name()}:"], task.get_coro()
    while (frame := getattr(step, "cr_frame", None)) is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        step = step.cr_await
    return "\n".join([*lines, f"  at {step!r}"] if step is not None else lines)


def _kill_children(mark: str) -> None:
    """Kill what began with this in its environment, whichever process it belongs to now."""
    for pid in _processes_with(mark):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_with(mark: str) -> list[int]:
    if not Path("/proc/self").exists():
        shown = subprocess.run(
            ["ps", "-A", "-E", "-ww", "-o", "pid=,command="], capture_output=True, text=True
        )
        return [int(line.split()[0]) for line in shown.stdout.splitlines() if mark in line]
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
