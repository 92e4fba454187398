from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kakeya.core.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    PeerUnavailable,
)
from kakeya.core.units import MIB
from kakeya.v1 import weights_pb2 as pb
from kakeya.weights import partial, peers, pull
from kakeya.weights.found import RECORD
from kakeya.weights.manifest import PIECE_BYTES
from kakeya.weights.partial import PULLS, DiskRefused
from kakeya.weights.pull import STREAMS
from kakeya.weights.service import WeightsService
from tests.waiting import until
from tests.weights.world import Faulty, House, Mini, content, house, make_model


async def pair(home: House, **settings: Any) -> tuple[Mini, Mini]:
    """A node with a model, and one without."""
    origin = await home.add("origin")
    await asyncio.to_thread(make_model, origin.folder, "org/smol")
    await origin.know()
    return origin, await home.add("puller", **settings)


async def test_a_model_comes_whole_and_is_known_here_afterwards(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        last = await puller.pull("org/smol")
        assert last.phase == "done"
        assert last.sources == ("origin",)
        assert puller.told == [1, 1, 0], "it begins, it is on the disk, it ends"
        assert content(Path(last.path)) == content(origin.folder / "org/smol")
        assert not (Path(last.path) / "secret.pem").exists()
        assert not (puller.folder / PULLS).exists()
        (held,) = await puller.weights.index.models(anew=True)
        assert held.name == "org/smol"
        known = puller.weights.index.known(held)
        assert known is not None
        assert known.digest == last.digest
        assert puller.weights.index.hashed_bytes == 0, "what was proven is not read again"
        again = await puller.pull("org/smol")
        assert again.note == "it is here already"
        listed, silent = await origin.weights.listed()
        assert [(one.name, one.peers) for one in listed] == [("org/smol", ("puller",))]
        assert silent == {}


async def test_pieces_come_from_several_peers_at_once(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        second = await home.add("second")
        await asyncio.to_thread(make_model, second.folder, "by-another-name")
        await second.know()
        last = await puller.pull("org/smol")
        assert last.sources == ("origin", "second")


@pytest.mark.parametrize("fault", ["wrong", "short", "long"])
async def test_a_peer_that_sends_wrong_bytes_is_left(tmp_path: Path, fault: str) -> None:
    liar = type("Liar", (Faulty,), {"fault": fault})
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        other = await home.add("a-liar", service=liar)
        await asyncio.to_thread(make_model, other.folder, "org/smol")
        await other.know()
        last = await puller.pull("org/smol")
        assert content(Path(last.path)) == content(origin.folder / "org/smol")
        assert liar.served <= pull.STREAMS
        assert last.sources == ("origin",)


async def test_a_pull_from_a_liar_alone_ends_with_the_reason(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        liar = await home.add("liar", service=Faulty)
        await asyncio.to_thread(make_model, liar.folder, "m")
        puller = await home.add("puller")
        with pytest.raises(PeerUnavailable, match="left: liar: the bytes of piece"):
            await puller.pull("m")


async def test_a_peer_that_hangs_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "STALL_S", 0.5)

    class Hangs(WeightsService):
        async def ReadPiece(self, request: Any, context: Any) -> None:
            await asyncio.sleep(3600)

    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        other = await home.add("a-hanging", service=Hangs)
        await asyncio.to_thread(make_model, other.folder, "org/smol")
        await other.know()
        last = await puller.pull("org/smol")
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def begun(puller: Mini, name: str, pieces: int) -> asyncio.Task[Any]:
    """A pull of which so many pieces are here, and the bytes of a full one."""

    def has_begun(one: Any) -> bool:
        sizes = [one.partial.manifest.pieces[piece].size for piece in one.held if one.partial]
        return len(sizes) >= pieces and sum(sizes) >= PIECE_BYTES

    task = asyncio.create_task(puller.pull(name))
    await until(lambda: any(map(has_begun, puller.weights.fetching)))
    return task


async def test_a_pull_that_was_given_up_goes_on_where_it_was(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not puller.weights.fetching
        assert not (puller.folder / "org").exists()
        (part,) = (puller.folder / PULLS).iterdir()
        assert part.is_dir()
        with pytest.raises(NotFound):
            await puller.weights.remove("smol", force=False)
        last = await puller.pull("org/smol")
        assert last.resumed_bytes >= PIECE_BYTES
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_what_a_crash_left_wrong_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (part,) = (puller.folder / PULLS).iterdir()
        for path in part.rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[:16] = b"garbage of power"
            path.write_bytes(data + b"and more than there should be")
        (part / "tokenizer.json").unlink()
        (part / "strange.json").write_text("{}")
        last = await puller.pull("org/smol")
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_source_that_comes_back_is_gone_on_with(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        port = origin.address
        await origin.server.stop(None)
        server = grpc.aio.server()
        assert server.add_insecure_port(port)
        origin.weights.register(server)
        await server.start()
        try:
            last = await task
        finally:
            await server.stop(None)
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_pull_without_a_source_ends_and_keeps_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        monkeypatch.setattr(pull, "PATIENCE_S", 0.5)
        await origin.server.stop(None)
        with pytest.raises(PeerUnavailable, match=r"B of 14\.\d MiB are here: pull it again"):
            await task
        assert (puller.folder / PULLS).exists()
        await puller.weights.remove("org/smol", force=False)
        assert not (puller.folder / PULLS).exists()


async def test_a_full_disk_refuses_and_leaves_what_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        real, written = os.pwrite, 0

        def pwrite(handle: int, data: bytes, at: int) -> int:
            nonlocal written
            written += len(data)
            if written > 2 * PIECE_BYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(handle, data, at)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(DiskRefused, match="is full; make room"):
            await puller.pull("org/smol")
        monkeypatch.setattr(os, "pwrite", real)
        last = await puller.pull("org/smol")
        assert last.resumed_bytes > 0
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_disk_without_room_refuses_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "SPARE_BYTES", 1 << 60)
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        with pytest.raises(DiskRefused, match="free, and this model needs"):
            await puller.pull("org/smol")


async def test_two_callers_share_one_pull_which_goes_on_with_the_last(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home, pull_mb_per_s=20)
        one = await begun(puller, "org/smol", 1)
        two = asyncio.create_task(puller.pull("org/smol", keep=True))
        await until(lambda: puller.weights._followers.get("org/smol") == 2)
        one.cancel()
        last = await two
        assert last.phase == "done"
        (held,) = await puller.weights.index.models()
        assert held.record is not None
        assert held.record.keep


async def test_a_node_that_fetches_gives_on_what_it_has(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, first = await pair(home, pull_mb_per_s=20)
        task = await begun(first, "org/smol", 2)
        second = await home.add("second")
        last = await second.pull("org/smol", from_node="puller")
        assert last.sources == ("puller",)
        assert content(Path(last.path)) == content(origin.folder / "org/smol")
        await task


@pytest.mark.parametrize("name", ["../etc", "/etc/passwd", "a/../../b", "", "a:b", ".hidden"])
async def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    async with house(tmp_path) as home:
        puller = await home.add("puller")
        with pytest.raises(InvalidArgument):
            await puller.pull(name)
        with pytest.raises(InvalidArgument):
            await puller.weights.remove(name, force=True)


async def test_a_name_of_any_script_is_pulled(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin = await home.add("origin")
        await asyncio.to_thread(make_model, origin.folder, "模型 – größe", mib=1)
        puller = await home.add("puller")
        last = await puller.pull("模型 – größe")
        assert Path(last.path).name == "模型 – größe"


async def test_a_gguf_file_comes_with_its_shards(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin = await home.add("origin")
        for n in (1, 2):
            (origin.folder / f"m-0000{n}-of-00002.gguf").write_bytes(os.urandom(5 * MIB))
        puller = await home.add("puller")
        last = await puller.pull("m-00001-of-00002")
        assert sorted(content(Path(last.path))) == [
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf",
        ]


async def test_what_no_peer_has_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        with pytest.raises(NotFound, match="no peer has 'other'") as refused:
            await puller.pull("other")
        assert puller.weights.status()["failed"] == {"other": str(refused.value)}
        with monkeypatch.context() as later:
            later.setattr("kakeya.weights.weights._FAILED_S", 0.0)
            assert puller.weights.status()["failed"] == {}
        await asyncio.to_thread(make_model, origin.folder, "other", mib=1)
        await origin.know()
        assert (await puller.pull("other")).phase == "done"
        assert puller.weights.status()["failed"] == {}
        with pytest.raises(NotFound, match="the live peers are origin"):
            await puller.pull("org/smol", from_node="nowhere")


async def test_what_is_here_needs_no_peer(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        alone = await home.add("alone")
        path = await asyncio.to_thread(make_model, alone.folder, "mine", mib=1)
        last = await alone.pull("mine")
        assert (last.note, last.path) == ("it is here already", str(path))
        with pytest.raises(NotFound, match="no peer is called 'nowhere'"):
            await alone.pull("mine", from_node="nowhere")


async def test_a_node_that_has_just_been_started_hears_of_its_peers_first(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        heard = asyncio.Event()
        puller = await home.add("puller")
        puller.weights.peers._heard = heard.wait
        task = asyncio.create_task(puller.pull("org/smol"))
        await until(lambda: puller.told)
        origin = await home.add("origin")
        await asyncio.to_thread(make_model, origin.folder, "org/smol", mib=1)
        heard.set()
        assert (await task).sources == ("origin",)


async def test_pullers_that_fall_asleep_do_not_keep_others_from_their_pieces(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        origin, _ = await pair(home)
        (model,) = await origin.weights.index.models(anew=True)
        manifest = await origin.weights.index.manifest(model)
        asleep: list[Any] = []
        awake: list[bytes] = []

        class Sleeper:
            async def write(self, part: pb.PiecePart) -> None:
                asleep.append(part)
                await asyncio.Event().wait()

        class Reader:
            async def write(self, part: pb.PiecePart) -> None:
                awake.append(part.data)

        service, request = (
            origin.weights._service,
            pb.ReadPieceRequest(digest=manifest.digest, piece=1),
        )
        readers: list[Any] = [Sleeper() for _ in range(3 * STREAMS)]
        tasks = [asyncio.create_task(service.ReadPiece(request, one)) for one in readers]
        await until(lambda: len(asleep) == len(tasks))
        reader: Any = Reader()
        await service.ReadPiece(request, reader)
        assert hashlib.sha256(b"".join(awake)).digest() == manifest.pieces[1].sha256
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_lies_under_the_name_is_not_overwritten(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        await asyncio.to_thread(make_model, puller.folder, "org/smol", mib=1, seed=2)
        with pytest.raises(Conflict, match="another model lies in"):
            await puller.pull("org/smol")


async def test_only_what_a_pull_brought_and_nothing_uses_is_removed(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        path = Path((await puller.pull("org/smol")).path)
        with pytest.raises(Conflict, match="no pull brought it there"):
            await origin.weights.remove("org/smol", force=True)
        with pytest.raises(NotFound):
            await puller.weights.remove("other", force=True)
        puller.configured["coder"] = str(path)
        with pytest.raises(Conflict, match="the node serves it as coder; --force"):
            await puller.weights.remove("org/smol", force=False)
        puller.loaded.add("coder")
        with pytest.raises(Conflict, match="it is loaded as coder"):
            await puller.weights.remove("org/smol", force=False)
        assert (await puller.weights.remove("org/smol", force=True))[0] == path
        assert list(puller.folder.iterdir()) == []


async def test_a_budget_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin = await home.add("origin")
        for seed, name in enumerate(("old", "kept", "used", "new", "large")):
            mib = 9 if name == "large" else 3
            await asyncio.to_thread(make_model, origin.folder, name, mib=mib, seed=seed)
        puller = await home.add("puller", disk_bytes=10 * MIB)
        for age, name in enumerate(("used", "old", "kept")):
            last = await puller.pull(name, keep=name == "kept")
            os.utime(Path(last.path) / RECORD, (age, age))
        puller.configured["used"] = str(puller.folder / "used")
        await puller.pull("new")
        names = {model.name for model in await puller.weights.index.models(anew=True)}
        assert names == {"kept", "used", "new"}
        with pytest.raises(DiskRefused, match=r"weights\.disk_mb\), of which 6\.0 MiB are in use"):
            await puller.pull("large")
        assert {model.name for model in await puller.weights.index.models(anew=True)} == names
