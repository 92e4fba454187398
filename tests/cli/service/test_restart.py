"""`kakeya restart` of a real node: another process, as the one before, at the same port."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kakeya.cli.child import NodeProcess
from kakeya.cli.main import main
from kakeya.cli.service.start import LOG
from kakeya.node.datadir import RunInfo, find_running, is_held


@pytest.mark.slow
async def test_a_node_that_was_started_by_hand_is_replaced_as_it_was(
    tmp_path: Path, capsys
) -> None:
    async with NodeProcess(tmp_path, "--proposer", "ngram", "--label", "a mini") as node:
        folder = tmp_path / "data"
        old = await asyncio.to_thread(find_running, folder)
        assert old is not None
        assert await asyncio.to_thread(main, ["restart", "--data-dir", str(folder)]) == 0
        assert await node.wait() == 0
    new = await asyncio.to_thread(find_running, folder)
    assert isinstance(new, RunInfo)
    try:
        assert new.pid != old.pid
        assert new.node_id == old.node_id
        assert new.argv[: len(old.argv)] == old.argv
        assert new.log_file == str(folder / LOG)
        assert f"pid {new.pid}, http {new.http}, its log is in {new.log_file}" in (
            capsys.readouterr().out
        )
        logs = ["logs", "--data-dir", str(folder), "-n", "1"]
        assert await asyncio.to_thread(main, logs) == 0
    finally:
        os.kill(new.pid, signal.SIGTERM)
        while await asyncio.to_thread(is_held, folder):
            await asyncio.sleep(0.05)


def test_no_node_no_restart(tmp_path: Path, capsys) -> None:
    assert main(["restart", "--data-dir", str(tmp_path)]) == 1
    assert "no node runs" in capsys.readouterr().err
