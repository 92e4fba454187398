"""Logging: standard library, a logger per module, key=value or JSON lines, to stderr or a file."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, TypeAlias

from kakeya.core.clock import Clock

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FILE_BYTES = 8 << 20
OLD_FILES = 4
"""A log file is renamed to `*.1` at `FILE_BYTES`; so many old ones are kept."""
WARN_S = 60.0
"""Seconds between two warnings of work that goes on failing."""
FOLD_S = 60.0
"""A line that repeats the last one of its logger within so long is counted, and told once more."""
_FIELDS = "kakeya_fields"
_APART = "kakeya_apart"
_MOST_SAID = 1024
"""Lines that are remembered, so that others are folded into them."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = fields_of(record)
        tail = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        room = record.name.removeprefix("kakeya.")
        line = f"{stamp} {record.levelname.lower():<7} {room}: {record.getMessage()}{tail}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _quoted(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    # Not printable: a line break in the text of a peer would begin a line that looks like ours.
    is_printable = text.isprintable()
    if text and " " not in text and is_printable:
        return text
    return json.dumps(text, ensure_ascii=not is_printable)


_Key: TypeAlias = tuple[str, object]
"""A logger, and what its line says; None = any line."""


class _Folded(logging.Handler):
    """Hands records on to a handler; those that repeat the last of their logger are counted.

    A line that names fields which tell it apart from others repeats any of the last minute that has
    the same without them: requests that are refused in loops come in turns.

    What is counted is told once `FOLD_S` are over, before the next line of any logger, or at the
    end. Lines for debugging are never folded, and numbers with a fraction are no difference: they
    are measured times.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target
        self._last: dict[_Key, tuple[object, logging.LogRecord]] = {}
        """What each logger said last, and when it was first said in a row."""
        self._repeated: dict[_Key, tuple[int, logging.LogRecord]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record on, or count it."""
        said = _said(record)
        key = (record.name, said if getattr(record, _APART, ()) else None)
        for other in [one for one in self._repeated if self._is_over(one, record.created)]:
            self._tell(other)
        before = self._last.get(key)
        is_same = before is not None and before[0] == said and record.levelno > logging.DEBUG
        if is_same and not self._is_over(key, record.created):
            self._repeated[key] = (self._repeated.get(key, (0, record))[0] + 1, record)
            return
        self._tell(key)
        self._last.pop(key, None)
        self._last[key] = (said, record)
        if len(self._last) > _MOST_SAID:
            self._tell(oldest := next(iter(self._last)))
            del self._last[oldest]
        self._target.handle(record)

    def close(self) -> None:
        """Tell what was counted, and close the other handler."""
        for key in list(self._repeated):
            self._tell(key)
        self._target.close()
        super().close()

    def _is_over(self, key: _Key, at: float) -> bool:
        return at - self._last[key][1].created >= FOLD_S

    def _tell(self, key: _Key) -> None:
        if found := self._repeated.pop(key, None):
            count, last = found
            setattr(last, _FIELDS, {**fields_of(last), "repeated": count})
            self._target.handle(last)


def _said(record: logging.LogRecord) -> object:
    apart = getattr(record, _APART, ())
    told = tuple(
        (key, str(one))
        for key, one in fields_of(record).items()
        if not isinstance(one, float) and key not in apart
    )
    return record.levelno, record.getMessage(), told


def configure(
    log_format: LogFormat = "text", level: LogLevel = "info", file: Path | None = None
) -> None:
    """Send every `kakeya` record to a file, None = stderr. Called once, by a composition root.

    Raises OSError for a file that cannot be written.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(
            file, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8"
        )
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger("kakeya")
    root.handlers[:] = [_Folded(handler)]
    root.setLevel(level.upper())
    root.propagate = False


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """The fields of a line."""
    found: Mapping[str, object] = getattr(record, _FIELDS, {})
    return found


def event(
    log: logging.Logger, message: str, *, level: int = logging.INFO, **fields: object
) -> None:
    """Log one line with key=value fields."""
    _emit(log, level, message, fields)


def event_of_many(
    log: logging.Logger,
    message: str,
    fields: Mapping[str, object],
    *,
    apart: Collection[str],
    level: int = logging.INFO,
) -> None:
    """Log one line as `event`. Lines that differ in the fields of `apart` alone are the same news,
    also where others come between them."""
    _emit(log, level, message, fields, apart)


def _emit(
    log: logging.Logger,
    level: int,
    message: str,
    fields: Mapping[str, object],
    apart: Collection[str] = (),
) -> None:
    if log.isEnabledFor(level):
        log.log(level, message, extra={_FIELDS: fields, _APART: apart})


@contextmanager
def span(log: logging.Logger, name: str, **fields: object) -> Iterator[None]:
    """Log `name` as done or failed, with its duration in seconds."""
    started = time.monotonic()
    try:
        yield
    except BaseException as failure:
        timed = {"seconds": time.monotonic() - started, "error": repr(failure), **fields}
        _emit(log, logging.WARNING, f"{name} failed", timed)
        raise
    _emit(log, logging.INFO, f"{name} done", {"seconds": time.monotonic() - started, **fields})


class CountLog:
    """Counts events of one kind, and tells at most once a minute how many there were."""

    def __init__(self, log: logging.Logger, message: str, clock: Clock, *, usual: int = 0) -> None:
        """A line says `message` and the count since the last one.

        It is a warning; where some are `usual`, only in the second minute in a row with more.
        """
        self._log = log
        self._message = message
        self._clock = clock
        self._usual = usual
        self._told = 0
        self._told_mono = -math.inf
        self._more_mono = -math.inf
        self.total = 0

    def add(self, count: int = 1) -> None:
        """Count, and tell if a minute is over since the last line; called with 0 to tell alone."""
        self.total += count
        new, mono = self.total - self._told, self._clock.mono()
        if new and mono - self._told_mono >= WARN_S:
            self._told, self._told_mono = self.total, mono
            level = logging.INFO
            if new > self._usual:
                if not self._usual or mono - self._more_mono < 2 * WARN_S:
                    level = logging.WARNING
                self._more_mono = mono
            event(self._log, self._message, level=level, count=new, in_all=self.total)


class FailureLog:
    """Counts failures of work that is tried again, and warns of them at most once a minute.

    `error` is the reason of the latest failure, "" after a success.
    """

    def __init__(
        self, log: logging.Logger, message: str, clock: Clock, *, retry_in_s: float
    ) -> None:
        """A warning says `message` and when the next try is."""
        self._log = log
        self._message = message
        self._clock = clock
        self._retry_in_s = retry_in_s
        self._warned_mono = -math.inf
        self.count = 0
        self.error = ""

    def failed(self, error: str) -> None:
        """Count a failure, and warn of it unless the last warning is younger than `WARN_S`."""
        self.count += 1
        self.error = error
        if self._clock.mono() - self._warned_mono >= WARN_S:
            self._warned_mono = self._clock.mono()
            event(
                self._log,
                self._message,
                level=logging.WARNING,
                problem=error,
                failures=self.count,
                retry_in_s=self._retry_in_s,
            )

    def succeeded(self) -> None:
        """Note that the latest try did not fail."""
        self.error = ""
