"""`kakeya restart` of a real node: another process, as the one before, at the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kakeya.cli.child import NodeProcess
from kakeya.cli.main import main
from kakeya.cli.service import command
from kakeya.cli.service.start import LOG
from kakeya.node.datadir import SERVICE_VARIABLE, RunInfo, find_running, is_held


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


async def test_a_service_is_drained_only_where_its_node_would_start_and_an_end_after_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    restarts = iter(range(3, 99))

    def systemd(asked: Sequence[str]) -> subprocess.CompletedProcess[str]:
        said = "the disk is gone"
        if "show" in asked or "print" in asked:
            said = (
                f"ActiveState=active\nSubState=running\nNRestarts={next(restarts)}\nResult=success"
            )
        return subprocess.CompletedProcess(asked, 0, f"{said}\n", "")

    monkeypatch.setattr(command, "program", systemd)
    monkeypatch.setenv(SERVICE_VARIABLE, "user")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "node.toml"
    config.write_text('[node]\nlabel = "a mini"\n')
    restart = ["restart", "--data-dir", str(tmp_path / "data")]
    async with NodeProcess(tmp_path, "--proposer", "ngram", "--config", config.name) as node:
        monkeypatch.chdir("/")
        monkeypatch.setenv("KAKEYA_LABEL", " ")  # of this terminal, and no matter of the service
        config.write_text("[node]\nlabel = 7\n")
        assert await asyncio.to_thread(main, restart) == 2
        assert "would not start again" in (said := capsys.readouterr().err)
        assert "node.label: 7 is not a text" in said
        assert node.is_running
        config.write_text('[node]\nlabel = "a mini"\n')
        assert await asyncio.to_thread(main, restart) == 1
        assert "the node ended, says its service: Result success" in capsys.readouterr().err
        assert await node.wait() == 0


def test_no_node_no_restart(tmp_path: Path, capsys) -> None:
    assert main(["restart", "--data-dir", str(tmp_path)]) == 1
    assert "no node runs" in capsys.readouterr().err
