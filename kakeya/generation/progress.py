"""How far a load is: a line from an engine to its agent, and a few words for people.

An engine that loads has no socket yet, so it says its progress in lines of its output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

_MARK = "@kakeya-load"
LINE_EVERY_S = 0.25
"""Least time between two lines of one phase."""


class LoadPhase(StrEnum):
    """A part of a load, in order."""

    START = "starting"
    FIND = "looking for its files"
    DOWNLOAD = "downloading its files"
    READ = "reading its weights"
    CHECK = "checking it"
    CANARY = "comparing the group with one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Bytes that were read, of all that will be; `total_bytes` 0 = the phase reads none. Of the
    canary of a ring group they are tokens."""

    phase: LoadPhase
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def share(self) -> float | None:
        """The share that is done; None = not known."""
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else None

    def describe(self) -> str:
        """The phase, the share that was read, or both."""
        if self.share is None:
            return self.phase.value
        share = f"{self.share:.0%}".replace("%", " %")
        return share if self.phase is LoadPhase.READ else f"{self.phase.value}, {share}"

    def line(self) -> str:
        """The line that says it."""
        return f"{_MARK} {self.phase.name} {self.done_bytes} {self.total_bytes}"

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """Read a line of an engine; None for any other line."""
        mark, *fields = line.split(" ")
        if mark != _MARK:
            return None
        try:
            phase, done, total = fields
            return cls(phase=LoadPhase[phase], done_bytes=int(done), total_bytes=int(total))
        except (ValueError, KeyError):
            return None


class LoadTeller:
    """Says the progress of a load in lines, not too often."""

    def __init__(
        self, say: Callable[[str], object], timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._timer = timer
        self._phase: LoadPhase | None = None
        self._said_s = 0.0

    def __call__(self, phase: LoadPhase, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Note the progress."""
        now_s = self._timer()
        if phase is self._phase and now_s < self._said_s + LINE_EVERY_S:
            return
        self._phase, self._said_s = phase, now_s
        told = LoadProgress(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)
        self._say(told.line() + "\n")
