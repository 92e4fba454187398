"""Programs of the documentation run as they are printed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
from pathlib import Path

from kakeya import MemoryArbiter
from kakeya.core.clock import SystemClock

DOCS = Path(__file__).parents[1] / "docs"


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


async def test_a_program_takes_a_lease_as_the_page_of_leases_says(tmp_path: Path) -> None:
    (program,) = await asyncio.to_thread(programs, "leases.md")
    held = program.replace("4 * GIB", "1024").replace("...", 'print("held")')
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", held),
        env={**os.environ, "KAKEYA_HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await child.communicate()
    assert (said, child.returncode) == (b"held\n", 0)


async def test_a_plug_in_and_its_caller_work_as_the_page_of_memory_says() -> None:
    plugin, caller = await asyncio.to_thread(programs, "memory-arbiter.md")

    async def read_weights(model_key: str) -> memoryview:
        return memoryview(model_key.encode())

    async def score(backend: memoryview, payload: str) -> list[str]:
        return [bytes(backend).decode(), payload]

    names = {"read_weights": read_weights, "score": score, "SIZES": {"small": 1000}}
    lines = f"{caller}\nreturn answer, leave"
    header = "async def call(arbiter, question, questions):\n"
    exec(plugin + header + textwrap.indent(lines, "    "), names)
    async with MemoryArbiter(budget=10**6, clock=SystemClock(), grace_s=0) as arbiter:
        arbiter.register(names["capability"]())  # type: ignore[operator]
        answer, leave = await names["call"](arbiter, "which?", ["one?", "two?"])  # type: ignore[operator]
        leave()
    assert answer == ["small", "which?"]
