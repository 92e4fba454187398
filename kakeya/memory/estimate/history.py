"""Measured sizes and load times of models, by their content and their use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_high

from kakeya.core import errors

KEPT = 8
"""Measurements of one model that count; an outlier is forgotten after so many loads."""
WORKING_SET = ("metal", "working set")
"""The record of the limit that Metal told an engine of this machine."""
_LOADS = ", ms of a load"
MAX_MODELS = 512
"""Records that are kept; those measured longest ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """The newest measurements of one model, oldest first. Units: bytes, or milliseconds of loads
    in a record of their own."""

    digest: str
    kind: str
    measured: tuple[int, ...]


class SizeHistory:
    """Measured bytes of models after their load, without keys and values of requests."""

    def __init__(self, records: Iterable[SizeRecord] = ()) -> None:
        self._records = {(one.digest, one.kind): one for one in records}

    def note(self, digest: str, kind: str, measured_bytes: int, kv_bytes: int = 0) -> None:
        """Note the measured bytes of a loaded model, and how many of them are KV.

        A measurement of 0 bytes does not count. Raises InvalidArgument below 0.
        """
        if min(measured_bytes, kv_bytes) < 0:
            raise errors.InvalidArgument(
                f"measured {measured_bytes} bytes with {kv_bytes} of KV; at least 0 is possible"
            )
        base = measured_bytes - kv_bytes
        if base <= 0 or not digest:
            return
        before = self._records.pop((digest, kind), None)
        measured = (*(before.measured if before else ()), base)[-KEPT:]
        self._records[digest, kind] = SizeRecord(digest, kind, measured)
        while len(self._records) > MAX_MODELS:
            self._records.pop(next(iter(self._records)))

    def note_load(self, digest: str, kind: str, load_s: float) -> None:
        """Note the seconds that a load of a model took."""
        self.note(digest, kind + _LOADS, max(1, round(1000 * load_s)))

    def load_s(self, digest: str, kind: str) -> float | None:
        """The usual seconds of a load, so that one from a cold disk does not count alone; None =
        never measured."""
        record = self._records.get((digest, kind + _LOADS))
        return median_high(record.measured) / 1000 if record else None

    def peak_bytes(self, digest: str, kind: str) -> int | None:
        """The largest of the newest measurements; None = never measured."""
        record = self._records.get((digest, kind))
        return max(record.measured) if record else None

    def newest_bytes(self, digest: str, kind: str) -> int | None:
        """The last measurement; None = never measured."""
        record = self._records.get((digest, kind))
        return record.measured[-1] if record else None

    def snapshot(self) -> tuple[SizeRecord, ...]:
        """All records, those noted longest ago first; equal when nothing was noted between."""
        return tuple(self._records.values())
