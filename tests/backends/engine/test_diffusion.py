"""A block-diffusion drafter in a real engine child."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.serve.service import ProposerService
from kakeya.v1 import distributed_pb2 as pb
from tests.backends.engine.test_backend import collect, request
from tests.backends.engine.test_engine_limits import PATIENT
from tests.mlx.diffusion.rig import SMALL, write_drafter


async def test_an_engine_drafts_in_as_many_steps_as_asked(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "m")

    def command(socket: Path) -> Sequence[str]:
        child = (sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket))
        return (*child, "--model", str(folder), "--model-id", "m")

    async with EngineBackend("m", command, options=PATIENT) as engine:
        facts = await engine.ready(120.0)
        assert facts.vocab_size == SMALL.vocab_size
        service = ProposerService({"m": engine})  # type: ignore[dict-item]
        for size, steps in ((1, 1), (6, 1), (6, 3), (6, 100), (30, 2)):
            asked = pb.ProposeBlockRequest(
                committed_token_ids=[5, 6, 7], block_size=size, num_steps=steps
            )
            answer = await service._answer(asked, None)
            assert len(answer.token_ids) == size
            assert answer.num_valid == min(size, SMALL.block_tokens)
            assert answer.diffusion_steps == answer.forward_passes == min(steps, answer.num_valid)
            assert answer.peak_activation_bytes > 0
        prefix, width = [5, 6, 7, 8], SMALL.hidden_size
        states = HiddenStates(
            drafter=facts.base_fingerprint, first=0, width=width, data=b"\x00\x3c" * 3 * width
        )
        without = await engine.draft(prefix, 6)
        other = replace(states, drafter="other")
        assert (await engine.draft(prefix, 6, states=other)).confidence == without.confidence
        assert (await engine.draft(prefix, 6, states=states)).confidence != without.confidence
        with pytest.raises(InvalidArgument, match="tokens 0 to 3, and the text has 2"):
            await engine.draft(prefix[:2], 2, states=states)
        with pytest.raises(KakeyaError, match="m only drafts"):
            await collect(engine, request(max_tokens=4))
        assert (await engine.draft([5, 6], 2)).tokens  # it serves on
        assert (await engine.stats()).kv_live_bytes == 0
