"""How long an adapter takes to be had: in a slot, in pages, on disk; 10,000 are registered.

The engine is a real child process with `kakeya-tiny`, the pages are shared memory. The measured
adapters have rank 8 on every linear layer; the 10,000 beside them are small. For each tier:

    acquire    until the adapter is in a slot and leased
    behind     of those in no slot: how much later the first token of a request comes than that of
               the same request afterwards, when it is in one: what a user waits for it

The baseline of both is the goal's own figure for the tier: hot 100 us, warm 1 ms, cold 10 ms.
`at_reference` is our figure divided by `machine_x`, which says how slow the machine was meanwhile;
`met` goes by the figure.

    .venv/bin/python -m benchmarks.adapter_acquire [--registered 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.report import at_reference, emit, machine_factor, median, percentile
from kakeya.adapters.files.packed import digest, pack, unpack
from kakeya.adapters.files.store import AdapterRecord, AdapterStore
from kakeya.adapters.manager import AdapterManager
from kakeya.adapters.tiers import Tier
from kakeya.backends.adapted import AdaptedModel
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import engine_command
from kakeya.backends.resident import ResidentModel
from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.node.adapters import ADAPTER_FOLDER
from kakeya.node.memory import EngineSetup, NodeMemory
from kakeya.node.pages import NodePages
from tests.adapters.adapter_folders import write_adapter

TINY = "kakeya-tiny"
GOALS_S = {Tier.HOT: 100e-6, Tier.WARM: 1e-3, Tier.COLD: 10e-3}
MEASURED = 24
"""Adapters of rank 8; more than there are slots, so that each is displaced before its next turn."""
ROUNDS = 8
PROMPT = tuple(range(1, 17))
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (256, 128),
    "self_attn.v_proj": (256, 128),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (256, 704),
    "mlp.up_proj": (256, 704),
    "mlp.down_proj": (704, 256),
}


def main() -> None:
    """Measure, and print one line for each tier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registered", type=int, default=10_000)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), options.registered))


def adapter(folder: Path, seed: int, *, rank: int, names: tuple[str, ...]) -> bytes:
    """A packed random adapter."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in range(4):
        for name in names:
            ins, outs = SHAPES[name]
            path = f"model.layers.{layer}.{name}"
            arrays[f"{path}.lora_a"] = rng.normal(0, 0.02, (ins, rank)).astype(np.float32)
            arrays[f"{path}.lora_b"] = rng.normal(0, 0.02, (rank, outs)).astype(np.float32)
    return pack(write_adapter(folder, arrays, rank=rank))


def fill(folder: Path, registered: int) -> dict[str, float]:
    """Write the files of all adapters, as registering does; what that took."""
    store = AdapterStore(folder / ADAPTER_FOLDER)
    small = adapter(folder / "small", 0, rank=1, names=("self_attn.q_proj",))
    began = time.perf_counter()
    for number in range(registered):
        store.save(record(f"small{number}", small), small)
    small_s = time.perf_counter() - began
    sizes = []
    for number in range(MEASURED):
        packed = adapter(folder / "big", number + 1, rank=8, names=tuple(SHAPES))
        store.save(record(f"big{number}", packed), packed)
        sizes.append(len(packed))
    disk = sum(path.stat().st_size for path in store.folder.iterdir())
    return {
        "register_ms": small_s / max(1, registered) * 1e3,
        "disk_mb": disk / 1e6,
        "packed_kb": sizes[0] / 1e3,
    }


def record(name: str, packed: bytes) -> AdapterRecord:
    """What registering notes of an adapter."""
    found = unpack(packed)
    return AdapterRecord(
        name=name,
        base=TINY,
        owner="",
        rank=found.rank,
        precision=found.precision.value,
        digest=digest(packed),
        packed_bytes=len(packed),
        fingerprint="",
        registered_at=0.0,
    )


async def measure(folder: Path, registered: int) -> None:
    """Start a node's memory, one engine and its adapters; take the times."""
    facts = await asyncio.to_thread(fill, folder, registered)
    clock = SystemClock()
    settings = await asyncio.to_thread(config.load, ("--data-dir", str(folder)), {})
    spec = ModelSpec(model_id=TINY, source=TINY, role=ModelRole.VERIFIER)
    setup = EngineSetup(
        command=engine_command("text", adapters=settings.adapters),
        options=EngineOptions(),
        sockets=None,
    )

    def build() -> NodeMemory:
        return NodeMemory(
            replace(settings.memory, stay_warm_s=3600.0),
            [spec],
            setup,
            data_dir=folder,
            clock=clock,
            rng=random.Random(1),
            on_change=lambda: None,
        )

    async with AsyncExitStack() as stack:
        memory = await stack.enter_async_context(await asyncio.to_thread(build))
        pages = NodePages(
            settings.adapters,
            settings.precache,
            memory,
            data_dir=folder,
            clock=clock,
            rng=random.Random(2),
        )
        began = time.perf_counter()
        adapters = (await stack.enter_async_context(pages)).adapters
        facts["start_ms"] = (time.perf_counter() - began) * 1e3
        tasks = await stack.enter_async_context(Supervisor(clock))
        await memory.start(tasks, "bench")
        engine = memory.engines.get(TINY)
        async with engine.lend(300):
            pass
        manager = adapters.manager
        timings = Timings(manager, engine)
        machine_x = await times(timings, manager.cool)
        found = len(manager.records())
    for (what, tier), values in sorted(timings.taken.items()):
        goal_s = GOALS_S[tier]
        ours = median(values)
        emit(
            f"adapter {what}, {tier.name.lower()}, us",
            ours=ours * 1e6,
            baseline=goal_s * 1e6,
            ratio=ours / goal_s,
            goal=f"<= {goal_s * 1e6:g} us, rank 8, {registered} registered",
            met=ours <= goal_s,
            p90_us=round(percentile(values, 0.9) * 1e6, 1),
            registered=found,
            **at_reference(ours * 1e6, machine_x),
            **{name: round(value, 3) for name, value in facts.items()},
        )


