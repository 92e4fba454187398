"""Pulls that are given up, moved, refused or lied to at the wrong moment."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kakeya.core.errors import Cancelled, Conflict, PeerProtocol, PeerUnavailable, StoreFailed
from kakeya.core.units import MIB
from kakeya.weights import found, pull
from kakeya.weights import index as index_module
from kakeya.weights.found import PullRecord, read_record
from kakeya.weights.hub import HubDownload
from kakeya.weights.index import WeightIndex
from kakeya.weights.manifest import WeightsFile, WeightsManifest
from kakeya.weights.partial import PULLS, PartialModel
from kakeya.weights.schedule import RateBound
from tests.waiting import until
from tests.weights.test_pull import begun, pair
from tests.weights.world import Faulty, content, house, make_model


async def test_a_piece_that_was_being_written_when_its_source_was_lost_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writing, gate = PartialModel.write, threading.Event(), threading.Event()

    def slow(self: PartialModel, piece: Any, data: bytearray) -> None:
        if not writing.is_set():
            writing.set()
            gate.wait(60)
        real(self, piece, data)

    monkeypatch.setattr(PartialModel, "write", slow)
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        task = asyncio.create_task(puller.pull("org/smol"))
        await until(writing.is_set)
        (fetch,) = puller.weights.fetching
        fetch._schedule.sources["origin"].lost = 1
        fetch._make_place(())
        await asyncio.sleep(0)
        gate.set()
        last = await task
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_source_that_has_another_address_is_gone_on_with(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        origin.weights.register(server)
        await server.start()
        home.cards["origin"].grpc_address = f"127.0.0.1:{port}"
        await origin.server.stop(None)
        try:
            last = await task
        finally:
            await server.stop(None)
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_pull_without_a_source_tells_what_its_sources_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        for path in (origin.folder / "org/smol").glob("*.safetensors"):
            os.utime(path)
        (fetch,) = puller.weights.fetching
        await until(lambda: fetch._last_failure)
        monkeypatch.setattr(pull, "PATIENCE_S", 0.5)
        with pytest.raises(PeerUnavailable, match=r"; origin: .* was changed|; origin: no model"):
            await task


async def test_sources_that_were_left_take_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "MOST_SOURCES", 1)
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        liar = await home.add("a-liar", service=Faulty)
        await asyncio.to_thread(make_model, liar.folder, "org/smol")
        await liar.know()
        last = await puller.pull("org/smol")
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


async def test_a_disk_that_keeps_nothing_ends_the_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartialModel, "unproven", lambda *_: {0})
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        with pytest.raises(StoreFailed, match="1 pieces of org/smol were wrong on the disk 3"):
            await puller.pull("org/smol")
        assert not (puller.folder / "org").exists()


async def test_files_are_proven_even_if_every_piece_was_here_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        origin, puller = await pair(home)
        with monkeypatch.context() as patched:

            def full(*_: object) -> Path:
                raise OSError(errno.EIO, "Input/output error")

            patched.setattr(PartialModel, "finish", full)
            with pytest.raises(StoreFailed):
                await puller.pull("org/smol")
        (part,) = (puller.folder / PULLS).iterdir()
        for name in ("empty.txt", "model-00001-of-00002.safetensors"):
            with (part / name).open("ab") as file:
                file.write(b"of a power cut")
        last = await puller.pull("org/smol")
        assert last.resumed_bytes == last.bytes
        assert content(Path(last.path)) == content(origin.folder / "org/smol")


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    data = b"{}"
    file = WeightsFile("config.json", 2, bytes(32), (hashlib.sha256(data).digest(),))
    made = PartialModel(tmp_path, WeightsManifest((file,)))
    made.folder.mkdir(parents=True)
    (made.folder / "config.json").write_bytes(data)
    with pytest.raises(PeerProtocol, match="has wrong digests"):
        made.unproven(lambda: False)


def test_what_the_disk_cannot_read_of_an_earlier_pull_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"{}"
    sha256 = hashlib.sha256(data).digest()
    made = PartialModel(tmp_path, WeightsManifest((WeightsFile("a.json", 2, sha256, (sha256,)),)))
    made.folder.mkdir(parents=True)
    (made.folder / "a.json").write_bytes(data)
    assert made.present(lambda _: None, lambda: False) == {0}

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert made.present(lambda _: None, lambda: False) == set()


async def test_a_pull_that_is_begun_while_its_forerunner_ends_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        task.cancel()
        await asyncio.sleep(0)
        last = await puller.pull("org/smol")
        assert last.phase == "done"


async def test_the_followers_of_a_pull_that_the_node_ends_are_told(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home, pull_mb_per_s=20)
        task = await begun(puller, "org/smol", 1)
        await puller.weights.aclose()
        with pytest.raises(Cancelled, match="the pull of org/smol was ended; pull again"):
            await task


async def test_a_pull_that_is_given_up_while_it_gets_its_name_has_it_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, finishing, gate = PartialModel.finish, threading.Event(), threading.Event()

    def slow(self: PartialModel, record: Any) -> Path:
        finishing.set()
        gate.wait(60)
        return real(self, record)

    monkeypatch.setattr(PartialModel, "finish", slow)
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        task = asyncio.create_task(puller.pull("org/smol"))
        await until(finishing.is_set)
        task.cancel()
        await asyncio.sleep(0)
        assert puller.weights.fetching, "it still works in its folder"
        gate.set()
        await asyncio.gather(task, return_exceptions=True)
        (model,) = await puller.weights.index.models(anew=True)
        assert puller.weights.index.known(model) is not None


async def test_the_budget_counts_what_comes_and_spares_downloads(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        puller = await home.add("puller", disk_bytes=10 * MIB)
        download = HubDownload("org/other", puller.folder).folder
        download.mkdir(parents=True)
        (download / "model.safetensors").write_bytes(bytes(4 * MIB))
        pulls: list[tuple[str, int]] = [(download.name, 8 * MIB), ("0" * 64, 5 * MIB)]
        for part, size in pulls:
            one = pull.Pull(part, puller.weights._tools, from_node="", keep=False)
            one.part = part
            one._meter.tell(bytes=size)
            puller.weights._pulls[part] = one, asyncio.create_task(asyncio.sleep(60, tmp_path))
        try:
            with pytest.raises(pull.KakeyaError, match=r"needs 5\.0 MiB .* of which 8\.0 MiB are"):
                await puller.weights._make_room("0" * 64)
            assert download.exists()
        finally:
            await puller.weights.aclose()
            puller.weights._pulls.clear()


async def test_digests_are_known_before_anything_is_told(tmp_path: Path) -> None:
    def index() -> WeightIndex:
        node = {"data_dir": tmp_path, "hub": None, "configured": dict, "on_change": print}
        return WeightIndex(tmp_path / "models", clock=clock, **node)  # type: ignore[arg-type]

    async with house(tmp_path) as home:
        clock = (await home.add("any")).weights._clock
        await asyncio.to_thread(make_model, tmp_path / "models", "m", mib=1)
        first = index()
        (model,) = await first.models()
        await first.manifest(model)
        second = index()
        await second.models()
        assert second.known(model) is not None


async def test_a_model_that_is_asked_for_waits_for_one_file_of_another_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate, order = index_module._hash, threading.Event(), []

    def slow(file: Any, *more: Any) -> Any:
        order.append(Path(file.path).parent.name)
        gate.wait(60)
        return real(file, *more)

    monkeypatch.setattr(index_module, "_hash", slow)
    async with house(tmp_path) as home:
        mini = await home.add("mini")
        for name in ("large", "small"):
            await asyncio.to_thread(make_model, mini.folder, name, mib=1)
        large, small = await mini.weights.index.models(anew=True)
        tasks = [asyncio.create_task(mini.weights.index.manifest(large))]
        await until(lambda: order)
        tasks.append(asyncio.create_task(mini.weights.index.manifest(small)))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
    assert order[:4] == ["large", "small", "large", "small"]


async def test_a_removal_that_a_kill_cut_off_is_ended_at_the_start(tmp_path: Path) -> None:
    from kakeya.core.clock import SystemClock
    from kakeya.core.tasks import Supervisor

    async with house(tmp_path) as home:
        puller = await home.add("puller")
        left = puller.folder / PULLS / "removed-x" / "model"
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(bytes(10))
        async with Supervisor(SystemClock()) as tasks:
            puller.weights.start(tasks)
            await until(lambda: not left.parent.exists())


async def test_parts_of_another_state_of_a_model_leave_with_its_pull(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        for name in ("org/smol", "org/other"):
            part = PullRecord(name=name, digest="", keep=False, source="", pulled_at=0.0)
            await asyncio.to_thread(HubDownload(name, puller.folder).open, part)
        await puller.pull("org/smol")
        (left,) = (puller.folder / PULLS).iterdir()
        assert left == HubDownload("org/other", puller.folder).folder


async def test_a_model_that_is_here_is_kept_when_a_pull_says_so(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        path = Path((await puller.pull("org/smol")).path)
        last = await puller.pull("org/smol", keep=True)
        assert last.note == "it is here already"
        record = await asyncio.to_thread(read_record, path)
        assert record is not None
        assert record.keep


async def test_what_a_node_has_elsewhere_is_not_downloaded(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        mine = await home.add("mine")
        path = await asyncio.to_thread(make_model, tmp_path / "cache", "org", mib=1)
        mine.configured["org/smol"] = str(path)
        last = await mine.pull("org/smol")
        assert (last.note, last.path) == ("it is here already", str(path))


async def test_no_model_is_put_into_another_one(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        _, puller = await pair(home)
        await asyncio.to_thread(make_model, puller.folder, "org", mib=1, seed=2)
        with pytest.raises(Conflict, match="would lie within another model"):
            await puller.pull("org/smol")


async def test_a_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as home:
        origin, _ = await pair(home)
        (origin.folder / "lost+found").mkdir()
        real = found.is_model

        def refuses(folder: Path) -> bool:
            if folder.name == "lost+found":
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(folder)

        monkeypatch.setattr(found, "is_model", refuses)
        assert [one.name for one in await origin.weights.index.models(anew=True)] == ["org/smol"]


def test_a_download_may_have_weights_that_its_index_does_not_name(tmp_path: Path) -> None:
    download = HubDownload("org/smol", tmp_path)
    download.folder.mkdir(parents=True)
    for name in ("model.safetensors", "model-1.safetensors"):
        (download.folder / name).write_bytes(b"")
    download._sha256s = {"model.safetensors": "", "model-1.safetensors": ""}
    empty = hashlib.sha256(b"").digest()
    download.check(WeightsManifest((WeightsFile("model-1.safetensors", 0, empty, ()),)))


def test_a_bound_tells_until_when_it_is_taken() -> None:
    bound = RateBound(2.0)
    assert bound.turn(6, 10.0) == 0.0
    assert bound.turn(6, 10.0) == 3.0
    assert bound.free_mono == 16.0, "nothing is silent before that"
