"""A node's engine that is a ring group, started by hand: it serves, ends, and comes back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import KakeyaError
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest
from tests.mlx.random_models import write_model
from tests.mlx.ring.rig import LAUNCH, group
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")
PROMPT, TOKENS = [5, 9, 13, 2, 7] * 6, 24
READY_S = 240.0


async def test_a_group_serves_as_an_engine_of_the_node_and_its_return_is_waited_for(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", "llama", changes={"num_key_value_heads": 4})
    link = tmp_path / "group.sock"

    def adopted(socket: Path) -> tuple[str, ...]:
        program = (sys.executable, "-m", "kakeya.backends.ring.adopt")
        return (*program, "--socket", str(socket), "--group", str(link), "--max-running", "4")

    async with EngineBackend("toy", adopted) as backend:

        async def decoded() -> list[int]:
            await backend.ready(READY_S)
            wanted = DecodeRequest(token_ids=tuple(PROMPT), max_tokens=TOKENS)
            frames = [frame async for frame in backend.decode(wanted)]
            return [t for f in frames if isinstance(f, Tokens) for t in f.token_ids]

        with group(2, model, "--ring", "tensor") as first:
            link.symlink_to(first.socket)
            said = await decoded()
            assert len(said) == TOKENS
            os.kill(first.pids()[1], signal.SIGKILL)
            await eventually("its end", lambda: first.process.poll() is not None)
        link.unlink()
        with group(2, model, "--ring", "tensor") as second:
            link.symlink_to(second.socket)
            assert await decoded() == said
            with pytest.raises(KakeyaError, match="drafts for no peer"):
                await backend.draft(PROMPT, 4, seed=None, temperature=None)
        pid = backend.pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
