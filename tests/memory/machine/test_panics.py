"""Panic and Jetsam reports of macOS, and the profile that they call for.

The texts below were written for these tests in the forms of the real reports: two JSON documents,
or plain text on older systems. They are no recordings of a real machine.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.memory.machine.panics import (
    KEEP_S,
    MAX_BYTES,
    NORMAL,
    PanicReport,
    ReportKind,
    choose_profile,
    find_profile,
    parse_report,
    parse_time,
    read_reports,
    report_folders,
)
from tests.laws import law

TIME = "2026-03-31 09:43:10.00 +0900"
AT = datetime.fromisoformat("2026-03-31T00:43:10+00:00").timestamp()
DAY_S = 86400.0


def header(bug_type: str, timestamp: str = TIME) -> str:
    return json.dumps(
        {
            "bug_type": bug_type,
            "timestamp": timestamp,
            "os_version": "macOS 26.4 (25E246)",
            "roots_installed": 0,
            "incident_id": "00000000-1111-2222-3333-444444444444",
        }
    )


def panic_string(line: str, task: str = "pid 49042: python3.13") -> str:
    return (
        f"panic(cpu 7 caller 0xfffffe0012345678): {line}\n"
        "Debugger message: panic\nMemory ID: 0x6\nOS release type: User\nOS version: 25E246\n"
        "Kernel version: Darwin Kernel Version 25.4.0: root:xnu-1~1/RELEASE_ARM64_T8132\n"
        "Paniclog version: 15\nEpoch Time:        sec       usec\n"
        "  Boot    : 0x69b75d63 0x0001b85b\n"
        f"Panicked task 0xfffffe2012345678: 81920 pages, 23 threads: {task}\n"
        "Panicked thread: 0xfffffe2000000000, backtrace: 0xfffffe3c00000000, tid: 4711\n"
        "      Kernel Extensions in backtrace:\n"
        "         com.apple.iokit.IOGPUFamily(130.13)[00000000-0000-0000-0000-000000000000]\n"
    )


def panic(line: str, task: str = "pid 49042: python3.13", timestamp: str = TIME) -> str:
    body = {"product": "Mac16,10", "panicString": panic_string(line, task), "processByPid": {}}
    return header("210", timestamp) + "\n" + json.dumps(body, indent=2)


def jetsam(
    *processes: dict[str, object], largest: str = "WindowServer", timestamp: str = TIME
) -> str:
    body = {
        "product": "Mac16,10",
        "date": timestamp,
        "memoryStatus": {
            "compressorSize": 541951,
            "pageSize": 16384,
            "memoryPages": {"active": 179186, "free": 4275, "wired": 151000},
        },
        "largestProcess": largest,
        "processes": list(processes),
    }
    return header("298", timestamp) + "\n" + json.dumps(body, indent=2)


def process(name: str, reason: str | None = None, pages: int = 1000) -> dict[str, object]:
    fields: dict[str, object] = {"name": name, "pid": 77, "rpages": pages, "states": ["daemon"]}
    return fields if reason is None else {**fields, "reason": reason, "killDelta": 13593}


GPU = panic('"completeMemory() prepare count underflow" @IOGPUMemory.cpp:550')
WATCHDOG = panic(
    "watchdog timeout: no checkins from watchdogd in 92 seconds (3378 total checkins)",
    task="pid 0: kernel_task",
)
OWN_KILL = jetsam(
    process("trustd", "vm-compressor-space-shortage"),
    process("Python", "vm-compressor-space-shortage", pages=393216),
    process("Finder"),
)


def parsed(text: str) -> PanicReport:
    report = parse_report(text)
    assert report is not None
    return report


def test_a_panic_of_the_gpu_names_its_line_and_the_task() -> None:
    report = parsed(GPU)
    assert report.kind is ReportKind.GPU_PANIC
    assert report.at == AT
    assert report.process == "python3.13"
    assert "prepare count underflow" in report.summary
    assert report.calls_for_care


def test_a_watchdog_that_timed_out() -> None:
    report = parsed(WATCHDOG)
    assert (report.kind, report.process) == (ReportKind.WATCHDOG, "kernel_task")
    assert report.calls_for_care


def test_another_panic_counts_too() -> None:
    report = parsed(panic('"zone_map_exhausted: likely due to memory leak" @zalloc.c:100'))
    assert report.kind is ReportKind.PANIC
    assert report.calls_for_care


def test_an_older_system_writes_plain_text() -> None:
    report = parsed("*** Panic Report ***\n" + panic_string('"Something" @file.c:1'))
    assert report.kind is ReportKind.PANIC
    assert report.at is None
    assert report.process == "python3.13"


def test_a_report_that_was_cut_off_still_tells_its_panic() -> None:
    report = parsed(GPU[: GPU.index("Panicked thread")])
    assert report.kind is ReportKind.GPU_PANIC
    assert (report.at, report.process) == (AT, "python3.13")


def test_an_engine_that_was_ended_is_told_with_its_size() -> None:
    report = parsed(OWN_KILL)
    assert report.kind is ReportKind.JETSAM
    assert report.is_ours
    assert (report.process, report.process_bytes) == ("Python", 393216 * 16384)
    assert "vm-compressor-space-shortage" in report.summary
    assert report.calls_for_care


@pytest.mark.parametrize("reason", ["per-process-limit", "highwater", "sustained-fast"])
def test_an_end_of_others_for_their_own_limit_says_nothing_of_the_largest(reason: str) -> None:
    report = parsed(jetsam(process("spotlightknowledged", reason), largest="python3.13"))
    assert not report.calls_for_care
    assert report.summary == f"the system ended 1 processes ({reason}), none of ours"


@pytest.mark.parametrize(
    "reason",
    [
        "vm-pageshortage",
        "vm-compressor-thrashing",
        "vm-compressor-space-shortage",
        "low-swap",
        "zone-map-exhaustion",
        "sustained-memory-pressure",
    ],
)
def test_an_end_of_others_in_a_short_machine_speaks_of_the_largest(reason: str) -> None:
    assert parsed(jetsam(process("trustd", reason), largest="python3.13")).calls_for_care


def test_an_own_process_over_its_limit_calls_for_care() -> None:
    assert parsed(jetsam(process("python3.13", "per-process-limit"))).calls_for_care


def incident(name: str, at: float) -> PanicReport:
    return PanicReport(kind=ReportKind.PANIC, at=at, summary="it panicked", incident=name)


def test_the_files_of_one_incident_count_once() -> None:
    one = [incident("a", AT), incident("a", AT + 300), incident("", AT + 20)]
    assert choose_profile(one, now=AT + DAY_S).max_running == 2
    three = [*one, incident("b", AT + 1), incident("", AT + 3600)]
    assert choose_profile(three, now=AT + DAY_S).max_running == 1
    two = [one[0], incident("c", AT - DAY_S / 2)]
    assert choose_profile(two, now=AT).max_running == 1, "the second within a day"
    apart = [one[0], incident("c", AT - 2 * DAY_S)]
    assert choose_profile(apart, now=AT).max_running == 2


def test_a_report_says_its_incident() -> None:
    assert parsed(jetsam(process("trustd"))).incident.startswith("00000000-1111")


def test_others_ended_while_ours_was_the_largest() -> None:
    report = parsed(jetsam(process("trustd", "vm-pageshortage"), largest="python3.13"))
    assert report.is_ours
    assert "python3.13 was largest" in report.summary


@pytest.mark.parametrize(
    "text",
    [
        jetsam(process("trustd", "vm-pageshortage")),
        jetsam(process("python3.13", "idle-exit"), largest="python3.13"),
        jetsam(process("python3.13"), largest="python3.13"),
        jetsam(),
    ],
)
def test_what_does_not_concern_us_calls_for_no_care(text: str) -> None:
    assert not parsed(text).calls_for_care


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        header("309") + '\n{"procName": "python3.13", "exception": {}}',
        "hello",
        "[1, 2]\n[3]",
    ],
)
def test_other_texts_are_none_of_these_reports(text: str) -> None:
    assert parse_report(text) is None


def test_names_in_reports_break_no_line() -> None:
    report = parsed(panic("a\tb\x1b[31m", task="pid 1: py\x07thon"))
    assert report.summary.isprintable()
    assert report.process.isprintable()


@law(300)
@given(st.text(max_size=400) | st.sampled_from([GPU, OWN_KILL, WATCHDOG]), st.data())
def test_no_text_makes_the_parser_fail(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    parse_report(text[start:])
    parse_report(header("298") + "\n" + text[:start])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
FIELD = st.sampled_from(
    ["processes", "largestProcess", "memoryStatus", "pageSize", "name", "reason", "rpages", "date"]
)


@law(200, part=4)
@given(st.dictionaries(FIELD, JSON | st.lists(st.dictionaries(FIELD, JSON), max_size=3)))
def test_no_body_makes_the_parser_fail(body: dict[str, object]) -> None:
    report = parse_report(header("298") + "\n" + json.dumps(body))
    assert report is not None
    assert report.process_bytes >= 0


@pytest.mark.parametrize("text", ["", "soon", "2026-03-31", "2026-13-01 00:00:00.00 +0000", None])
def test_a_time_that_is_none(text: object) -> None:
    assert parse_time(text) is None


def test_a_time_knows_its_zone() -> None:
    assert parse_time("1970-01-01 01:00:00.50 +0100") == 0.5


def write(folder: Path, name: str, text: str, at: float = AT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def test_reports_are_found_newest_first_and_others_are_left_alone(tmp_path: Path) -> None:
    system, user = tmp_path / "system", tmp_path / "user"
    write(system, "panic-full-2026-03-31-094310.0002.panic", GPU, AT)
    write(user, "JetsamEvent-2026-03-31-090000.ips", OWN_KILL, AT - 60)
    write(system, "JetsamEvent-2026-03-01-090000.ips", OWN_KILL, AT - 30 * DAY_S)
    write(system, "Safari-2026-03-31-090000.ips", GPU)
    write(system, "notes.txt", GPU)
    (system / "panic-full-link.panic").symlink_to(system / "notes.txt")
    (system / "panic-full-folder.panic").mkdir()
    os.mkfifo(system / "panic-full-pipe.panic")
    found = read_reports((system, user, tmp_path / "none"), since=AT - DAY_S)
    assert [report.kind for report in found] == [ReportKind.GPU_PANIC, ReportKind.JETSAM]
    assert found[0].file == "panic-full-2026-03-31-094310.0002.panic"


def test_reading_is_bounded_in_files_and_bytes(tmp_path: Path) -> None:
    for number in range(6):
        text = GPU.replace("444444444444", f"44444444444{number}")
        write(tmp_path, f"panic-full-{number}.panic", text, AT + number)
    newest = read_reports((tmp_path,), since=0.0, limit=2)
    assert [report.file for report in newest] == ["panic-full-5.panic", "panic-full-4.panic"]
    long = GPU.replace('"processByPid": {}', '"more": "' + "x" * (2 * MAX_BYTES) + '"')
    write(tmp_path, "panic-full-9.panic", long, AT + 9)
    assert read_reports((tmp_path,), since=0.0, limit=1)[0].kind is ReportKind.GPU_PANIC


def test_what_does_not_read_is_told_and_counts_nothing(tmp_path: Path) -> None:
    write(tmp_path, "panic-full-1.panic", "\0\xff nothing")
    (tmp_path / "JetsamEvent-2.ips").write_bytes(b"\xff\xfe" + b"[" * 100_000)
    found = read_reports((tmp_path,), since=0.0)
    assert {report.kind for report in found} == {ReportKind.UNREADABLE}
    assert choose_profile(found, now=AT) == NORMAL


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_folder_that_may_not_be_read_has_no_reports(tmp_path: Path) -> None:
    write(tmp_path, "panic-full-1.panic", GPU)
    tmp_path.chmod(0)
    try:
        assert read_reports((tmp_path,), since=0.0) == ()
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_place_of_a_folder_has_no_reports(tmp_path: Path) -> None:
    assert read_reports((write(tmp_path, "panic-full-1.panic", GPU),), since=0.0) == ()


def test_a_panic_makes_a_node_careful_for_a_week_and_it_says_why(tmp_path: Path) -> None:
    write(tmp_path, "panic-full-1.panic", GPU)
    profile, reports = find_profile((tmp_path,), now=AT + DAY_S)
    assert profile.name == "careful"
    assert profile.max_running == 2
    assert profile.reserve_factor > 1
    assert "2026-03-31" in profile.reason
    assert "prepare count underflow" in profile.reason
    assert "until 2026-04-07" in profile.reason
    assert "\n" not in profile.reason
    assert profile.until_at == AT + KEEP_S
    assert choose_profile(reports, now=AT + KEEP_S - 1).name == "careful"
    assert choose_profile(reports, now=AT + KEEP_S) == NORMAL


def test_repeated_panics_make_it_run_one_sequence_at_a_time(tmp_path: Path) -> None:
    for number in range(3):
        text = GPU.replace("444444444444", f"44444444444{number}")
        write(tmp_path, f"panic-full-{number}.panic", text, AT + number)
    profile, _ = find_profile((tmp_path,), now=AT + DAY_S)
    assert profile.max_running == 1
    assert "2 more" in profile.reason


def test_a_machine_without_reports_is_normal(tmp_path: Path) -> None:
    assert find_profile((tmp_path,), now=AT) == (NORMAL, ())
    assert NORMAL.max_running is None
    assert NORMAL.reserve_factor == 1.0


def test_a_report_from_the_future_counts_from_now() -> None:
    late = PanicReport(kind=ReportKind.PANIC, at=AT + 900 * DAY_S, summary="x")
    profile = choose_profile([late], now=AT)
    assert profile.until_at == AT + KEEP_S


@given(st.lists(st.floats(-1e13, 1e13), max_size=6), st.floats(0, 4e9))
def test_no_times_make_the_choice_fail(times: list[float], now: float) -> None:
    reports = [PanicReport(kind=ReportKind.PANIC, at=at, summary="x") for at in times]
    profile = choose_profile(reports, now=now)
    is_recent = any(now - at < KEEP_S for at in times)
    assert (profile.name == "careful") is is_recent
    assert profile.until_at is None or now < profile.until_at <= now + KEEP_S


def test_where_a_mac_keeps_reports() -> None:
    assert report_folders("linux", Path("/home/a")) == ()
    folders = report_folders("darwin", Path("/Users/a"))
    assert Path("/Library/Logs/DiagnosticReports") in folders
    assert Path("/Users/a/Library/Logs/DiagnosticReports/Retired") in folders
