"""Reports of macOS on panics and on processes ended for memory, and the caution that they call for.

    panic-full-*.panic, Kernel_*.panic   the kernel stopped: JSON, or plain text on older systems
    JetsamEvent-*.ips                    the kernel ended processes because memory was short

JSON reports are two documents: one line with the kind of the report and its time, and the report.
Parsers are pure functions of text; reading is bounded in files and in bytes, blocks, and raises
nothing: a report that cannot be read is named, and does not count.

A kernel panic within a week makes a node careful, whatever caused it; Jetsam does when it ended a
process of ours for memory, or when ours was the largest while the whole machine was short. An
engine is nearly always the largest, so an end of others for a limit of their own says nothing of
it. One panic may leave several files: incidents count, not files.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

KEEP_S = 7 * 86400.0
"""A report counts for so long: enough to see whether the careful profile holds."""
FIND_PERIOD_S = 3600.0
"""Between two looks at the reports of a node that runs on."""
MAX_FILES = 50
MAX_BYTES = 2 << 20
"""Bytes read of one file; the rest holds no line that is needed. Common reports have a tenth of
it."""
_MAX_ENTRIES = 10_000
"""Files of a folder that are looked at; a Mac keeps some hundred."""
OURS = ("python", "kakeya", "mlx")
"""The beginnings of our processes' names, in any case: engines are Python's."""

_PANIC = re.compile(r"panic\(cpu \d+(?: caller 0x[0-9a-f]+)?\): *(.{1,2000})", re.DOTALL)
_TASK = re.compile(r"Panicked task [^\n]*?pid (\d+): ([^\n]{1,80})")
_NAME = re.compile(r"(?:JetsamEvent-.*\.ips|panic-.*\.(?:panic|ips)|Kernel.*\.panic)\Z")
_HARMLESS = ("idle-exit", "long-idle-exit", "vnode-limit", "disk-space-shortage")
"""Reasons of Jetsam to end processes, other than memory."""
_SHORTAGES = (
    "vm-pageshortage",
    "vm-compressor-",
    "low-swap",
    "zone-map-exhaustion",
    "sustained-memory-pressure",
)
"""The beginnings of Jetsam's reasons that lie in the whole machine's memory, and not in a limit of
the ended process (xnu, `kern_memorystatus.c`)."""
REPEATED_S = 86400.0
"""A second incident so soon after the last one: two sequences at a time were too many."""
_INCIDENT_S = 60.0
"""Files without a name of their incident belong to one if they are so close in time."""
_TIME = "%Y-%m-%d %H:%M:%S.%f %z"


class ReportKind(StrEnum):
    """The kinds of reports."""

    GPU_PANIC = "gpu panic"
    WATCHDOG = "watchdog panic"
    PANIC = "panic"
    JETSAM = "jetsam"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicReport:
    """One report in short. `at` is wall clock seconds, None = not in the report."""

    kind: ReportKind
    at: float | None
    summary: str
    process: str = ""
    """The process to blame by the report: the panicked task, or the largest of ours that ended."""
    process_bytes: int = 0
    is_ours: bool = False
    """Whether a process of ours was ended, or was the largest while the machine was short."""
    incident: str = ""
    """The system's id of what happened; several files may tell of one. "" = none is given."""
    file: str = ""

    @property
    def calls_for_care(self) -> bool:
        """Whether it speaks for the careful profile while it is recent."""
        if self.kind is ReportKind.JETSAM:
            return self.is_ours
        return self.kind is not ReportKind.UNREADABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The load that a node takes upon itself. `until_at` is wall clock seconds, None = for good."""

    name: Literal["normal", "careful"]
    reason: str = ""
    until_at: float | None = None
    max_running: int | None = None
    """The most sequences that an engine runs at once; None = as configured."""
    reserve_factor: float = 1.0
    """The configured reserve is multiplied by it."""


NORMAL = Profile(name="normal")


class Incident(NamedTuple):
    """What one or more reports tell of: wall clock seconds, a summary, the system's id or ""."""

    at: float
    summary: str
    id: str = ""


