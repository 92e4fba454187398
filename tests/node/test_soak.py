"""Faults over and over, for scripts/soak."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from kakeya.node.agent import GRACE_S
from tests.node.nodes import VERIFIER, drafter_node, model_state, verifier_node
from tests.node.test_daemon import seconds_to_stop_while_decoding
from tests.node.test_fleet_of_nodes import generate
from tests.node.test_overload import exchange_while_generating
from tests.waiting import eventually

pytestmark = pytest.mark.slow
STOPS = 50
KILLS = 20


async def test_sigterm_under_load_always_ends_with_0_in_time(tmp_path: Path) -> None:
    """Row 28: 50 of 50."""
    for attempt in range(STOPS):
        async with verifier_node(tmp_path / str(attempt)) as node:
            assert await seconds_to_stop_while_decoding(node) < GRACE_S + 1, attempt


async def test_engines_and_proposers_killed_at_random_cost_no_token(tmp_path: Path) -> None:
    """Rows 29 and 34: 20 of 20."""
    rng = random.Random(20)
    async with verifier_node(tmp_path / "verifier") as verifier:
        plain = await generate(verifier, "off", tokens=400)
        for attempt in range(KILLS):
            async with drafter_node(tmp_path / str(attempt), verifier) as drafter:
                policy = rng.choice(["peer", "auto", f"ngram@{drafter.grpc}"])
                drafted = asyncio.create_task(generate(verifier, policy, tokens=400))
                await asyncio.sleep(rng.uniform(0.05, 0.8))
                drafter.send(signal.SIGKILL)
                assert await drafted == plain, attempt
    assert "Traceback" not in verifier.log_file.read_text()


async def test_the_node_outlives_its_engine_until_the_breaker_opens(tmp_path: Path) -> None:
    """Row 34: after five deaths the model is given up with a sentence, the node stays."""
    async with verifier_node(tmp_path) as node:
        for deaths in range(1, 6):
            pid = model_state(node, VERIFIER)["pid"]
            kill = await asyncio.create_subprocess_exec("kill", "-9", str(pid))
            await kill.wait()
            wanted = "failed" if deaths == 5 else "ready"
            await eventually(
                f"{wanted} after death {deaths}",
                lambda old=pid, state=wanted: (
                    (m := model_state(node, VERIFIER))["state"] == state and m["pid"] != old
                ),
                limit_s=60,
            )
        assert "died 5 times" in model_state(node, VERIFIER)["error"]
        assert node.api.get("/healthz") == {"status": "ok"}


@pytest.mark.parametrize(("cards", "p99_ms"), [(100, 25.0), (1000, 50.0)])
async def test_exchanges_are_prompt_while_the_node_generates(
    tmp_path: Path, cards: int, p99_ms: float
) -> None:
    """Row 23: ten minutes, half of them with each fleet."""
    busy = await exchange_while_generating(tmp_path, cards, seconds=300.0)
    assert busy.missed_rounds <= 0
    assert busy.percentile_ms(0.99) <= p99_ms
