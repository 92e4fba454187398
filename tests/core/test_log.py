"""Log lines: one event, one line, whatever its values hold."""

from __future__ import annotations

import logging

from kakeya.core.log import configure, event


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
