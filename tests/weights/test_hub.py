"""Downloads by the real huggingface_hub, from a hub on loopback; the real one was never tried."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.core.errors import Denied, InvalidArgument, NotFound, PeerUnavailable
from kakeya.weights import partial
from kakeya.weights.hub_child import wanted_files
from kakeya.weights.partial import PULLS, DiskRefused
from tests.waiting import until
from tests.weights.fake_hub import FakeHub, fake_hub
from tests.weights.world import content, house, make_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield made


def test_the_files_of_a_model_are_chosen_by_their_names() -> None:
    assert wanted_files(
        [
            *("config.json", "README.md", ".gitattributes", "consolidated.safetensors"),
            *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"),
            *("tokenizer.model", "chat_template.jinja", "run.py", "pytorch_model.bin"),
            *("onnx/model.json", "1_Pooling/config.json", "original/model.safetensors"),
        ]
    ) == [
        *("1_Pooling/config.json", "chat_template.jinja", "config.json", "model-1.safetensors"),
        *("model-2.safetensors", "model.safetensors.index.json", "tokenizer.model"),
    ]
    for names in (["a.gguf"], ["model_index.json", "model.safetensors"], ["../x.safetensors"], []):
        with pytest.raises(InvalidArgument):
            wanted_files(names)


async def test_what_no_peer_has_comes_from_the_hub_and_then_from_the_peer(
    tmp_path: Path, hub: FakeHub
) -> None:
    source = await asyncio.to_thread(make_model, tmp_path / "hub", "org/smol", mib=9)
    hub.repositories["org/smol"] = source
    hub.gate.clear()
    async with house(tmp_path) as home:
        first, second = await home.add("first"), await home.add("second")
        downloads = asyncio.create_task(first.pull("org/smol"))
        await until(lambda: first.weights.fetching and first.weights.fetching[0].state.bytes)
        waits = asyncio.create_task(second.pull("org/smol"))
        await until(
            lambda: [
                one
                for one in second.weights.fetching
                if one.state.note == "first downloads it from the hub"
            ]
        )
        hub.gate.set()
        last = await downloads
        assert last.sources == ("the hub",)
        path = Path(last.path)
        assert content(path) == content(source)
        assert [one.name for one in path.glob(".*")] == [".kakeya-pull.json"]
        sent = hub.sent_bytes
        last = await waits
        assert last.sources == ("first",)
        assert hub.sent_bytes == sent, "one download for the house"
        again = await first.pull("org/smol")
        assert again.note == "it is here already"


async def test_a_disk_without_room_refuses_before_the_hub_sends_a_byte(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "SPARE_BYTES", 1 << 60)
    hub.repositories["org/smol"] = await asyncio.to_thread(make_model, tmp_path / "hub", "org/smol")
    async with house(tmp_path) as home:
        first = await home.add("first")
        with pytest.raises(DiskRefused, match="free, and this model needs"):
            await first.pull("org/smol")
        assert hub.sent_bytes == 0
    async with house(tmp_path / "small") as home:
        second = await home.add("second", disk_bytes=1 << 20)
        with pytest.raises(DiskRefused, match=r"pulled models \(weights.disk_mb\)"):
            await second.pull("org/smol")
        assert hub.sent_bytes == 0


@pytest.mark.parametrize("later_s", [0.0, 0.5])
async def test_two_nodes_that_begin_at_once_download_once(
    tmp_path: Path, hub: FakeHub, later_s: float
) -> None:
    source = await asyncio.to_thread(make_model, tmp_path / "hub", "org/smol", mib=3)
    hub.repositories["org/smol"] = source
    async with house(tmp_path) as home:
        first, second = await home.add("first"), await home.add("second")
        later = asyncio.create_task(second.pull("org/smol"))  # "first" goes first by its id
        await asyncio.sleep(later_s)
        ends = await asyncio.gather(first.pull("org/smol"), later)
        assert [end.phase for end in ends] == ["done", "done"]
        assert hub.sent_bytes <= sum(map(len, content(source).values()))


async def test_a_download_that_was_given_up_goes_on(tmp_path: Path, hub: FakeHub) -> None:
    source = await asyncio.to_thread(make_model, tmp_path / "hub", "org/smol", mib=9)
    hub.repositories["org/smol"] = source
    async with house(tmp_path) as home:
        first = await home.add("first")
        hub.gate.clear()
        task = asyncio.create_task(first.pull("org/smol"))
        await until(lambda: first.weights.fetching and first.weights.fetching[0].state.done_bytes)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert list((first.folder / PULLS).iterdir())
        hub.gate.set()
        last = await first.pull("org/smol")
        assert content(Path(last.path)) == content(source)


async def test_the_reasons_of_the_hub_are_told(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await asyncio.to_thread(make_model, tmp_path / "hub", "org/smol", mib=1)
    hub.repositories["org/smol"] = source
    async with house(tmp_path) as home:
        first = await home.add("first")
        with pytest.raises(NotFound, match="org/other at the hub"):
            await first.pull("org/other")
        hub.gated.add("org/closed")
        with pytest.raises(Denied, match="org/closed at the hub"):
            await first.pull("org/closed")
        hub.lies = True
        with pytest.raises(PeerUnavailable, match="damaged or not at all"):
            await first.pull("org/smol")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(PeerUnavailable, match="the hub cannot be reached"):
            await first.pull("org/smol")
        assert not (first.folder / "org").exists()
