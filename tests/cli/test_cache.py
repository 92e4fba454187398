"""`kakeya cache` on the files of a node that is down, or that runs meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kakeya.cli.main import main
from kakeya.core.clock import SystemClock
from kakeya.generation.retention import Retention
from kakeya.node.control import control_socket
from kakeya.node.datadir import DataDir, RunInfo
from kakeya.node.pages import ARENA_FOLDER
from kakeya.prefix.disk.files import QUARANTINE, BlockFolder
from kakeya.prefix.disk.store import FOLDER, BlockStore
from kakeya.prefix.seam import NoPrecache, Wiped
from kakeya.sessions.prefix_service import PrecacheService
from kakeya.v1.precache_pb2_grpc import add_PrecacheServiceServicer_to_server
from tests.memory.pages.test_slabs import KILLED, is_there
from tests.prefix.disk.world import Made, block_of, chain_of, config_of
from tests.sessions.toy import ToyDirectory


class Keeper(NoPrecache):
    """A node's precache as far as it can be wiped: what it has on disk."""

    def __init__(self, store: BlockStore | None) -> None:
        self._store = store

    async def wipe(self) -> Wiped:
        if self._store is None:
            return Wiped()
        done = await self._store.wipe()
        return Wiped(blocks=7, files=done.files, kept=done.kept, has_disk=True)


@asynccontextmanager
async def owner_socket(folder: Path, store: BlockStore | None) -> AsyncIterator[None]:
    server = grpc.aio.server()
    service = PrecacheService(ToyDirectory(()), Keeper(store))
    add_PrecacheServiceServicer_to_server(service, server)
    socket = await asyncio.to_thread(control_socket, folder)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def store(folder: Path, made: list[Made], retention: Retention = Retention.LONG) -> list[Path]:
    files = BlockFolder(folder / FOLDER, quarantine_bytes=1 << 20)
    names = [files.write(*one, retention, time.time() - 100)[0] for one in made]
    return [folder / FOLDER / name[:2] / name for name in names]


