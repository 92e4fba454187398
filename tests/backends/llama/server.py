"""A shipped model as a GGUF file behind a real llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.llama.archive import SlotArchive
from kakeya.backends.llama.client import llama_client
from kakeya.backends.llama.plan import plan_of
from tests.gguf_files import qwen3_gguf

MODELS = Path(__file__).parents[3] / "kakeya" / "models"
TOOLS = MODELS / "kakeya-tiny-tools"


def toy_gguf(folder: Path) -> Path:
    """Write the file of `kakeya-tiny-tools`, which calls the tool § NAME."""
    return qwen3_gguf(TOOLS, folder / "tools.gguf")


@asynccontextmanager
async def llama(
    program: Path,
    model: Path,
    *,
    options: EngineOptions | None = None,
    archive: SlotArchive | None = None,
    **wanted: object,
) -> AsyncIterator[EngineBackend]:
    """`wanted` are options of the model; without an archive nothing is kept."""
    chosen = {"ctx_size": 4096, **wanted}
    plan = await asyncio.to_thread(plan_of, model, chosen)
    client = llama_client(plan, archive or SlotArchive())
    made = EngineBackend(model.stem, plan.command(program), client=client, options=options)
    async with made:
        yield made
