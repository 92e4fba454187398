"""Pages for adapters on a real node whose budget idle models fill."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kakeya.backends.sizes import lease_sizes
from kakeya.core.units import GIB, MIB
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.estimate.history import SizeHistory
from tests.node.nodes import VERIFIER
from tests.node.test_adapters_node import add
from tests.node.test_memory import OTHER, ask, memory_of, ready, residents, two_texts


def text_bytes() -> int:
    """What the node lends one of its two models."""
    known = lease_sizes(
        {VERIFIER: (str(EMBEDDED_FOLDER / VERIFIER), "text")},
        4 * GIB,
        history=SizeHistory(),
        hub=None,
        stated_bytes={VERIFIER: 250 * MIB},
        platform=sys.platform,
    )
    return known[VERIFIER].bytes


@pytest.mark.slow
async def test_an_idle_text_model_goes_for_a_cold_adapter_of_another(tmp_path: Path) -> None:
    """Both fit by themselves, and less than a slab is free; the answer waits, and comes."""
    lent = await asyncio.to_thread(text_bytes)
    async with two_texts(tmp_path, 2 * lent // MIB + 8) as node:
        assert (await ask(node, OTHER)).status_code == 200
        await ready(node, VERIFIER, OTHER)
        await add(tmp_path, "shout")
        assert residents(node) == {VERIFIER, OTHER}
        assert memory_of(node)["free_bytes"] < 16 * MIB
        answer = await ask(node, f"{VERIFIER}:shout")
        assert answer.status_code == 200, answer.text
        assert residents(node) == {VERIFIER}
        (pages,) = (one for one in memory_of(node)["tenants"] if one["name"] == "pages")
        assert pages["held_bytes"] >= 16 * MIB
        assert (await ask(node, f"{VERIFIER}:shout")).status_code == 200