def parse_report(text: str, *, ours: Sequence[str] = OURS) -> PanicReport | None:
    """Read a report's text; None = it is none of these kinds. Raises ValueError."""
    header, body = _documents(text)
    kind = str(header.get("bug_type", ""))
    at = parse_time(header.get("timestamp") or body.get("date"))
    told = body.get("panicString")
    report = (
        _jetsam(body, at, ours)
        if kind == "298" or "largestProcess" in body
        else _panic(told if isinstance(told, str) else text, at)
    )
    incident = _clean(str(header.get("incident_id") or body.get("incident") or ""))
    return report and replace(report, incident=incident)


def parse_time(value: object) -> float | None:
    """Wall clock seconds of a report's time, `2026-03-31 09:43:10.00 +0900`; None = none."""
    try:
        return datetime.strptime(str(value), _TIME).timestamp()
    except (ValueError, OverflowError):
        return None


def read_reports(
    folders: Iterable[Path],
    *,
    since: float,
    limit: int = MAX_FILES,
    ours: Sequence[str] = OURS,
) -> tuple[PanicReport, ...]:
    """The newest `limit` reports of some folders that were written after `since`, newest first.

    Blocks. Folders that are not there, or may not be read, have none.
    """
    found = sorted((one for folder in folders for one in _candidates(folder)), reverse=True)
    recent = [(written, path) for written, path in found if written >= since][: max(0, limit)]
    reports = [_read(path, written, ours) for written, path in recent]
    return tuple(report for report in reports if report is not None)


def report_folders(platform: str, home: Path) -> tuple[Path, ...]:
    """The folders of reports of the machine and of a user; none on other systems than macOS."""
    if platform != "darwin":
        return ()
    places = (Path("/Library/Logs/DiagnosticReports"), home / "Library/Logs/DiagnosticReports")
    return tuple(folder for place in places for folder in (place, place / "Retired"))


def choose_profile(reports: Iterable[PanicReport], *, now: float) -> Profile:
    """The profile that reports call for, at `now` in wall clock seconds.

    It ends a week after the newest of them. A report from the future counts as written now.
    """
    recent = recent_incidents(reports, now=now)
    if not recent:
        return NORMAL
    at, summary, _ = recent[0]
    is_repeated = len(recent) > 1 and at - recent[1][0] < REPEATED_S
    more = f", and {len(recent) - 1} more such reports" if len(recent) > 1 else ""
    return Profile(
        name="careful",
        reason=f"{summary} on {day(at)}{more}; careful until {day(at + KEEP_S)}",
        until_at=at + KEEP_S,
        max_running=1 if len(recent) > 2 or is_repeated else 2,
        reserve_factor=1.5,
    )


def recent_incidents(reports: Iterable[PanicReport], *, now: float) -> tuple[Incident, ...]:
    """The incidents of the last week that call for care, the newest first. Several reports may tell
    of one; a report from the future counts as written now."""
    newest = sorted(
        (
            Incident(min(report.at, now), report.summary, report.incident)
            for report in reports
            if report.at is not None and report.calls_for_care and now - report.at < KEEP_S
        ),
        reverse=True,
    )
    kept: list[Incident] = []
    times = [at for at, _, incident in newest if incident]
    for at, summary, incident in sorted(newest, key=lambda one: not one.id):
        if incident:
            is_known = any(incident == other for _, _, other in kept)
        else:
            is_known = any(abs(at - when) < _INCIDENT_S for when in times)
            times.append(at)
        if not is_known:
            kept.append(Incident(at, summary, incident))
    return tuple(sorted(kept, reverse=True))


def find_profile(folders: Iterable[Path], *, now: float) -> tuple[Profile, tuple[PanicReport, ...]]:
    """Read the recent reports and choose. Blocks; raises nothing."""
    reports = read_reports(folders, since=now - KEEP_S)
    return choose_profile(reports, now=now), reports


