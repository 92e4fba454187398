"""Log lines: one event, one line, whatever its values hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from kakeya.core import log as log_module
from kakeya.core.log import FOLD_S, WARN_S, CountLog, FailureLog, configure, event, event_of_many
from tests.fakes import FakeClock


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of the product, configured by its test."""
    yield logging.getLogger("kakeya.test")
    root = logging.getLogger("kakeya")
    for handler in root.handlers:
        handler.close()
    root.handlers.clear()
    root.propagate = True


def test_a_value_cannot_begin_a_line_of_its_own(log, capsys):
    configure("text")
    event(log, "round", peer="a", error="x\n12:00:00\terror\r\x1b[2Kforged", empty="")
    written = capsys.readouterr().err
    assert written.splitlines() == [written.rstrip("\n")]
    assert written.rstrip("\n").isprintable()
    assert "peer=a" in written
    assert 'empty=""' in written


def test_the_letters_of_every_language_stay_as_they_are(log, capsys):
    configure("text")
    event(log, "loading", folder="/Volumes/Grüße an é", sign="a \u202e b")
    written = capsys.readouterr().err
    assert 'folder="/Volumes/Grüße an é"' in written
    assert "\\u202e" in written


def test_a_line_that_repeats_the_last_of_its_logger_is_told_once_more(log, capsys, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now * 1e9))
    now = 1_000_000.0
    other = logging.getLogger("kakeya.other")
    configure("text", "debug")
    for _ in range(3):
        event(log, "refused", host="a", seconds=now / 7)
        event(other, "busy", level=logging.DEBUG)
        now += 1.0
    event(log, "refused", host="b")
    event(log, "refused", host="a")
    event(log, "refused", host="a")
    now += FOLD_S
    event(other, "calm")
    event(log, "refused", host="a")
    event(log, "refused", host="a")
    logging.getLogger("kakeya").handlers[0].close()
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(" seconds")[0] for line in lines if "refused" in line] == [
        "refused host=a",
        "refused host=a",
        "refused host=b",
        "refused host=a",
        "refused host=a repeated=1",
        "refused host=a",
        "refused host=a repeated=1",
    ]
    assert "repeated=2" in lines[4]
    assert lines.count("busy") == 3


def test_refusals_in_loops_are_folded_though_they_come_in_turns(log, capsys, monkeypatch):
    monkeypatch.setattr("kakeya.core.log._MOST_SAID", 3)
    configure("text", "info")
    for number in range(4):
        for path in ("/a", "/b"):
            event_of_many(log, "refused", {"path": path, "id": number}, apart=("id",))
    for path in ("/c", "/d", "/e"):  # what is forgotten is told before
        event_of_many(log, "refused", {"path": path, "id": 9}, apart=("id",))
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "refused path=/a id=0",
        "refused path=/b id=0",
        "refused path=/c id=9",
        "refused path=/a id=3 repeated=3",
        "refused path=/d id=9",
        "refused path=/b id=3 repeated=3",
        "refused path=/e id=9",
    ]


def test_less_than_the_chosen_level_is_left_out(log, capsys):
    configure("text", "warning")
    event(log, "small")
    event(log, "large", level=logging.WARNING)
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["warning test: large"]


def test_a_log_file_is_renamed_before_it_is_too_long(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log_module, "FILE_BYTES", 200)
    file = tmp_path / "logs" / "node.log"
    configure("json", file=file)
    for number in range(20):
        event(log, "a line", number=number)
    assert capsys.readouterr().err == ""
    kept = sorted(path.name for path in file.parent.iterdir())
    assert kept == ["node.log", *(f"node.log.{age}" for age in range(1, 5))]
    assert all(path.stat().st_size <= 200 for path in file.parent.iterdir())
    assert '"number": 19' in file.read_text()


def test_of_many_failures_each_is_counted_and_one_a_minute_is_told(caplog):
    clock = FakeClock()
    failures = FailureLog(logging.getLogger("test"), "not saved", clock, retry_in_s=7.0)
    for number in range(1, 121):
        failures.failed(f"reason {number}")
        clock.advance(WARN_S / 20)
    assert (failures.count, failures.error) == (120, "reason 120")
    told = [record.kakeya_fields for record in caplog.records]
    assert [(one["problem"], one["failures"], one["retry_in_s"]) for one in told] == [
        (f"reason {number}", number, 7.0) for number in range(1, 121, 20)
    ]
    failures.succeeded()
    assert (failures.count, failures.error) == (120, "")


def test_events_are_counted_told_once_a_minute_and_warned_of_where_unusual(caplog):
    clock = FakeClock()
    caplog.set_level(logging.INFO)
    refused = CountLog(logging.getLogger("test"), "refused", clock, usual=2)
    refused.add(0)
    for _ in range(5):
        refused.add(2)
    clock.advance(WARN_S)
    refused.add(0)
    refused.add(0)
    clock.advance(WARN_S)
    refused.add(3)
    clock.advance(2 * WARN_S)
    refused.add(3)
    told = [record.kakeya_fields for record in caplog.records]
    later = [{"count": 3, "in_all": 13}, {"count": 3, "in_all": 16}]
    assert told == [{"count": 2, "in_all": 2}, {"count": 8, "in_all": 10}, *later]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING", "INFO"]
