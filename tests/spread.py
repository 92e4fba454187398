"""Files of tests among several processes: `pytest --workers N`.

    the process that collects ─── worker ── worker ── ...

All tests are collected once, since that takes as long as hundreds of tests: workers are forked with
what was imported. A Mac allows no such fork; there each worker collects for itself.

A pipe holds the numbers of all files. A worker takes one after the other, so that a file stays with
the worker that keeps the nodes and engines of its tests, and sends what becomes of each test. A
test that ends its worker has failed; another worker goes on behind it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, count, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

import pytest

LONG = ("tests/node/", "tests/fleet/", "tests/wire/", "tests/backends/", "tests/doctor/")
"""Folders of nodes, engines and networks, whose files take longest. They come first: one that began
last would go on beside idle workers."""
NUMBER_BYTES = 4


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that share the files")
    parser.addoption("--worker", help="its two pipes, and the places of its first tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.workers:
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.workers or options.collectonly or session.testsfailed:
        return None
    if options.worker:
        source, tells, *first = map(int, options.worker.split(","))
        Worker(session, source, Connection(tells, readable=False)).run(first)
    else:
        Workers(session).run()
    return True


def files_of(session: pytest.Session) -> list[list[int]]:
    """The places of the tests of each file."""
    files: dict[str, list[int]] = {}
    for place, item in enumerate(session.items):
        files.setdefault(item.nodeid.partition("::")[0], []).append(place)
    return list(files.values())


class Workers:
    """All workers of a run, and which tests each has yet to run."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.files = session, files_of(session)
        self.source, sink = os.pipe()
        os.write(sink, b"".join(n.to_bytes(NUMBER_BYTES) for n in range(len(self.files))))
        os.close(sink)
        self.folders = map("worker-{}".format, count())
        self.pids: dict[Connection, int] = {}
        self.left: dict[Connection, deque[int]] = {}

    def run(self) -> None:
        session = self.session
        try:
            for _ in range(min(session.config.option.workers, len(self.files))):
                self.start([])
            while self.pids:
                for worker in wait(list(self.pids)):
                    assert isinstance(worker, Connection)
                    self.hear(worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGINT)
            for pid in self.pids.values():
                os.waitpid(pid, 0)
            os.close(self.source)

    def start(self, first: list[int]) -> None:
        """Start a worker that begins with the tests at these places, then takes files."""
        config = self.session.config
        hears, tells = Pipe(duplex=False)
        folder = config._tmp_path_factory.getbasetemp() / next(self.folders)  # type: ignore[attr-defined]
        if sys.platform == "linux":
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                for other in (hears, *self.pids):
                    other.close()
                config.option.basetemp = str(folder)
                _run_forked(Worker(self.session, self.source, tells), first)
        else:
            pipes = (self.source, tells.fileno())
            for pipe in pipes:
                os.set_inheritable(pipe, True)
            told = ",".join(map(str, (*pipes, *first)))
            own = ("--worker", told, "--basetemp", str(folder))
            command = [
                sys.executable,
                "-m",
                "pytest",
                *map(str, config.invocation_params.args),
                *own,
            ]
            silent = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
            pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=[silent])
        tells.close()
        self.pids[hears], self.left[hears] = pid, deque(first)

    def hear(self, worker: Connection) -> None:
        """Take what a worker sends; the end of its pipe is its own."""
        hook, config = self.session.config.hook, self.session.config
        try:
            kind, told = worker.recv()
        except EOFError:
            self.ended(worker)
            return
        if kind == "takes":
            self.left[worker].extend(self.files[told])
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=told)
            hook.pytest_runtest_logreport(report=report)
        else:
            item = self.session.items[self.left[worker].popleft()]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def ended(self, worker: Connection) -> None:
        worker.close()
        _, status = os.waitpid(self.pids.pop(worker), 0)
        left = self.left.pop(worker)
        code = os.waitstatus_to_exitcode(status)
        if not left:
            if code:
                raise RuntimeError(f"a worker ended with {code} behind its last test")
            return
        item, hook = self.session.items[left.popleft()], self.session.config.hook
        why = f"a worker ended with {code} in this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.start(list(left))


class Worker:
    """What runs tests in a process of its own."""

    def __init__(self, session: pytest.Session, source: int, tells: Connection) -> None:
        self.session, self.source, self.tells = session, source, tells

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self.session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self.tells.send(("report", data))

    def pytest_runtest_logfinish(self) -> None:
        self.tells.send(("finish", None))

    def run(self, first: Iterable[int]) -> None:
        session, config = self.session, self.session.config
        config.workerinput = {}  # type: ignore[attr-defined]  # by which plugins know a worker
        config.pluginmanager.register(self)
        items = (session.items[place] for place in chain(first, self.taken()))
        for item, following in pairwise(chain(items, (None,))):
            assert item is not None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break

    def taken(self) -> Iterator[int]:
        """The places of the tests of one file after the other."""
        files = files_of(self.session)
        while number := os.read(self.source, NUMBER_BYTES):
            self.tells.send(("takes", int.from_bytes(number)))
            yield from files[int.from_bytes(number)]


def _run_forked(worker: Worker, first: list[int]) -> NoReturn:
    """Run the tests of a worker in a fork of the process that collected, to the end of the fork."""
    session, config = worker.session, worker.session.config
    code = 1
    try:
        config.pluginmanager.unregister(name="terminalreporter")
        config._tmp_path_factory = type(config._tmp_path_factory).from_config(  # type: ignore[attr-defined]
            config, _ispytest=True
        )
        # The files in which output is captured are those of the process that collected.
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        worker.run(first)
        config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        code = 0
    except KeyboardInterrupt:
        config.hook.pytest_sessionfinish(session=session, exitstatus=2)
    except BaseException:
        capture.suspend_global_capture()
        traceback.print_exc()
    finally:
        worker.tells.close()
        os._exit(code)
