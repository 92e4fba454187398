"""A process of its own that writes blocks and is killed while it does.

    child.py lines FOLDER      a writer is killed at its 1st, 2nd, ... line
    child.py moments FOLDER    writers are killed at any time, also within a call
    child.py disks FOLDER      a small disk is mounted there, filled, and made read-only

Writers are forked here, from a process without threads: starting Python a hundred times would
take the suite's time. Prints what was found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from kakeya.core.units import MIB
from kakeya.generation.retention import Retention
from kakeya.prefix.disk import files as disk_files
from kakeya.prefix.disk import kvb
from kakeya.prefix.disk.files import BlockFolder
from kakeya.prefix.disk.index import name_of
from tests.fakes import FakeClock
from tests.prefix.disk.world import block_of, config_of, opened

WATCHED = {disk_files.__file__, kvb.__file__}
AT = 1_700_000_000.0


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def killed_at(line: int, work: Callable[[], object]) -> Callable[[], None]:
    """Do work, and be killed when so many lines of the writing modules have begun."""
    left = [line]

    def trace(frame: FrameType, what: str, _: object) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if what == "line":
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def traced() -> None:
        sys.settrace(trace)
        work()
        sys.settrace(None)

    return traced


def lines(folder: BlockFolder) -> dict[str, object]:
    block, payload = block_of(1, size=3000)
    better, larger = replace(block, has_state=True, payload_bytes=4000), block_of(2, size=4000)[1]
    name = name_of(block.id, Retention.LONG)
    old = new = cut_off = 0
    wrong: list[str] = []
    for line in range(1, 1000):
        folder.wipe()
        folder.write(block, payload, Retention.LONG, AT)
        work = killed_at(line, lambda: folder.write(better, larger, Retention.LONG, AT))
        if not was_killed(forked(work)):
            break
        cut_off += bool(list(folder.folder.glob("*/.*.tmp")))
        contents = folder.scan()
        found: list[object] = [(one.block, one.name) for one in contents.files]
        whole = folder.verify([(name, block.id)], lambda: True)
        old += found == [(block, name)]
        new += found == [(better, name)]
        is_right = found in ([(block, name)], [(better, name)]) and whole.blocks == 1
        if not is_right or contents.damage or list(folder.folder.glob("*/.*")):
            wrong.append(f"line {line}: {contents}")
    return {"old": old, "new": new, "cut_off": cut_off, "wrong": wrong}


def moments(folder: BlockFolder) -> dict[str, object]:
    rng = random.Random(7)
    damaged = whole = 0
    for turn in range(15):

        def write_on(turn: int = turn) -> None:
            for seed in range(100_000):
                folder.write(*block_of(turn * 1000 + seed, size=50_000), Retention.LONG, AT)

        pid = forked(write_on)
        time.sleep(rng.uniform(0.005, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert was_killed(pid)
        contents = folder.scan()
        found = folder.verify([(one.name, one.block.id) for one in contents.files], lambda: True)
        damaged += len(contents.damage) + len(found.damage)
        whole += found.blocks
        folder.wipe()
    return {"damaged": damaged, "whole": whole}


def mounted(folder: Path, *options: str) -> None:
    subprocess.run(["mount", *options, str(folder)], check=True, timeout=10)


async def live_on(disk: Path) -> dict[str, object]:
    clock = FakeClock()
    config = config_of(retry_s=(5.0,))
    made = [block_of(seed, size=MIB) for seed in range(8)]
    async with opened(disk, config, clock=clock) as store:
        for number, one in enumerate(made[:6]):
            clock.advance(1)
            await store.put(*one)
            await store.flush()
            assert store.has(one[0].id), f"block {number} takes the place of the oldest"
        kept = len(store.ids())
        await store.sweep()
        assert store.stats().counts.write_failures == 0
        mounted(disk, "-o", "remount,ro")
        await store.put(*made[6])
        await store.flush()
        await store.put(*made[7])
        await store.sweep()
        failed = store.stats()
        readable = [await store.get(block.id) == (block, data) for block, data in made[3:6]]
        mounted(disk, "-o", "remount,rw")
        clock.advance(6)
        await store.put(*made[7])
        await store.flush()
        again = await store.get(made[7][0].id) == made[7]
    mounted(disk, "-o", "remount,ro")
    async with opened(disk, config, clock=clock) as store:
        await store.ready()
        restarted = await store.get(made[7][0].id) == made[7]
    return {
        "kept": kept,
        "failures": failed.counts.write_failures,
        "trouble": failed.trouble,
        "readable": readable,
        "again": again,
        "restarted": restarted,
    }


def disks(folder: BlockFolder) -> dict[str, object]:
    disk = folder.folder
    disk.mkdir()
    mounted(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    return asyncio.run(live_on(disk))


if __name__ == "__main__":
    how, where = sys.argv[1:]
    work = {"lines": lines, "moments": moments, "disks": disks}[how]
    print(json.dumps(work(BlockFolder(Path(where), quarantine_bytes=1 << 20))))
