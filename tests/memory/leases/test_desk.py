"""The desk of a command: it trusts no machine that is silent, and ends what it may end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.leases.desk import open_desk, read_available
from kakeya.memory.leases.lease import Wish
from kakeya.memory.machine.pressure import Reading


class Source:
    name = "toy"

    def __init__(self, answer: Reading | Exception) -> None:
        self.answer = answer

    async def read(self) -> Reading:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BROKEN = Source(OSError(5, "Input/output error"))
LEVEL = Source(Reading(level=PressureLevel.NOMINAL, source="kernel"))
FREE = Source(Reading(level=PressureLevel.NOMINAL, source="os", available_bytes=7))


async def test_a_source_that_cannot_be_read_hides_no_other() -> None:
    assert await read_available((BROKEN, LEVEL, FREE)) == 7


@pytest.mark.parametrize("sources", [(BROKEN,), (BROKEN, LEVEL), ()])
async def test_a_machine_that_tells_no_memory_has_not_all_of_it_to_give(
    sources: tuple[Source, ...],
) -> None:
    with pytest.raises(errors.PeerUnavailable, match="does not tell its free memory"):
        await read_available(sources)


async def test_processes_of_other_users_are_not_told_to_end_and_stop_no_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    async with open_desk(tmp_path, os.environ) as desk:
        async with desk.hold(Wish(name="job", size_bytes=MIB)) as lease:
            monkeypatch.setattr(os, "kill", refuse)
            assert await desk.stop_holders() == ()
            assert lease.pid == os.getpid()
