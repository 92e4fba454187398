"""Three models on a budget for one, on a real node: how often they are loaded, how long any waits.

swap      300 requests in random order, of as many clients as CLIENTS: loads, compared with those
          of first-come order on the same sequence and with plain collation, which loads another
          model as soon as no request for the loaded one waits; both are counted without a node
waits     the same with mixed priorities: the longest wait of each against its bound
together  32 first requests at once for a model that is not in memory: one load

The bound of a wait: a request of rank r goes before all that come r + 1 ageing steps after it; then
each model is loaded, used for a turn, and unloaded once at most before it.

    .venv/bin/python -m benchmarks.swap [--requests 300] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory_drill import SLACK_BYTES
from benchmarks.memory_sight import metrics, total
from benchmarks.models import sized_model
from benchmarks.nodes import StreamedAnswer, request, streamed
from benchmarks.report import emit, percentile
from kakeya.backends.sizes import FIRST_KV_TOKENS, lease_size
from kakeya.cli.child import NodeProcess
from kakeya.core.units import MIB
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.estimate.estimate import estimate_model

MODELS, WEIGHTS_MB = 3, 60
CLIENTS, TOGETHER = 24, 32
ANSWER_TOKENS = 8
MIXED = {"urgent": 1, "high": 2, "normal": 5, "low": 3, "batch": 4}
"""Priorities and how often each is drawn."""


@dataclass(frozen=True, slots=True)
class Order:
    """One request of the sequence."""

    number: int
    model: str
    priority: str


@dataclass(frozen=True, slots=True)
class Served:
    """An order and its answer."""

    order: Order
    answer: StreamedAnswer


def first_come_loads(models: Sequence[str]) -> int:
    """Loads where each request is served before the next one."""
    return sum(one != before for one, before in zip(models, ["", *models], strict=False))


def collation_loads(models: Sequence[str], clients: int) -> int:
    """Loads of plain collation: of the requests that wait, those for the loaded model are served;
    then the model of the oldest is loaded. Each client asks for the next of the sequence as soon
    as it is served."""
    waiting, coming = [*models[:clients]], [*models[clients:]]
    loads, loaded = 0, ""
    while waiting:
        if loaded not in waiting:
            loads, loaded = loads + 1, waiting[0]
        waiting.remove(loaded)
        waiting += coming[:1]
        del coming[:1]
    return loads


def serve(address: str, orders: Sequence[Order], clients: int) -> list[Served]:
    """All orders, each client one at a time, in the order of the sequence."""

    def one(order: Order) -> Served:
        body = {
            "model": order.model,
            "prompt": f"# {order.number}\ndef area(self):",
            "max_tokens": ANSWER_TOKENS,
            "x_priority": order.priority,
            "x_client_id": f"client-{order.number % clients}",
        }
        return Served(order, streamed(address, body))

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, orders))


class Loads:
    """The loads of a node since the last look, and the longest of all."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._seen = 0.0

    async def here(self) -> int:
        """Loads since the last call."""
        loaded = total(await self._scrape(), "kakeya_memory_loads_total", 'outcome="loaded"')
        since, self._seen = loaded - self._seen, loaded
        return round(since)

    async def mean_s(self) -> float:
        """Seconds of a load, on average."""
        scrape = await self._scrape()
        count = total(scrape, "kakeya_memory_load_seconds_count")
        return total(scrape, "kakeya_memory_load_seconds_sum") / max(1.0, count)

    async def _scrape(self) -> dict[str, float]:
        _, text = await asyncio.to_thread(request, self._node.http, "GET", "/metrics", None)
        return metrics(text.decode())


async def drill(requests: int, seed: int, home: Path) -> None:
    folders = [
        await asyncio.to_thread(sized_model, home / f"swap-{number}", WEIGHTS_MB, seed=number)
        for number in range(MODELS)
    ]
    lent = lease_size(estimate_model(folders[0], kv_tokens=FIRST_KV_TOKENS, widens=True), 1 << 40)
    budget = str((lent.bytes + SLACK_BYTES) // MIB)
    flags = [flag for one in folders for flag in ("--model", str(one))]
    rng, names = random.Random(seed), [one.name for one in folders]
    async with NodeProcess(home / "node", "--memory-budget", budget, "--no-mdns", *flags) as node:
        loads = Loads(node)
        await asyncio.to_thread(serve, node.http, [Order(-1, names[0], "urgent")], 1)
        await loads.here()
        alike = [Order(number, rng.choice(names), "normal") for number in range(requests)]
        began = time.monotonic()
        served = await asyncio.to_thread(serve, node.http, alike, CLIENTS)
        say_loads(served, await loads.here(), time.monotonic() - began)
        mixed = [
            Order(number, rng.choice(names), priority)
            for number, priority in enumerate(
                rng.choices([*MIXED], weights=[*MIXED.values()], k=requests // 4)
            )
        ]
        began = time.monotonic()
        served = await asyncio.to_thread(serve, node.http, mixed, CLIENTS)
        say_waits(served, await loads.here(), await loads.mean_s(), time.monotonic() - began)
        cold = served[-1].order.model
        at_once = [Order(n, names[names.index(cold) - 1], "normal") for n in range(TOGETHER)]
        served = await asyncio.to_thread(serve, node.http, at_once, TOGETHER)
        say_together(served, await loads.here())


def lost(served: Sequence[Served]) -> int:
    """Requests that were not answered to their end."""
    return sum(one.answer.is_lost for one in served)


def say_loads(served: Sequence[Served], loads: int, seconds: float) -> None:
    models = [one.order.model for one in served]
    first_come, collation = first_come_loads(models), collation_loads(models, CLIENTS)
    emit(
        f"loads of {MODELS} models on a budget for one, {len(models)} requests in random order, "
        "against first-come order",
        ours=loads,
        baseline=first_come,
        ratio=loads / first_come,
        goal="<= 1/8 of it, and <= plain collation's",
        met=loads <= first_come / 8 and loads <= collation and not lost(served),
        plain_collation=collation,
        lost=lost(served),
        refusals=sum(len(one.answer.refused) for one in served),
        longest_wait_s=round(max(one.answer.first_s for one in served), 2),
        seconds=round(seconds, 1),
    )


def say_waits(served: Sequence[Served], loads: int, load_s: float, seconds: float) -> None:
    rules = Rules()
    run_s = percentile([one.answer.seconds - one.answer.first_s for one in served], 1.0)
    for name in MIXED:
        waits = [one.answer.first_s for one in served if one.order.priority == name]
        rank = RequestPriority[name.upper()].rank
        bound_s = (rank + 1) * rules.age_s + MODELS * (load_s + rules.turn_s + run_s)
        emit(
            f"longest wait of {name} requests, {MODELS} models on a budget for one, s",
            ours=max(waits),
            baseline=bound_s,
            ratio=max(waits) / bound_s,
            goal="<= its bound",
            met=max(waits) <= bound_s and not lost(served),
            requests=len(waits),
            p95_s=round(percentile(waits, 0.95), 2),
            loads=loads,
            load_s=round(load_s, 2),
            lost=lost(served),
            seconds=round(seconds, 1),
        )


def say_together(served: Sequence[Served], loads: int) -> None:
    emit(
        f"loads for {len(served)} first requests at once for a model that is not in memory",
        ours=loads,
        baseline=1,
        ratio=loads,
        goal="1",
        met=loads == 1 and not lost(served),
        lost=lost(served),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(drill(options.requests, options.seed, Path(home)))


if __name__ == "__main__":
    main()
