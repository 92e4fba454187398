"""Requests of different priorities for one model, through HTTP on one node.

overload      more clients than the node admits, who obey Retry-After: requests that were lost, and
              how many were refused how often before they were answered
crowd         200 clients at once with mixed priorities, who obey Retry-After: requests that were
              lost, the time to the first token of urgent ones against batch ones, and the longest
              wait of each priority against its bound
interactive   a person's short requests beside so many batch requests that the engine is never
              idle: the time to their first token against the same on an idle node, and what the
              batch keeps of its throughput alone

The bound of a wait for a place: AGED_S, then each FLOOR_TURNS-th place goes to the oldest.

    .venv/bin/python -m benchmarks.priorities [interactive] [crowd] [overload]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import words
from benchmarks.models import NAMED, any_model
from benchmarks.nodes import StreamedAnswer, streamed, wait_ready
from benchmarks.report import emit, percentile
from kakeya.cli.child import NodeProcess
from kakeya.engine.queue.policy import AGED_S, FLOOR_TURNS
from kakeya.gateway.http.connection import HttpLimits

CLIENTS, REQUESTS = 200, 200 if NAMED else 600
MIXED = {"urgent": 1, "high": 2, "normal": 5, "low": 3, "batch": 4}
"""Priorities and how often each is drawn."""
BATCH_CLIENTS, DOCUMENTS = 8, 16 if NAMED else 240
DOCUMENT_WORDS, DOCUMENT_ANSWER = 80 if NAMED else 170, 16
IDLE_REQUESTS, PAUSE_S = 10 if NAMED else 20, 0.5 if NAMED else 0.3
INTERACTIVE_ANSWER = 8
MOST_LATER_S, LEAST_KEPT = 0.3, 0.8
_serial = itertools.count()


def ask(address: str, model: str, priority: str, count: int, tokens: int) -> StreamedAnswer:
    """One streamed answer to a prompt of so many words, that no cache has seen."""
    body = {
        "model": model,
        "prompt": words(count, f"{priority} {next(_serial)}"),
        "max_tokens": tokens,
        "temperature": 0,
        "draft_policy": "off",
        "x_priority": priority,
        "x_client_id": threading.current_thread().name,
    }
    return streamed(address, body, tries=200)


def crowd(address: str, model: str) -> None:
    """All clients at once, each one request after the other."""
    priorities = random.Random(1).choices([*MIXED], weights=[*MIXED.values()], k=REQUESTS)
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [*pool.map(lambda one: ask(address, model, one, 20, 8), priorities)]
    seconds = time.perf_counter() - began
    bound_s = AGED_S + FLOOR_TURNS * CLIENTS * seconds / REQUESTS
    firsts = {
        name: [one.first_s for one, is_of in zip(answers, priorities, strict=True) if is_of == name]
        for name in MIXED
    }
    lost = sum(one.is_lost for one in answers)
    said = {
        "lost": lost,
        "refusals": sum(len(one.refused) for one in answers),
        "requests": REQUESTS,
        "seconds": round(seconds, 1),
    }
    what = f"of {CLIENTS} clients at once with mixed priorities"
    urgent, batch = (percentile(firsts[name], 0.95) for name in ("urgent", "batch"))
    emit(
        f"95th percentile to the first token of urgent requests {what}, against batch, s, {model}",
        ours=urgent,
        baseline=batch,
        ratio=urgent / batch,
        goal="sooner, none lost",
        met=urgent < batch and not lost,
        **said,
    )
    for name, waits in firsts.items():
        emit(
            f"longest wait of {name} requests {what}, s, {model}",
            ours=max(waits),
            baseline=bound_s,
            ratio=max(waits) / bound_s,
            goal="<= its bound",
            met=max(waits) <= bound_s and not lost,
            p95_s=round(percentile(waits, 0.95), 3),
        )


def overload(address: str, model: str) -> None:
    """Twice as many clients at once as the node has places, each one request after the other."""
    count = 2 * HttpLimits().generations
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        answers = [*pool.map(lambda _: ask(address, model, "normal", 20, 8), range(2 * count))]
    seconds = time.perf_counter() - began
    refused = [one.refused for one in answers if one.refused]
    ended = sum(not one.is_lost for one in answers)
    emit(
        f"requests of {count} clients at once that obey Retry-After: answered, {model}",
        ours=ended,
        baseline=len(answers),
        ratio=ended / len(answers),
        goal="all, although some are refused at first",
        met=ended == len(answers) and bool(refused),
        refused=len(refused),
        refusals=dict(Counter(status for statuses in refused for status in statuses)),
        most_refusals_of_one=max(map(len, refused), default=0),
        seconds=round(seconds, 1),
        longest_s=round(max(one.seconds for one in answers), 1),
    )


def interactive(address: str, model: str) -> None:
    """Idle, batch alone, and both."""

    def short() -> float:
        time.sleep(PAUSE_S)
        return ask(address, model, "normal", 24, INTERACTIVE_ANSWER).first_s

    def batch(beside: list[float]) -> float:
        """Seconds of all documents; with what is asked beside them, if a list is given for it."""
        over = threading.Event()

        def person() -> None:
            while not over.is_set():
                beside.append(short())

        began = time.perf_counter()
        with ThreadPoolExecutor(BATCH_CLIENTS) as pool:
            documents = [
                pool.submit(ask, address, model, "batch", DOCUMENT_WORDS, DOCUMENT_ANSWER)
                for _ in range(DOCUMENTS)
            ]
            asking = threading.Thread(target=person, daemon=True)
            if beside is not alone:
                asking.start()
            lost.extend(one.result().is_lost for one in documents)
        seconds = time.perf_counter() - began
        over.set()
        if beside is not alone:
            asking.join()
        return seconds

    lost: list[bool] = []
    alone: list[float] = []
    both: list[float] = []
    short()
    idle = [short() for _ in range(IDLE_REQUESTS)]
    alone_s, both_s = batch(alone), batch(both)
    idle_s, both_first_s = percentile(idle, 0.95), percentile(both, 0.95)
    emit(
        f"95th percentile to the first token beside {BATCH_CLIENTS} batch clients, s, {model}",
        ours=both_first_s,
        baseline=idle_s,
        ratio=both_first_s / idle_s,
        goal=f"<= idle + {MOST_LATER_S} s",
        met=both_first_s <= idle_s + MOST_LATER_S,
        later_s=round(both_first_s - idle_s, 3),
        requests=len(both),
        p50_s=round(percentile(both, 0.5), 3),
        idle_p50_s=round(percentile(idle, 0.5), 3),
    )
    emit(
        f"seconds of {DOCUMENTS} batch documents beside a person's requests, {model}",
        ours=both_s,
        baseline=alone_s,
        ratio=alone_s / both_s,
        goal=f">= {LEAST_KEPT} of the throughput alone",
        met=alone_s / both_s >= LEAST_KEPT and not any(lost),
        lost=sum(lost),
    )


async def measure(folder: Path, drills: Sequence[Callable[[str, str], None]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home), "--model", str(folder), "--no-mdns") as node:
            await wait_ready(node)
            for drill in drills:
                await asyncio.to_thread(drill, node.http, folder.name)


if __name__ == "__main__":
    known = {"interactive": interactive, "crowd": crowd, "overload": overload}
    parser = argparse.ArgumentParser()
    parser.add_argument("drills", nargs="*", choices=[[], *known], help="all, if none is named")
    asked = parser.parse_args().drills or [*known]
    asyncio.run(measure(any_model("tiny"), [known[name] for name in asked]))
