"""Peers that are killed or stopped while they send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kakeya.prefix.peers.choice import BlockHolder
from tests.prefix.peers import world as w

BLOCKS, SIZE = 5, 2_000_000
SPARE_S = 10.0
"""What a busy test machine may add."""
TOP = Path(__file__).parents[3]


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("block", [0, 2, pytest.param(4, marks=pytest.mark.slow)])
async def test_a_peer_that_ends_or_hangs_costs_only_what_it_did_not_send(signal_sent, block):
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.prefix.peers.child",
        str(BLOCKS),
        str(SIZE),
        stdout=asyncio.subprocess.PIPE,
        cwd=TOP,
    )
    try:
        assert child.stdout is not None
        port = int(await child.stdout.readline())
        holder = BlockHolder(node_id="child", address=f"127.0.0.1:{port}", blocks=BLOCKS)
        async with w.a_world() as world:
            await world.channel(holder).channel_ready()
            fetcher = await world.fetcher()
            sink = w.Sink(on_put=lambda i: os.kill(child.pid, signal_sent) if i == block else None)
            wanted = w.wanted(
                BLOCKS, block_bytes=SIZE, rate=w.BLOCK_TOKENS / 12.0, most_slack_s=3.0
            )
            began = time.monotonic()
            taken = await fetcher.fetch(wanted, [holder], sink)
            took_s = time.monotonic() - began
            assert block + 1 <= taken <= min(block + 4, BLOCKS)
            assert sink.is_right(wanted.ids)
            assert took_s <= wanted.slack_s + SPARE_S
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
