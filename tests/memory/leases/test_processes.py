"""Who lives, who belongs to whom, and what they occupy: of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.leases.lease import Book, Process, ProcessLease, Wish
from kakeya.memory.leases.processes import (
    MARK,
    Census,
    LinuxProcesses,
    LivingProcess,
    MacProcesses,
    parse_ps,
)
from kakeya.memory.leases.rules import MachineSight, is_dead

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


def until(probe: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not probe():
        assert time.monotonic() < end
        time.sleep(0.01)


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
        until(lambda: lives(census, lease) is False)
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
        until(lambda: lives(census, lease) is False)
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
        until(lambda: lives(census, lease) is False)


@linux
def test_a_name_with_brackets_and_spaces_is_read_right(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 50))
    (tmp_path / "7" / "stat").write_text(f"7 (a) Z 1 (b) S 3 {fields}\n")
    assert LinuxProcesses(tmp_path).find((7, 8)) == {7: LivingProcess(3, "21")}


def test_recorded_processes_of_a_linux_machine_are_read() -> None:
    assert LinuxProcesses(RECORDED / "proc").find((1, 2)) == {1: LivingProcess(0, "14")}
    rows = parse_ps((RECORDED / "ps.txt").read_text())
    assert len(rows) == 14
    assert rows[1] == LivingProcess(0, "Tue Nov 24 19:23:12 2026")
    assert rows[9114] == LivingProcess(8533, "Tue Nov 24 20:41:44 2026")


def test_ps_of_macos_is_read_without_the_dead() -> None:
    text = (
        "    1     0 Ss   Mon Nov 16 09:12:44 2026    \n"
        "  412     1 S    Mon Nov 16 09:13:02 2026    \n"
        "  977   412 Z    Sun Nov 22  1:02:03 2026    \n"
        "  981   412 U+   Sun Nov 22  1:02:04 2026    \n"
    )
    assert parse_ps(text) == {
        1: LivingProcess(0, "Mon Nov 16 09:12:44 2026"),
        412: LivingProcess(1, "Mon Nov 16 09:13:02 2026"),
        981: LivingProcess(412, "Sun Nov 22 1:02:04 2026"),
    }
    with pytest.raises(errors.PeerProtocol, match="pid, ppid"):
        parse_ps("ps: illegal option")


MAC_ROW = "  412     1 S    Mon Nov 16 09:13:02 2026\n"


def test_a_mac_is_asked_in_utc_and_told_apart_by_its_hardware() -> None:
    asked: list[tuple[str, ...]] = []
    is_well = True

    def run(command: object) -> str:
        words = tuple(command)  # type: ignore[call-overload]
        asked.append(words)
        match words:
            case ("sysctl", "-n", "kern.bootsessionuuid"):
                return "0A1B\n"
            case ("ioreg", *_):
                return '    "IOPlatformUUID" = "12345678-90AB-CDEF-1234-567890ABCDEF"\n'
            case ("env", "TZ=UTC", "LC_ALL=C", "ps", *rest) if is_well:
                own = "" if "-ax" in rest else f"{os.getpid()} 1 S Mon Nov 16 09:13:04 2026\n"
                found = "" if rest[-2:] == ["-p", f"404,{os.getpid()}"] else MAC_ROW
                return found + own
            case _:
                raise errors.PeerUnavailable("exit status 1")

    mac = MacProcesses(run)
    assert mac.boot() == mac.space() == "0A1B"
    assert mac.machine() == "12345678-90AB-CDEF-1234-567890ABCDEF"
    assert mac.find((412,)) == mac.all() == {412: LivingProcess(1, "Mon Nov 16 09:13:02 2026")}
    assert mac.find((404,)) == mac.find(()) == {}
    assert mac.marked("a") == []
    assert sum(words[0] == "sysctl" for words in asked) == 1
    is_well = False
    with pytest.raises(errors.PeerUnavailable):  # ps failed: that says of nobody that it is dead
        mac.find((412,))


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
