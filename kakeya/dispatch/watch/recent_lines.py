"""The last lines of the log, kept in memory for pages: what changed here lately, and when."""

from __future__ import annotations

import logging
from collections import deque
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.figures import Json
from kakeya.core.log import fields_of

KEPT_S = 3600.0
MOST_LINES = 200
_NO_NEWS = frozenset({"answered", "round"})
"""Messages of work as usual."""
_OF_CHILD = "child"
"""The field of lines that engine children write: the agent tells of them itself."""


class RecentLines(logging.Handler):
    """Keeps the lines at info and above of the last hour, while its `with` is open.

    A line that says the same of the same thing as the last one takes its place, with a count.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(logging.INFO)
        self._clock = clock
        self._lines: deque[Json] = deque(maxlen=MOST_LINES)

    def __enter__(self) -> Self:
        logging.getLogger("kakeya").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("kakeya").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        fields = fields_of(record)
        is_usual = record.getMessage() in _NO_NEWS or _OF_CHILD in fields
        if is_usual and record.levelno < logging.WARNING:
            return
        line: Json = {
            "at": round(self._clock.wall(), 1),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("kakeya."),
            "what": record.getMessage(),
            "fields": {name: _told(one) for name, one in fields.items()},
            "times": 1,
        }
        last = self._lines[-1] if self._lines else {}
        if _words(line) == _words(last):
            self._lines.pop()
            line["times"] = int(str(last["times"])) + 1
        self._lines.append(line)

    def told(self) -> list[Json]:
        """The lines of the last hour, the newest first."""
        since = self._clock.wall() - KEPT_S
        self.acquire()  # threads write lines meanwhile
        try:
            lines = reversed(tuple(self._lines))
        finally:
            self.release()
        return [line for line in lines if float(str(line["at"])) >= since]


def _told(value: object) -> object:
    return value if isinstance(value, bool | int | float | None) else str(value)


def _words(line: Json) -> list[object]:
    fields = line.get("fields")
    named = fields.items() if isinstance(fields, dict) else ()
    return [line.get("room"), line.get("what"), *list(named)[:1]]