def cache(capsys: pytest.CaptureFixture[str], folder: Path, action: str) -> tuple[int, Any]:
    status = main(["cache", action, "--data-dir", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_stats_say_how_much_is_stored_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = store(tmp_path, chain_of(3))
    paths += store(tmp_path, [block_of(9, fingerprint=b"o" * 32)], Retention.EXTENDED)
    status, facts = cache(capsys, tmp_path, "stats")
    assert status == 0
    assert (facts["blocks"], facts["damaged"], facts["quarantined"]) == (4, 0, 0)
    assert facts["bytes"] == sum(path.stat().st_size for path in paths)
    assert facts["by_retention"] == {"long": 3, "extended": 1}
    assert not facts["is_node_running"]
    ours, theirs = facts["models"]
    assert (ours["model_id"], ours["blocks"], ours["tokens"]) == ("tiny", 3, 24)
    assert theirs["fingerprint"] == (b"o" * 32).hex()
    assert 99 < ours["idle_s"] < 1000
    assert main(["cache", "stats", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "4 blocks, " in said
    assert "3 blocks, 24 tokens" in said
    assert "extended: 1 blocks, kept 24 h unused" in said


def test_stats_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = store(tmp_path, chain_of(2))
    path.write_bytes(b"foreign")
    _, facts = cache(capsys, tmp_path, "stats")
    assert (facts["blocks"], facts["damaged"]) == (1, 1)
    assert path.read_bytes() == b"foreign"


def test_verify_finds_every_damage_and_sets_it_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = chain_of(4)
    paths = store(tmp_path, made)
    assert cache(capsys, tmp_path, "verify")[0] == 0
    damage(paths[1])
    paths[2].write_bytes(b"foreign")
    status, facts = cache(capsys, tmp_path, "verify")
    assert status == 1
    assert facts["blocks"] == 2
    assert {one["name"] for one in facts["damage"]} == {paths[1].name, paths[2].name}
    assert len(list((tmp_path / FOLDER / QUARANTINE).iterdir())) == 2
    assert cache(capsys, tmp_path, "verify")[0] == 0, "what is left is whole"
    damage(paths[0])
    assert main(["cache", "verify", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 blocks are whole" in said
    assert f"{paths[0].name}: its SHA-256 is another one" in said
    _, facts = cache(capsys, tmp_path, "stats")
    assert (facts["blocks"], facts["quarantined"]) == (1, 3)


def test_wipe_removes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = store(tmp_path, chain_of(3))
    damage(paths[0])
    cache(capsys, tmp_path, "verify")
    left = paths[1].with_name(f".{paths[1].name[:64]}.kvb.tmp")
    left.write_bytes(b"half")
    status, facts = cache(capsys, tmp_path, "wipe")
    assert (status, facts["removed"], facts["node_pid"]) == (0, 4, None)
    assert not [path for path in (tmp_path / FOLDER).rglob("*") if path.is_file()]
    assert main(["cache", "wipe", "--data-dir", str(tmp_path)]) == 0
    assert "removed 0 files" in capsys.readouterr().out


def test_what_a_wipe_cannot_remove_is_named_and_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may unlink everything but a folder: one in the place of a file stands for all that
    nobody can remove."""
    paths = store(tmp_path, chain_of(2))
    stuck = paths[0].with_name(f".{paths[0].name[:64]}.kvb.tmp")
    stuck.mkdir()
    status, facts = cache(capsys, tmp_path, "wipe")
    assert (status, facts["removed"], facts["kept"]) == (1, 2, [f"{stuck}: {why(stuck)}"])
    assert main(["cache", "wipe", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "removed 0 files" in said.out
    assert said.err.splitlines() == [
        "1 cannot be removed; KV is left in them:",
        f"  {stuck}: {why(stuck)}",
    ]


def test_what_a_killed_node_left_in_shared_memory_goes_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed() -> list[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / ARENA_FOLDER), f"w{os.getpid()}"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
        names = done.stdout.split()
        assert all(map(is_there, names))
        return names

    names = killed()
    status, facts = cache(capsys, tmp_path, "wipe")
    assert (status, facts["slabs"]) == (0, 2)
    assert not any(map(is_there, names))
    names = killed()
    assert main(["cache", "wipe", "--data-dir", str(tmp_path)]) == 0
    assert "removed 2 slabs of pages that a killed node left" in capsys.readouterr().out
    assert not any(map(is_there, names))


def test_shared_memory_that_cannot_be_looked_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ARENA_FOLDER / "arenas.lock").mkdir(parents=True)
    status, facts = cache(capsys, tmp_path, "wipe")
    arena = tmp_path / ARENA_FOLDER
    assert (status, facts["slabs"]) == (1, 0)
    assert facts["kept"] == [f"shared memory that {arena} lists: Is a directory"]


def why(folder: Path) -> str:
    """What this system says of a folder that is to be unlinked."""
    with pytest.raises(OSError) as refused:
        folder.unlink()
    return str(refused.value.strerror)


@pytest.mark.parametrize("action", ["stats", "verify", "wipe"])
def test_nothing_stored_is_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert cache(capsys, tmp_path / "absent", action)[0] == 0
    assert not (tmp_path / "absent").exists()


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    assert main(["cache", "stats", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"what is stored in {tmp_path / FOLDER} cannot be read: Not a directory" in said


def test_a_node_that_is_not_ready_is_not_wiped_behind_its_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = store(tmp_path, chain_of(1))
    with DataDir(tmp_path):
        assert main(["cache", "wipe", "--data-dir", str(tmp_path)]) == 1
        assert "is starting or stopping" in capsys.readouterr().err
        assert path.exists()


async def test_everything_works_beside_a_running_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = chain_of(5, size=100_000)
    where = RunInfo(pid=os.getpid(), node_id="n", grpc="127.0.0.1:1", http="127.0.0.1:2")
    held = await asyncio.to_thread(DataDir, tmp_path)
    await asyncio.to_thread(held.write_run, where)
    lost: list[bytes] = []
    try:
        node = BlockStore(tmp_path / FOLDER, config_of(), clock=SystemClock(), lost=lost.extend)
        async with node, owner_socket(tmp_path, node):
            for one in made:
                await node.put(*one)
            for action in ("stats", "verify", "wipe"):
                status, facts = await asyncio.to_thread(cache, capsys, tmp_path, action)
                assert status == 0
            assert facts["node_pid"] == os.getpid()
            assert facts["memory_blocks"] == 7
            assert node.ids() == ()
            assert node.stats().queued == 0
            for one in made:
                assert await node.put(*one)
            await node.flush()
            _, facts = await asyncio.to_thread(cache, capsys, tmp_path, "wipe")
            assert facts["removed"] == 5
            assert set(lost) == {block.id for block, _ in made}
            assert node.stats().used_bytes == 0
            assert await node.put(*made[0])
            await node.flush()
            assert await node.get(made[0][0].id) == made[0]
            stuck = next(path for path in (tmp_path / FOLDER).rglob("*.kvb")).with_suffix(".x.kvb")
            await asyncio.to_thread(stuck.mkdir)
            command = ["cache", "wipe", "--data-dir", str(tmp_path)]
            assert await asyncio.to_thread(main, command) == 1
            said = capsys.readouterr()
            assert str(stuck) in said.err
            assert f"pid {os.getpid()} let go of 7 blocks in memory" in said.out
            await asyncio.to_thread(stuck.rmdir)
        await asyncio.to_thread(
            store, tmp_path, made
        )  # of an earlier life, beside a node that keeps none
        async with owner_socket(tmp_path, None):
            _, facts = await asyncio.to_thread(cache, capsys, tmp_path, "wipe")
            assert (facts["removed"], facts["memory_blocks"]) == (5, 0)
        await asyncio.to_thread(store, tmp_path, made)
        status = await asyncio.to_thread(main, ["cache", "wipe", "--data-dir", str(tmp_path)])
        assert status == 1
        assert "does not answer" in capsys.readouterr().err
        assert (await asyncio.to_thread(cache, capsys, tmp_path, "stats"))[1]["blocks"] == 5
    finally:
        await asyncio.to_thread(held.close)
