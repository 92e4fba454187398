"""Log lines: one event, one line, whatever its values hold."""

from __future__ import annotations

import logging

from kakeya.core import log as log_module
from kakeya.core.log import WARN_S, FailureLog, configure, event
from tests.fakes import FakeClock


def test_a_value_cannot_begin_a_line_of_its_own(capsys):
    log = logging.getLogger("kakeya.test")
    configure("text")
    try:
        event(log, "round", peer="a", error="x\n12:00:00\terror\r\x1b[2Kforged", empty="")
    finally:
        logging.getLogger("kakeya").handlers.clear()
        logging.getLogger("kakeya").propagate = True
    written = capsys.readouterr().err
    assert written.splitlines() == [written.rstrip("\n")]
    assert written.rstrip("\n").isprintable()
    assert "peer=a" in written
    assert 'empty=""' in written


def test_a_log_file_is_renamed_before_it_is_too_long(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log_module, "FILE_BYTES", 200)
    log, file = logging.getLogger("kakeya.test"), tmp_path / "logs" / "node.log"
    configure("json", file=file)
    try:
        for number in range(20):
            event(log, "a line", number=number)
    finally:
        for handler in logging.getLogger("kakeya").handlers:
            handler.close()
        logging.getLogger("kakeya").handlers.clear()
        logging.getLogger("kakeya").propagate = True
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
