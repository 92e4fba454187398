"""Conversations of 4000 tokens that do not go cold on one node, through HTTP.

swap     another model takes the room of theirs, which is then loaded again: the first token of each
         against its first time, and whether the greedy answer is the same; once more after SIGKILL
         of the engine
sweep    32 distinct documents are asked about in the class batch, more than the memory for KV
         holds: the first token after them against that of the same conversation before, medians of
         three times

Loads are not counted in, but told beside. No KV is on disk in the sweep.

    .venv/bin/python -m benchmarks.kept_conversations [swap] [sweep]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import engine_of, words
from benchmarks.models import NAMED, any_model, sized_model
from benchmarks.nodes import StreamedAnswer, request, streamed
from benchmarks.report import emit, median
from kakeya.backends.sizes import FIRST_KV_TOKENS, lease_size
from kakeya.cli.child import NodeProcess
from kakeya.core.units import MIB
from kakeya.memory.estimate.estimate import estimate_model

CONVERSATIONS, WORDS = 1 if NAMED else 3, 3650
DOCUMENTS, DOCUMENT_WORDS, READERS = 32, 140 if NAMED else 1830, 4
SWEEPS = 3
KV_MB, SPARE_MB = (320, 448) if NAMED else (96, 32)
"""Memory for kept KV: of the conversations, and of a few of the documents; and for the engine."""
OTHER_MB = 500 if NAMED else 60
MOST_AFTER_SWAP, MOST_AFTER_SWEEP = 0.1, 1.5


def say_on(address: str, model: str, run: str) -> list[StreamedAnswer]:
    """The next turn of each conversation, the same each time."""
    return [
        ask(address, model, words(WORDS, f"{run} {number}"), "normal")
        for number in range(CONVERSATIONS)
    ]


def ask(address: str, model: str, prompt: str, priority: str) -> StreamedAnswer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "temperature": 0,
        "draft_policy": "off",
        "x_priority": priority,
    }
    answer = streamed(address, body)
    if answer.is_lost:
        status = json.loads(request(address, "GET", "/api/v1/status", None)[1])
        events = status["memory"]["last_events"]
        raise RuntimeError(f"{model}: status {answer.status}, {answer.text!r}, {events}")
    return answer


def load(address: str, model: str) -> float:
    """Seconds of a short request to a model that is not loaded."""
    began = time.perf_counter()
    ask(address, model, "Hi", "urgent")
    return time.perf_counter() - began


def first_s(answers: Sequence[StreamedAnswer]) -> float:
    """The median time to a first token."""
    return median([one.first_s for one in answers])


def sweep(address: str, model: str, run: int) -> float:
    """Ask about all documents, others in each run; seconds."""
    began = time.perf_counter()
    texts = [words(DOCUMENT_WORDS, f"document {run} {number}") for number in range(DOCUMENTS)]
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(lambda text: ask(address, model, text, "batch"), texts):
            pass
    return time.perf_counter() - began


def node_of(home: Path, folders: Sequence[Path], *flags: str, disk_mb: int) -> NodeProcess:
    """A node that serves these models, with little memory for KV."""
    home.mkdir()
    config = home / "node.toml"
    config.write_text(f"[precache]\nmemory_mb = {KV_MB}\ndisk_mb = {disk_mb}\n")
    models = [flag for folder in folders for flag in ("--model", str(folder))]
    return NodeProcess(home, "--config", str(config), "--no-mdns", *models, *flags)


async def compare_swap(folder: Path, home: Path) -> None:
    other = await asyncio.to_thread(sized_model, home / "other", OTHER_MB)
    folders = (folder, other)
    lent = [
        lease_size(estimate_model(one, kv_tokens=FIRST_KV_TOKENS, widens=True), 1 << 40).bytes
        for one in folders
    ]
    budget_mb = max(lent) // MIB + KV_MB + SPARE_MB
    assert sum(lent) > budget_mb * MIB, "both would fit"
    flags = ("--memory-budget", str(budget_mb))
    async with node_of(home / "a", folders, *flags, disk_mb=4096) as node:
        await asyncio.to_thread(load, node.http, folder.name)
        cold = await asyncio.to_thread(say_on, node.http, folder.name, "swap")
        warm = await asyncio.to_thread(say_on, node.http, folder.name, "swap")
        await asyncio.to_thread(load, node.http, other.name)
        load_s = await asyncio.to_thread(load, node.http, folder.name)
        again = await asyncio.to_thread(say_on, node.http, folder.name, "swap")
        os.kill((await engine_of(node))[0], signal.SIGKILL)
        restart_s = await asyncio.to_thread(load, node.http, folder.name)
        killed = await asyncio.to_thread(say_on, node.http, folder.name, "swap")
    for what, answers, spent_s in (
        ("its model left and came back", again, load_s),
        ("SIGKILL of its engine", killed, restart_s),
    ):
        is_same = [one.text for one in cold] == [one.text for one in answers]
        emit(
            f"first token of a 4000-token conversation after {what}, s, {folder.name}",
            ours=first_s(answers),
            baseline=first_s(cold),
            ratio=first_s(answers) / first_s(cold),
            goal=f"<= {MOST_AFTER_SWAP} of cold, the same text",
            met=first_s(answers) <= MOST_AFTER_SWAP * first_s(cold) and is_same,
            is_same_text=is_same,
            warm_s=round(first_s(warm), 4),
            load_s=round(spent_s, 2),
        )


async def compare_sweep(folder: Path, home: Path) -> None:
    async with node_of(home / "b", (folder,), disk_mb=0) as node:
        await asyncio.to_thread(load, node.http, folder.name)
        cold = await asyncio.to_thread(say_on, node.http, folder.name, "sweep")
        warm, after = list[StreamedAnswer](), list[StreamedAnswer]()
        for _ in range(SWEEPS):
            warm += await asyncio.to_thread(say_on, node.http, folder.name, "sweep")
        seconds = 0.0
        for number in range(SWEEPS):
            seconds += await asyncio.to_thread(sweep, node.http, folder.name, number)
            after += await asyncio.to_thread(say_on, node.http, folder.name, "sweep")
    is_same = [one.text for one in cold] * SWEEPS == [one.text for one in after]
    emit(
        f"first token of a 4000-token conversation after {DOCUMENTS} batch documents, s, "
        f"{folder.name}",
        ours=first_s(after),
        baseline=first_s(warm),
        ratio=first_s(after) / first_s(warm),
        goal=f"<= {MOST_AFTER_SWEEP} of before, the same text",
        met=first_s(after) <= MOST_AFTER_SWEEP * first_s(warm) and is_same,
        is_same_text=is_same,
        cold_s=round(first_s(cold), 4),
        sweep_s=round(seconds / SWEEPS, 1),
        longest_s=round(max(one.first_s for one in after), 4),
    )


async def compare(folder: Path, drills: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        for name in drills:
            await DRILLS[name](folder, Path(home))


DRILLS = {"swap": compare_swap, "sweep": compare_sweep}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("drills", nargs="*", choices=[[], *DRILLS], help="all, if none is named")
    asyncio.run(compare(any_model("tiny"), parser.parse_args().drills or [*DRILLS]))
