"""Decoders of macOS's answers on bytes laid out by Apple's headers, and the calls that get them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import plistlib
import select
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import darwin
from tests.darwin_library import (
    ZOMBIE,
    DarwinLibrary,
    KinfoProc,
    RusageInfoV0,
    VmStatistics64,
    argument_bytes,
    process_bytes,
)

WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=12)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> DarwinLibrary:
    played = DarwinLibrary()
    monkeypatch.setattr(darwin, "call", played.call)
    darwin._host_port.cache_clear()
    return played


def test_structures_have_the_sizes_that_the_kernel_tells() -> None:
    sizes = [ctypes.sizeof(one) for one in (VmStatistics64, KinfoProc, RusageInfoV0)]
    assert sizes == [152, 648, 96]


def test_available_pages_are_free_file_backed_and_purgeable_ones() -> None:
    told = VmStatistics64(
        free_count=3000,
        active_count=400_000,
        inactive_count=380_000,
        speculative_count=1000,
        purgeable_count=500,
        external_page_count=200_000,
        internal_page_count=600_000,
    )
    pages = darwin.parse_pages(bytes(told))
    assert pages == darwin.Pages(3000, 1000, 200_000, 500)
    assert pages.available == 2000 + 200_000 + 500
    assert darwin.parse_pages(bytes(told) + bytes(64)) == pages  # a newer system appends fields
    with pytest.raises(ValueError, match="152"):
        darwin.parse_pages(bytes(told)[:60])


@given(
    st.integers(1, 99999),
    st.integers(0, 99999),
    st.integers(0, 1 << 40),
    st.integers(0, 999_999),
    st.integers(1, 5),
)
def test_a_process_is_read_with_its_parent_and_start(
    pid: int, parent: int, seconds: int, micros: int, state: int
) -> None:
    (row,) = darwin.parse_processes(process_bytes(pid, parent, seconds, micros, state))
    assert row == darwin.ProcessRow(pid, parent, f"{seconds}.{micros:06}", state == ZOMBIE)


def test_a_cut_off_table_of_processes_is_refused() -> None:
    assert darwin.parse_processes(b"") == []
    with pytest.raises(ValueError, match="648"):
        darwin.parse_processes(bytes(647))


@given(WORDS.filter(bool), st.lists(WORDS), st.lists(st.tuples(WORDS, WORDS)))
def test_an_environment_is_found_behind_any_arguments(
    program: str, arguments: list[str], pairs: list[tuple[str, str]]
) -> None:
    environment = [f"{name}={value}" for name, value in pairs]
    told = argument_bytes(program, arguments, environment)
    assert darwin.parse_environment(told) == [one.encode() for one in environment]


@pytest.mark.parametrize("told", [b"", b"\1\0", b"\1\0\0\0/bin/sh"])
def test_arguments_without_a_program_are_refused(told: bytes) -> None:
    with pytest.raises(ValueError, match="holds no arguments"):
        darwin.parse_environment(told)


def test_a_value_is_asked_for_by_its_name(library: DarwinLibrary) -> None:
    library.named = {
        "hw.memsize": (17 << 30).to_bytes(8, "little"),
        "kern.memorystatus_level": (38).to_bytes(4, "little"),
        "kern.bootsessionuuid": b"0A1B\0",
    }
    assert darwin.sysctl_number("hw.memsize") == 17 << 30
    assert darwin.sysctl_number("kern.memorystatus_level") == 38
    assert darwin.sysctl_text("kern.bootsessionuuid") == "0A1B"
    with pytest.raises(FileNotFoundError, match=r"no\.such\.name"):
        darwin.sysctl("no.such.name")


def test_a_table_that_grows_while_it_is_read_is_read_again_with_more_room(
    library: DarwinLibrary,
) -> None:
    library.rows = {pid: process_bytes(pid, 1, 5) for pid in (7, 8)}
    library.grows = 2
    assert [row.pid for row in darwin.processes()] == [7, 8]
    first = library.rooms[0]
    assert library.rooms == [first, 2 * first, 3 * first]
    library.grows = 99
    with pytest.raises(OSError, match="grew") as refused:
        darwin.processes()
    assert refused.value.errno == errno.ENOMEM


def test_one_process_is_asked_for_by_its_pid(library: DarwinLibrary) -> None:
    library.rows = {7: process_bytes(7, 1, 5, 250)}
    assert darwin.processes(7) == [darwin.ProcessRow(7, 1, "5.000250", has_ended=False)]
    assert darwin.processes(8) == []


def test_an_environment_that_the_system_withholds_is_empty(library: DarwinLibrary) -> None:
    library.arguments = {7: argument_bytes("/bin/python3", ["python3", "", "x"], ["A=1", "B="])}
    assert darwin.environment(7) == [b"A=1", b"B="]
    assert darwin.environment(8) == []
    library.arguments[9] = argument_bytes("/bin/sleep", ["sleep", "5"], [])
    assert darwin.environment(9) == []


def test_pages_and_footprints_are_asked_for(library: DarwinLibrary) -> None:
    with pytest.raises(OSError, match="host_statistics64 failed with 4"):
        darwin.pages()
    library.pages = bytes(VmStatistics64(free_count=9, external_page_count=5))
    assert darwin.pages().available == 14
    assert darwin.pages().available == 14
    assert library.asked.count("mach_host_self") == 1  # each call takes another reference
    library.footprints[7] = 123
    assert darwin.footprint(7) == 123
    assert darwin.footprint(8) is None


def test_a_mac_and_its_program_have_a_name(library: DarwinLibrary) -> None:
    assert darwin.hardware_id() == "12345678-90AB-CDEF-1234-567890ABCDEF"
    assert darwin.executable() == "/opt/Python.app/Contents/MacOS/Python"
    library.refusal = errno.EWOULDBLOCK
    with pytest.raises(BlockingIOError, match="gethostuuid"):
        darwin.hardware_id()


def test_a_folder_is_marked_as_left_out_of_backups(library: DarwinLibrary) -> None:
    darwin.exclude_from_backup(Path("/a b"))
    ((place, value),) = library.attributes.items()
    assert place == b"/a b:com.apple.metadata:com_apple_backup_excludeItem"
    assert plistlib.loads(value) == "com.apple.backupd"
    library.refusal = errno.ENOTSUP
    with pytest.raises(OSError, match="setxattr"):
        darwin.exclude_from_backup(Path("/a b"))


def test_heap_and_threads_are_told(library: DarwinLibrary) -> None:
    assert darwin.relieve_heap()
    assert darwin.compute_for_user()


@pytest.mark.parametrize(("flush", "wanted"), [(darwin.flush, 51), (darwin.order, 85)])
def test_a_full_flush_falls_back_where_the_file_system_has_none(
    flush: object, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def control(descriptor: int, number: int) -> int:
        done.append(number)
        if descriptor == 4:
            raise OSError(errno.ENOTSUP, "no such flush")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("fsync"))
    flush(3)  # type: ignore[operator]
    assert done == [wanted]
    flush(4)  # type: ignore[operator]
    assert done == [wanted, wanted, "fsync"]


def test_the_end_of_a_process_is_asked_of_a_kqueue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    read, write = os.pipe()

    class Queue:
        def control(self, changes: list[object], most: int) -> None:
            asked.extend(changes)
            if changes == [(404, "proc", "add once", "exit")]:
                raise ProcessLookupError(errno.ESRCH, "No such process")

        def fileno(self) -> int:
            return read

        def close(self) -> None:
            asked.append("closed")

    names = {"KQ_FILTER_PROC": "proc", "KQ_NOTE_EXIT": "exit"}
    for name, value in {**names, "KQ_EV_ADD": _Flag("add"), "KQ_EV_ONESHOT": _Flag("once")}.items():
        monkeypatch.setattr(select, name, value, raising=False)
    monkeypatch.setattr(
        select,
        "kevent",
        lambda pid, filter, flags, fflags: (pid, filter, str(flags), fflags),
        raising=False,
    )
    monkeypatch.setattr(select, "kqueue", Queue, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with darwin.watched_exit(7) as descriptor:
        assert descriptor == read
    assert asked == [(7, "proc", "add once", "exit"), "closed"]
    with pytest.raises(ProcessLookupError), darwin.watched_exit(404):
        pass
    assert asked[-1] == "closed"
    os.close(read)
    os.close(write)


class _Flag(str):
    __slots__ = ()

    def __or__(self, other: object) -> _Flag:
        return _Flag(f"{self} {other}")
