"""Several processes on the same slabs: nobody sees half a block, and the dead hold nothing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kakeya.core.errors import PageFreed
from kakeya.core.units import KIB
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.shared_arena import PageArena

PAGE = 512 * KIB
DEADLINE_S = 20.0


class Engine:
    """A child process, and its holder in the arena."""

    def __init__(self, arena: PageArena, name: str) -> None:
        self.holder = arena.pool.holder(name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.memory.pages.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self.answer() == {"ready": True}

    def tell(self, do: str, ref: PageRef | None = None, byte: int = 0) -> None:
        request = {"do": do, "byte": byte} | ({"ref": asdict(ref)} if ref else {})
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        return answer

    def report(self) -> dict[str, int]:
        self.tell("report")
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(DEADLINE_S) == -signal.SIGKILL

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


class Fleet:
    """An arena of two slabs with three engines on it."""

    def __init__(self, folder: Path) -> None:
        self.arena = PageArena(
            PageConfig(page_bytes=PAGE, slab_pages=8, total_pages=16),
            folder=folder,
            rng=random.Random(str(folder)),
        )
        self.now = 1.0
        self.arena.at(self.now)
        self.arena.grow(2)
        self.agent = self.arena.pool.holder("agent")
        self.kv = self.arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self.rng = random.Random(3)
        self.engines = [Engine(self.arena, f"engine-{n}") for n in range(3)]

    def put(self, byte: int) -> PageRef:
        self.now += 0.001
        self.arena.at(self.now)
        length = self.rng.randint(1, 3 * PAGE)
        with self.arena.prepare(self.kv, length, self.agent) as filling:
            filling.view[:] = bytes([byte]) * length
            filling.commit()
            return filling.ref

    def churn(self, done: Callable[[], bool]) -> None:
        """Fill and evict, telling everybody of each block, until `done` or the deadline."""
        until = time.monotonic() + DEADLINE_S
        byte = 0
        while not done():
            assert time.monotonic() < until, [engine.report() for engine in self.alive()]
            for _ in range(20):
                byte = byte % 250 + 1
                ref = self.put(byte)
                for engine in self.alive():
                    engine.tell("watch", ref, byte)

    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.process.poll() is None]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.arena.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_readers_see_whole_blocks_or_none_while_the_owner_evicts_and_one_is_killed(
    fleet: Fleet,
) -> None:
    arena = fleet.arena
    victim, second, third = fleet.engines
    pinned: dict[str, PageRef] = {}
    for byte, (name, engines) in enumerate(
        {"victim": [victim], "both": [victim, second], "third": [third]}.items(), start=1
    ):
        pinned[name] = ref = fleet.put(byte)
        for engine in engines:
            arena.hold(ref, engine.holder).pin()
            engine.tell("pin", ref, byte)

    def busy(engine: Engine) -> bool:
        report = engine.report()
        return report["whole"] > 100 and report["stale"] > 100

    fleet.churn(lambda: all(busy(engine) for engine in fleet.engines))
    unfinished = arena.prepare(fleet.kv, PAGE, victim.holder)
    victim.tell("fill", unfinished.ref, 251)
    assert victim.answer() == {"filled": 251}
    held = {name: arena.hold(ref, fleet.agent).block for name, ref in pinned.items()}
    assert {name: block.pins for name, block in held.items()} == {
        "victim": 1,
        "both": 2,
        "third": 1,
    }

    victim.kill()
    assert arena.close_holder(victim.holder) == 2

    assert {name: block.pins for name, block in held.items()} == {
        "victim": 0,
        "both": 1,
        "third": 1,
    }
    assert not unfinished.block.is_live
    with pytest.raises(PageFreed):
        unfinished.commit()
    stats = arena.pool.stats()
    assert stats.pinned_pages == held["both"].pages + held["third"].pages
    assert stats.free_pages + sum(pages for _, pages in stats.by_content) == stats.total_pages

    before = arena.pool.evicted_pages
    fleet.churn(lambda: not held["victim"].is_live and arena.pool.evicted_pages > before + 200)
    assert held["both"].is_live
    assert held["third"].is_live
    for engine in (second, third):
        report = engine.report()
        assert (report["torn"], report["changed"]) == (0, 0)
        assert report["whole"] > 100


def test_what_an_engine_computed_outlives_it(fleet: Fleet) -> None:
    writer, reader, _ = fleet.engines
    filling = fleet.arena.prepare(fleet.kv, PAGE, writer.holder)
    writer.tell("fill", filling.ref, 77)
    assert writer.answer() == {"filled": 77}
    filling.commit()
    ref = filling.ref
    writer.kill()
    assert fleet.arena.close_holder(writer.holder) == 0
    assert bytes(fleet.arena.view(filling.block)) == bytes([77]) * PAGE
    reader.tell("watch", ref, 77)
    until = time.monotonic() + DEADLINE_S
    while reader.report()["whole"] == 0:
        assert time.monotonic() < until
    assert reader.report()["torn"] == 0


def test_the_child_notices_a_block_that_changes_under_it(fleet: Fleet) -> None:
    """A control: the arena's owner breaks its own rule."""
    engine = fleet.engines[0]
    ref = fleet.put(1)
    engine.tell("watch", ref, 1)
    engine.tell("pin", ref, 1)
    fleet.arena.view(fleet.arena.hold(ref, fleet.agent).block)[:1] = b"\x02"
    until = time.monotonic() + DEADLINE_S
    while not (engine.report()["torn"] and engine.report()["changed"]):
        assert time.monotonic() < until
