"""Who lives, who belongs to whom, and what they occupy: of real processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.core import darwin, errors
from kakeya.core.units import MIB
from kakeya.memory.leases.lease import Book, Process, ProcessLease, Wish
from kakeya.memory.leases.processes import (
    MARK,
    Census,
    LinuxProcesses,
    LivingProcess,
    MacProcesses,
)
from kakeya.memory.leases.rules import MachineSight, is_dead
from tests.darwin_library import ZOMBIE, DarwinLibrary, argument_bytes, process_bytes
from tests.waiting import wait_until

RECORDED = Path(__file__).parents[1] / "recorded"
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
HOG = """
import sys, time
held = b"x" * (int(sys.argv[1]) << 20)
print("up", flush=True)
time.sleep(60)
"""
FORKS = """
import os, time
held = b"x" * (60 << 20)
for _ in range(3):
    if os.fork() == 0:
        time.sleep(60)
print("up", flush=True)
time.sleep(60)
"""
ORPHAN = """
import os, subprocess, sys
kept = {"start_new_session": True, "stdout": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **kept)
print(child.pid, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def running(code: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environ}
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().decode().strip()


def lease_of(*processes: Process, lease_id: str = "a") -> ProcessLease:
    return ProcessLease(
        lease_id=lease_id,
        number=1,
        wish=Wish(name="job", size_bytes=MIB),
        boot=Census().boot,
        processes=processes,
        asked_mono=0.0,
        beat_mono=0.0,
    )


def lives(census: Census, lease: ProcessLease) -> bool | None:
    return census.look(Book(leases={"a": lease}), 0.0).living.get("a")


def test_a_process_is_known_by_its_start_and_not_by_its_pid_alone() -> None:
    census = Census()
    own = census.identify(os.getpid())
    assert own == census.own
    assert census.lives(own) is True
    assert census.lives(replace(own, started="0")) is False  # another one has the pid by now
    assert census.lives(replace(own, space="elsewhere")) is None


def test_a_killed_process_is_dead_before_anybody_waited_for_it() -> None:
    census = Census()
    with running(HOG, "1") as child:
        line(child)
        lease = lease_of(census.identify(child.pid))
        assert lives(census, lease) is True
        os.kill(child.pid, signal.SIGKILL)
        wait_until("the lease has no living process", lambda: lives(census, lease) is False)
        with pytest.raises(errors.NotFound, match="no process"):
            census.identify(child.pid)


def test_a_stopped_process_lives_however_old_its_heartbeat_is() -> None:
    census = Census()
    with running(HOG, "1") as child:
        line(child)
        os.kill(child.pid, signal.SIGSTOP)
        book = Book(leases={"a": lease_of(census.identify(child.pid))})
        assert not is_dead(book.leases["a"], census.look(book, 1e9))


def test_a_holder_elsewhere_is_judged_by_its_heartbeat_alone() -> None:
    census = Census()
    lease = lease_of(Process(1, "1", "another container"))
    assert lives(census, lease) is None
    assert census.process_trees((lease,)) == {}
    assert not is_dead(lease, MachineSight(boot=census.boot, now_mono=10.0))


def test_children_belong_to_a_holder_and_count_what_they_use() -> None:
    census = Census()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOG!r}, '80'])"
    with running(code) as child:
        assert line(child) == "up"
        tree = census.process_trees((lease_of(census.identify(child.pid)),))["a"]
        assert len(tree.processes) == 2
        assert tree.processes[0].pid == child.pid
        assert tree.used_bytes > 80 * MIB
        assert tree.is_alive
        for one in tree.processes[1:]:
            os.kill(one.pid, signal.SIGKILL)


@linux
def test_pages_that_forks_share_count_once() -> None:
    census = Census()
    with running(FORKS) as child:
        assert line(child) == "up"
        tree = census.process_trees((lease_of(census.identify(child.pid)),))["a"]
        assert len(tree.processes) == 4
        assert 60 * MIB < tree.used_bytes < 120 * MIB
        for one in tree.processes[1:]:
            os.kill(one.pid, signal.SIGKILL)


def test_a_child_that_was_seen_keeps_the_lease_when_its_parent_ends() -> None:
    census = Census()
    with running(ORPHAN) as child:
        orphan = int(line(child))
        lease = lease_of(census.identify(child.pid))
        lease = replace(lease, processes=census.process_trees((lease,))["a"].processes)
        child.kill()
        child.wait()
        assert lives(census, lease) is True
        tree = census.process_trees((lease,))["a"]
        assert tree.is_alive
        assert [one.pid for one in tree.processes] == [child.pid, orphan]
        os.kill(orphan, signal.SIGKILL)
        wait_until("the lease has no living process", lambda: lives(census, lease) is False)
        assert not census.process_trees((lease,))["a"].is_alive


