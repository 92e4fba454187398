"""What a process occupies, by the system's own account."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading

import pytest

from kakeya.core.process import (
    compute_in_bulk,
    parse_status,
    resident_bytes,
    trim_heap,
    watched_exit,
)

MIB = 1 << 20
# /proc/PID/status of a Python on Linux 6.18, shortened; its shared memory is made up.
RECORDED = """Name:\tpython
State:\tR (running)
VmPeak:\t   12936 kB
VmHWM:\t    9880 kB
VmRSS:\t    9880 kB
RssAnon:\t    3972 kB
RssFile:\t    5908 kB
RssShmem:\t   14608 kB
Threads:\t1
"""


def test_shared_memory_is_not_counted() -> None:
    assert parse_status(RECORDED) == (3972 + 5908) * 1024


def test_a_process_that_has_ended_occupies_nothing_that_could_be_read() -> None:
    assert parse_status("Name:\tpython\nState:\tZ (zombie)\nThreads:\t1\n") is None


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no such account here")
def test_it_follows_what_is_taken_and_given_back() -> None:
    before = resident_bytes()
    assert before is not None
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * (64 * MIB))
    grown = resident_bytes()
    assert grown is not None
    assert grown - before > 60 * MIB
    block.close()
    after = resident_bytes()
    assert after is not None
    assert grown - after > 60 * MIB


def test_a_child_is_measured_and_one_that_went_is_not() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until then it may not be a Python yet
        assert (resident_bytes(child.pid) or 0) > 100_000
        child.communicate(b"\n")
    assert resident_bytes(child.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_heap_goes_back_to_the_system() -> None:
    blocks = [bytearray(b"x") * 60_000 for _ in range(1000)]  # below the mmap threshold
    keep = bytearray(100)
    full = resident_bytes()
    del blocks
    trim_heap()
    after = resident_bytes()
    assert keep is not None
    assert full is not None
    assert after is not None
    assert full - after > 40 * MIB


ARRAYS_COME_AND_GO = """
import ctypes, sys
from kakeya.core.process import bound_heap, resident_bytes
assert sys.argv[1] == "as it is" or bound_heap()
libc, MIB = ctypes.CDLL(None), 1 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address
libc.free(block(30 * MIB))  # what glibc takes as a reason to put such blocks into the heap
before = resident_bytes()
blocks = []
for _ in range(64):
    blocks.append(block(2 * MIB))
    block(60_000)  # small, and stays
for address in blocks:
    libc.free(address)
print((resident_bytes() - before) // MIB)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a switch of glibc")
def test_what_is_freed_of_large_blocks_is_not_resident_any_more() -> None:
    def left_mib(how: str) -> int:
        command = [sys.executable, "-c", ARRAYS_COME_AND_GO, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert left_mib("as it is") > 100  # or the switch is for nothing
    assert left_mib("bounded") < 16


@pytest.mark.skipif(sys.platform != "linux", reason="a class of Linux")
def test_a_thread_that_computes_in_bulk_leaves_the_others_as_they_are() -> None:
    classes: dict[str, int] = {}

    def started() -> None:
        classes["started"] = os.sched_getscheduler(0)

    def compute() -> None:
        assert compute_in_bulk()
        classes["own"] = os.sched_getscheduler(0)
        within = threading.Thread(target=started)
        within.start()
        within.join()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert classes == {"own": os.SCHED_BATCH, "started": os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no such descriptor here")
async def test_the_end_of_a_process_is_told_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ended = asyncio.Event()
        with watched_exit(child.pid) as descriptor:
            assert descriptor is not None
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            child.kill()
            await ended.wait()
            asyncio.get_running_loop().remove_reader(descriptor)
    with pytest.raises(ProcessLookupError), watched_exit(child.pid):
        pass
