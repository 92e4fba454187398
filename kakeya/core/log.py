"""Logging: standard library, a logger per module, key=value or JSON lines, to stderr or a file."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from kakeya.core.clock import Clock

LogFormat = Literal["text", "json"]
FILE_BYTES = 8 << 20
OLD_FILES = 4
"""A log file is renamed to `*.1` at `FILE_BYTES`; so many old ones are kept."""
WARN_S = 60.0
"""Seconds between two warnings of work that goes on failing."""
_FIELDS = "kakeya_fields"


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
    return json.dumps(text) if " " in text or not text or not text.isprintable() else text


def configure(
    log_format: LogFormat = "text", level: int = logging.INFO, file: Path | None = None
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
    root.handlers[:] = [handler]
    root.setLevel(level)
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


def _emit(log: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    if log.isEnabledFor(level):
        log.log(level, message, extra={_FIELDS: fields})


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