def test_who_only_watches_a_household_is_none_of_it_though_its_child() -> None:
    census = Census()
    with running(ORPHAN) as child:
        watcher = int(line(child))
        lease = lease_of(census.identify(child.pid))
        seen = census.process_trees((lease,))["a"].processes
        assert [one.pid for one in seen] == [child.pid, watcher]
        tree = census.process_trees((lease,), {watcher})["a"]
        assert [one.pid for one in tree.processes] == [child.pid]
        child.kill()
        child.wait()
        assert not census.process_trees((replace(lease, processes=seen),), {watcher})["a"].is_alive
        os.kill(watcher, signal.SIGKILL)


@linux
def test_a_child_that_nobody_saw_is_known_by_its_mark() -> None:
    census = Census()
    with running(ORPHAN, **{MARK: "a"}) as child:
        lease = lease_of(census.identify(child.pid))
        orphan = int(line(child))
        child.kill()
        child.wait()
        assert lives(census, lease) is True
        assert census.process_trees((lease,))["a"].processes[1].pid == orphan
        assert lives(census, lease_of(census.identify(os.getpid()), lease_id="a")) is True
        os.kill(orphan, signal.SIGKILL)
        wait_until("the lease has no living process", lambda: lives(census, lease) is False)


@linux
def test_a_name_with_brackets_and_spaces_is_read_right(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 50))
    (tmp_path / "7" / "stat").write_text(f"7 (a) Z 1 (b) S 3 {fields}\n")
    assert LinuxProcesses(tmp_path).find((7, 8)) == {7: LivingProcess(3, "21")}


def test_recorded_processes_of_a_linux_machine_are_read() -> None:
    assert LinuxProcesses(RECORDED / "proc").find((1, 2)) == {1: LivingProcess(0, "14")}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> DarwinLibrary:
    library = DarwinLibrary(
        named={"kern.bootsessionuuid": b"0A1B\0"},
        rows={
            412: process_bytes(412, 1, 1_790_000_000, 17),
            977: process_bytes(977, 412, 1_790_000_001, state=ZOMBIE),
            981: process_bytes(981, 412, 1_790_000_002),
        },
        arguments={
            412: argument_bytes("/opt/python", ["python", "train.py"], ["A=1", f"{MARK}=a"]),
            981: argument_bytes("/bin/sleep", ["sleep", f"{MARK}=a"], []),
        },
    )
    monkeypatch.setattr(darwin, "call", library.call)
    return library


def test_a_mac_lists_the_living_by_their_start(mac: DarwinLibrary) -> None:
    table = MacProcesses()
    first = LivingProcess(1, "1790000000.000017")
    assert table.boot() == table.space() == "0A1B"
    assert table.find((412, 977, 404)) == {412: first}
    assert table.all() == {412: first, 981: LivingProcess(412, "1790000002.000000")}
    assert table.find(()) == {}


def test_a_mac_is_known_by_its_hardware_else_by_its_name(mac: DarwinLibrary) -> None:
    assert MacProcesses().machine() == "12345678-90AB-CDEF-1234-567890ABCDEF"
    mac.refusal = errno.EWOULDBLOCK
    assert MacProcesses().machine() == os.uname().nodename


def test_a_mac_shows_the_mark_in_an_environment_and_not_in_arguments(mac: DarwinLibrary) -> None:
    assert MacProcesses().marked("a") == [412]
    assert MacProcesses().marked("b") == []


def test_a_mac_that_tells_no_processes_takes_none_for_dead(mac: DarwinLibrary) -> None:
    mac.refusal = errno.ENOMEM
    for ask in (lambda: MacProcesses().find((412,)), MacProcesses().all, MacProcesses().boot):
        with pytest.raises(errors.PeerUnavailable, match="tells no processes"):
            ask()


@linux
def test_who_cannot_be_looked_for_is_not_taken_for_dead() -> None:
    resource = pytest.importorskip("resource")
    census = Census()
    lease = lease_of(census.own)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(errors.PeerUnavailable, match="cannot be read"):
            lives(census, lease)
        with pytest.raises(errors.PeerUnavailable, match="cannot be read"):
            census.process_trees((lease,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lives(census, lease) is True


@linux
def test_this_machine_has_a_name_and_each_boot_another() -> None:
    table = LinuxProcesses()
    assert table.machine()
    assert table.space().startswith(table.boot())
    assert len(table.boot()) == 36


def test_this_system_knows_this_process_and_what_it_occupies() -> None:
    census = Census()
    assert census.lives(census.own) is True
    tree = census.process_trees((lease_of(census.own),))["a"]
    assert tree.used_bytes > MIB
