"""What is written down of models in memory, for a machine that may panic with them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

from kakeya.backends.care import PanicCare
from kakeya.backends.engine.engine import EngineOptions
from tests.fakes import FakeClock


async def test_a_model_that_was_ended_by_force_has_left_memory_when_its_node_stops(
    tmp_path: Path,
) -> None:
    """Its unload is cut off; a later panic of the machine is not laid at its door."""
    (tmp_path / "stays.json").write_text(json.dumps([["earlier", 1.0, None]]))
    make = partial(PanicCare, options=EngineOptions(), allowed=(), clock=FakeClock())
    care = await asyncio.to_thread(make, (), tmp_path)
    for model_id in ("left", "ended"):
        await care.begin(model_id)
    await care.end("left")
    await care.aclose()
    ends = {model_id: end for model_id, _, end in json.loads((tmp_path / "stays.json").read_text())}
    assert ends.pop("earlier") is None, "of another run: the node was killed"
    assert set(ends) == {"left", "ended"}
    assert None not in ends.values()
