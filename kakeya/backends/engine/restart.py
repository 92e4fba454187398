"""Decide whether a dead child is restarted or given up. Pure, `now` is an argument.

The first restart is immediate, later ones wait 1, 2, 4, ... 60 s. Deaths are counted inside a
sliding window; at the limit the breaker opens and the model is given up with a sentence that
names the last exit. A child that ends with 2 refuses its configuration: no retry can help.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

CONFIGURATION_EXIT_CODE = 2
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a child. `returncode` is negative for a signal, as in `subprocess`.

    `cause` is the reason if the agent ended the child, else "".
    """

    returncode: int
    last_line: str = ""
    cause: str = ""

    def describe(self) -> str:
        """Write one clause: `signal SIGKILL`, `exit code 3: <the last line of its output>`."""
        if self.returncode < 0:
            how = f"signal {_signal_name(-self.returncode)}"
        else:
            how = f"exit code {self.returncode}"
        if self.cause and self.returncode in (-signal.SIGTERM, -signal.SIGKILL):
            return f"{how}, sent because it {self.cause}"
        if self.cause and self.returncode == 0:
            return f"{how}, asked for because it {self.cause}"
        # With any other end, the child may have been faster than the agent's signal.
        # Only a process that signals itself writes a line about it before. After any other signal,
        # and after an orderly end, the last line is about another subject.
        if self.last_line and (self.returncode > 0 or self.returncode == -signal.SIGABRT):
            return f"{how}: {self.last_line[:_MAX_REASON_CHARS]}"
        return how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartIn:
    """Restart the child after `delay_s`."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not restart the child; its owner has to act."""

    reason: str


Plan = RestartIn | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Waits before restarts, and the breaker."""

    backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    """Seconds before the restart after the 1st, 2nd, ... death in the window; the last repeats."""
    max_deaths: int = 5
    window_s: float = 600.0

    def recent(self, now: float, deaths: Sequence[float]) -> tuple[float, ...]:
        """List the deaths that still count at `now`."""
        return tuple(at for at in deaths if now - at < self.window_s)

    def after_exit(self, now: float, ended: Exit, deaths: Sequence[float]) -> Plan:
        """Decide after a death at `now`; `deaths` are the times of the earlier ones."""
        if ended.returncode == CONFIGURATION_EXIT_CODE:
            return GiveUp(reason=ended.last_line or "it refused its configuration (exit code 2)")
        count = len(self.recent(now, deaths)) + 1
        if count >= self.max_deaths:
            return GiveUp(
                reason=f"it died {count} times in {self.window_s / 60:.3g} minutes, "
                f"the last time by {ended.describe()}"
            )
        delay_s = self.backoff_s[min(count - 1, len(self.backoff_s) - 1)]
        return RestartIn(delay_s=delay_s, reason=f"it ended by {ended.describe()}")
