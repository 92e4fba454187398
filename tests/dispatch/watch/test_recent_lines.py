from __future__ import annotations

import logging
import sys
import threading

from kakeya.core.log import event
from kakeya.dispatch.watch.recent_lines import KEPT_S, MOST_LINES, RecentLines
from tests.fakes import FakeClock

LOG = logging.getLogger("kakeya.tests.recent")


def test_the_lines_of_the_last_hour_are_kept_with_their_fields(caplog) -> None:
    clock = FakeClock()
    with caplog.at_level(logging.INFO, logger="kakeya"), RecentLines(clock) as lines:
        event(LOG, "model ready", model="a", seconds=1.5)
        clock.advance(KEPT_S - 1)
        event(LOG, "a better link was lost", level=logging.WARNING, node="b")
        event(LOG, "answered", status=200)
        event(LOG, "weights loaded", child="a")
        event(LOG, "seen by developers", level=logging.DEBUG)
        told = lines.told()
        assert [(one["what"], one["level"]) for one in told] == [
            ("a better link was lost", "warning"),
            ("model ready", "info"),
        ]
        assert told[1]["fields"] == {"model": "a", "seconds": 1.5}
        clock.advance(2)
        assert [one["what"] for one in lines.told()] == ["a better link was lost"]
    event(LOG, "unseen", level=logging.ERROR)
    assert len(lines.told()) == 1


def test_what_repeats_is_one_line_and_all_are_bounded(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="kakeya"), RecentLines(FakeClock()) as lines:
        for share in range(5):
            event(LOG, "model is loading", model="a", share=share)
        event(LOG, "model is loading", model="b", share=0)
        first, second = lines.told()
        assert (second["times"], second["fields"]) == (5, {"model": "a", "share": 4})
        assert first["times"] == 1
        for number in range(2 * MOST_LINES):
            event(LOG, "node is new", node=number)
        assert len(lines.told()) == MOST_LINES


def test_lines_are_told_while_other_threads_write_some(caplog, monkeypatch) -> None:
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            event(LOG, "node is new", node=(number := number + 1))

    before = sys.getswitchinterval()
    with RecentLines(FakeClock()) as lines:
        monkeypatch.setattr(logging.getLogger("kakeya"), "propagate", False)
        caplog.set_level(logging.INFO, logger="kakeya")
        writer = threading.Thread(target=write)
        writer.start()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(500):
                lines.told()
        finally:
            sys.setswitchinterval(before)
            is_over.set()
            writer.join()