class Timings:
    """Seconds by what was timed, and by where the adapter was before."""

    def __init__(self, manager: AdapterManager, base: ResidentModel) -> None:
        self._manager = manager
        self._base = base
        self.taken: dict[tuple[str, Tier], list[float]] = defaultdict(list)

    async def acquire(self, name: str) -> None:
        """Until it is in a slot and leased."""
        tier = self._tier(name)
        began = time.perf_counter()
        lease = await self._manager.acquire(name)
        self.taken["acquire", tier].append(time.perf_counter() - began)
        lease.release()

    async def behind(self, name: str) -> None:
        """How much later a request has its first token than the same one afterwards."""
        tier = self._tier(name)
        first_s = await self.request(name)
        (await self._manager.acquire(name)).release()  # the answer to the load may come later
        if tier is not Tier.HOT:
            self.taken["behind", tier].append(first_s - await self.request(name))

    async def request(self, name: str) -> float:
        """Until a request has its only token."""
        model = AdaptedModel(self._base, name, "", self._manager)
        took_s = 0.0
        began = time.perf_counter()
        async with aclosing(model.decode(DecodeRequest(token_ids=PROMPT, max_tokens=1))) as frames:
            async for frame in frames:
                if isinstance(frame, Tokens):
                    took_s = time.perf_counter() - began
        return took_s

    def _tier(self, name: str) -> Tier:
        return self._manager.describe(self._manager.find(name)).tier


async def times(timings: Timings, cool: Callable[[str], None]) -> float:
    """Acquire and request in every tier, in turns; how slow the machine was in the median of the
    rounds.

    A garbage collection or a rebalance is part of it.
    """
    names = [f"{TINY}:big{number}" for number in range(MEASURED)]
    for name in names:  # the first of all makes the slots
        await timings.request(name)
    factors = []
    for _ in range(ROUNDS):
        factors.append(machine_factor())
        for use in (timings.acquire, timings.behind):
            for name in names:
                await use(name)
            for _ in range(20):
                await use(names[-1])
            for name in names[:-8]:
                cool(name)
            for name in names[:-8]:
                await use(name)
    return median(factors)


if __name__ == "__main__":
    main()
