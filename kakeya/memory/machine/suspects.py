"""Models that were in memory when the machine panicked, and how they are loaded after it.

    one panic                  as the node's profile says (`panics`)
    a second within 24 hours   least: one sequence, half of the room for KV, no drafts
    a third                    not at all, until a week has passed or `memory.after_panics` names it

The stays of models in memory are written to a file before each load, since a machine that panics
writes nothing. Decisions are pure; reading and writing block.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.memory.machine.panics import KEEP_S, REPEATED_S, Incident, day

_log = logging.getLogger(__name__)
STAYS = "stays.json"
_MOST_STAYS = 1000
_MAX_FILE_BYTES = 1 << 20


class LoadStep(IntEnum):
    """How a model is loaded: the higher, the less it may do."""

    USUAL = 0
    LEAST = 1
    REFUSED = 2


class Stay(NamedTuple):
    """A time of a model in memory, load included, in wall clock seconds. `until_at` None = it has
    not ended, or the end was not written down."""

    model_id: str
    from_at: float
    until_at: float | None = None

    def holds(self, at: float) -> bool:
        """Whether the model was in memory at a time."""
        return self.from_at <= at and (self.until_at is None or at <= self.until_at)


def begun(stays: Sequence[Stay], model_id: str, now: float) -> tuple[Stay, ...]:
    """Add the begin of a stay; an earlier one that is open ended with its node, or its machine."""
    return (*ended(stays, model_id, now), Stay(model_id, now))[-_MOST_STAYS:]


def ended(stays: Sequence[Stay], model_id: str, now: float) -> tuple[Stay, ...]:
    """Write down the end of a model's open stay, if there is one."""
    return tuple(
        one._replace(until_at=max(now, one.from_at))
        if one.model_id == model_id and one.until_at is None
        else one
        for one in stays
    )


def worth_keeping(
    stays: Iterable[Stay], incidents: Sequence[Incident], now: float
) -> tuple[Stay, ...]:
    """The stays that an incident, or one whose report is yet to come, may lie in."""
    return tuple(
        one
        for one in stays
        if one.until_at is None
        or now - one.until_at < REPEATED_S
        or any(one.holds(happened.at) for happened in incidents)
    )


def series_of(
    model_id: str, stays: Iterable[Stay], incidents: Sequence[Incident]
) -> tuple[Incident, ...]:
    """The last incidents with a model in memory, each within REPEATED_S of the one before; the
    newest first, as `incidents`."""
    own = [stay for stay in stays if stay.model_id == model_id]
    series: list[Incident] = []
    for happened in incidents:
        if not any(stay.holds(happened.at) for stay in own):
            continue
        if series and series[-1].at - happened.at >= REPEATED_S:
            break
        series.append(happened)
    return tuple(series)


def load_step(series: Sequence[Incident], *, is_allowed: bool) -> LoadStep:
    """The step after a series; `is_allowed`: the owner wants the model in any case."""
    step = LoadStep(min(max(0, len(series) - 1), LoadStep.REFUSED))
    return min(step, LoadStep.LEAST) if is_allowed else step


def refusal(model_id: str, series: Sequence[Incident]) -> str:
    """The reason for the refusal of a model, in one sentence."""
    last = series[0]
    return (
        f"model {model_id} is not loaded: with it in memory the machine panicked, or ran out of "
        f"memory, {len(series)} times, each within 24 hours of the one before, the last time on "
        f"{day(last.at)} ({last.summary}); name it in memory.after_panics to load it all the same, "
        f"with one sequence, half of its room and no drafts, or wait until {day(last.at + KEEP_S)}"
    )


class StayFile:
    """`stays.json` in a node's data directory; its methods block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STAYS
        self.stays = self._load()

    def begin(self, model_id: str, now: float) -> None:
        """Write down that a model is about to be loaded."""
        self._save(begun(self.stays, model_id, now))

    def end(self, model_id: str, now: float) -> None:
        """Write down that a model has left memory."""
        self._save(ended(self.stays, model_id, now))

    def tidy(self, incidents: Sequence[Incident], now: float) -> None:
        """Forget stays that no incident can lie in any more."""
        kept = worth_keeping(self.stays, incidents, now)
        if kept != self.stays:
            self._save(kept)

    def _load(self) -> tuple[Stay, ...]:
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError("it is too large")  # noqa: TRY301
            return tuple(_stay(fields) for fields in json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, RecursionError) as problem:
            self._warn(problem)
            return ()

    def _save(self, stays: tuple[Stay, ...]) -> None:
        self.stays = stays
        try:
            write_atomically(self._path, json.dumps(stays).encode())
        except OSError as problem:  # models are served all the same
            self._warn(problem)

    def _warn(self, problem: Exception) -> None:
        what = "the stays of models in memory cannot be kept"
        event(_log, what, level=logging.WARNING, file=self._path, problem=problem)


def _stay(fields: object) -> Stay:
    match fields:
        case [str(model_id), int() | float() as begin, None | int() | float() as end]:
            return Stay(model_id, begin, end)
    raise ValueError(f"{fields!r} is no stay")