def _documents(text: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The header's line and the body; empty where a part is no JSON object."""
    first, _, rest = text.partition("\n")
    header, body = _object(first), _object(rest)
    if not header and not body:
        return {}, _object(text)
    return header, body


def _object(text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _panic(text: str, at: float | None) -> PanicReport | None:
    # In JSON that was cut off, line breaks and quotes are still escaped.
    plain = text.replace("\\n", "\n").replace('\\"', '"').replace("\\/", "/")
    found = _PANIC.search(plain)
    if found is None:
        return None
    line = _clean(found[1].partition("\n")[0])
    task = _TASK.search(plain)
    kind = ReportKind.PANIC
    if "IOGPU" in line or "AGX" in line or "prepare count underflow" in line:
        kind = ReportKind.GPU_PANIC
    elif "watchdog timeout" in line:
        kind = ReportKind.WATCHDOG
    process = _clean(task[2]) if task else ""
    by = f" (in {process})" if process else ""
    return PanicReport(
        kind=kind, at=at, process=process, summary=f"the kernel panicked{by}: {line[:120]}"
    )


def _jetsam(body: Mapping[str, Any], at: float | None, ours: Sequence[str]) -> PanicReport:
    listed = body.get("processes")
    processes = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    page = _page_bytes(body)
    ended = [one for one in processes if _is_ended(one)]
    own = sorted(
        ((_pages(one) * page, _clean(str(one.get("name", "")))) for one in ended if _is(one, ours)),
        reverse=True,
    )
    reasons = sorted({_clean(str(one["reason"])) for one in ended})
    largest = _clean(str(body.get("largestProcess", "")))
    why = f" ({', '.join(reasons[:3])})" if reasons else ""
    if own:
        size, name = own[0]
        told = f"the system ended {name} for memory{why}"
        return _told_jetsam(at, told, name, size, is_ours=True)
    is_short = any(reason.startswith(_SHORTAGES) for reason in reasons)
    if is_short and largest.lower().startswith(tuple(ours)):
        told = (
            f"the system ended {len(ended)} processes for memory{why} while {largest} was largest"
        )
        return _told_jetsam(at, told, largest, 0, is_ours=True)
    told = f"the system ended {len(ended)} processes{why}, none of ours"
    return _told_jetsam(at, told, "", 0, is_ours=False)


def _told_jetsam(
    at: float | None, summary: str, process: str, size: int, *, is_ours: bool
) -> PanicReport:
    return PanicReport(
        kind=ReportKind.JETSAM,
        at=at,
        summary=summary,
        process=process,
        process_bytes=size,
        is_ours=is_ours,
    )


def _is_ended(process: Mapping[str, Any]) -> bool:
    reason = process.get("reason")
    return isinstance(reason, str) and bool(reason) and not reason.startswith(_HARMLESS)


def _is(process: Mapping[str, Any], ours: Sequence[str]) -> bool:
    return str(process.get("name", "")).lower().startswith(tuple(ours))


def _page_bytes(body: Mapping[str, Any]) -> int:
    status = body.get("memoryStatus")
    for part in (status if isinstance(status, dict) else {}, body):
        size = part.get("pageSize")
        if isinstance(size, int) and 0 < size <= 1 << 20:
            return size
    return 16384


def _pages(process: Mapping[str, Any]) -> int:
    pages = process.get("rpages")
    return pages if isinstance(pages, int) and 0 <= pages < 1 << 40 else 0


def _candidates(folder: Path) -> list[tuple[float, Path]]:
    """The time and path of each report of a folder. Links and pipes are none."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                if not _NAME.match(entry.name):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, Path(entry.path)))
    except OSError:
        return found
    return found


def _read(path: Path, written: float, ours: Sequence[str]) -> PanicReport | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
        report = parse_report(text, ours=ours)
    except (OSError, ValueError, OverflowError) as fault:
        return _unreadable(path, written, str(fault))
    if report is None:
        return _unreadable(path, written, "neither a panic nor a Jetsam report")
    at = written if report.at is None else report.at
    return replace(report, at=at, file=_clean(path.name))


def _unreadable(path: Path, written: float, why: str) -> PanicReport:
    return PanicReport(
        kind=ReportKind.UNREADABLE, at=written, summary=_clean(why)[:200], file=_clean(path.name)
    )


def _clean(text: str) -> str:
    """One line of printable signs: reports name processes, and a process may have any name."""
    return "".join(sign if sign.isprintable() else " " for sign in text).strip()[:200]


def day(at: float) -> str:
    """Write the day of wall clock seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return "an unknown day"
