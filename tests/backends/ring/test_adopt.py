"""A node's engine that was started by hand, as rank 0 of a ring group is: it serves, ends, and
comes back."""

from __future__ import annotations

import sys
from pathlib import Path

from kakeya.backends.engine.backend import EngineBackend
from kakeya.generation.facts import ModelState
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest
from tests.mlx.ring.rig import alone
from tests.waiting import eventually

ENGINE = ("tests.engine.child_engine", "steady")
"""To the node rank 0 is a socket that serves; tests/node/test_ring_requests.py has a real group."""
PROMPT, TOKENS = [5, 9, 13, 2, 7] * 6, 24
READY_S = 240.0


async def test_a_group_serves_as_an_engine_of_the_node_and_its_return_is_waited_for(
    tmp_path: Path,
) -> None:
    model, link = tmp_path / "model", tmp_path / "group.sock"

    def adopted(socket: Path) -> tuple[str, ...]:
        program = (sys.executable, "-m", "kakeya.backends.ring.adopt")
        return (*program, "--socket", str(socket), "--group", str(link), "--max-running", "4")

    async with EngineBackend("toy", adopted) as backend:

        async def decoded() -> list[int]:
            await backend.ready(READY_S)
            wanted = DecodeRequest(token_ids=tuple(PROMPT), max_tokens=TOKENS)
            frames = [frame async for frame in backend.decode(wanted)]
            return [t for f in frames if isinstance(f, Tokens) for t in f.token_ids]

        with alone(model, ENGINE) as first:
            link.symlink_to(first.socket)
            said = await decoded()
            assert len(said) == TOKENS
            first.process.kill()
            await eventually("its end", lambda: backend.state is not ModelState.READY)
        link.unlink()
        with alone(model, ENGINE) as second:
            link.symlink_to(second.socket)
            assert await decoded() == said
            pid = backend.pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
