"""A peer's clouds, commands and painters: the same parts, errors and ends as of those of this node.

A real server and a real channel on loopback; the commands are shell scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.config import CloudSettings
from kakeya.backends.relay.faults import UpstreamBusy, UpstreamDenied
from kakeya.backends.request import CompletionRequest
from kakeya.core import errors
from kakeya.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KakeyaError,
    NotFound,
    PeerError,
    PeerProtocol,
    PeerUnavailable,
    Refused,
    Unsupported,
)
from kakeya.dispatch.peers import relay_calls, relay_service
from kakeya.generation.image import DrawnImage, ImageRequest, PipelineKind
from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller
from kakeya.text.tools.answer import Part, Said
from kakeya.wire import beats
from tests.backends.images.scripted_worker import png_size
from tests.backends.relay.test_relays import OtherSettings
from tests.backends.relay.upstream import answered, chat, refuses, says, stalls, text_of, upstream
from tests.dispatch.peers.relaying import relaying, script
from tests.gateway.openai.test_images import ToyPainter
from tests.waiting import until

ENDLESS = "printf one; exec sleep 60"
TYPED = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, KakeyaError)
    and kind not in (KakeyaError, errors.InvariantBroken, errors.Cancelled)
]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(relay_calls, "_CHECK_S", 60.0)


async def begin(parts: AsyncGenerator[Part | Finished, None]) -> Part | Finished:
    async with asyncio.timeout(60):
        return await anext(parts)


async def test_a_shared_command_and_a_shared_cloud_answer_a_peer() -> None:
    async with upstream(says("salt", " water")) as west:
        cloud = CloudSettings(url=west.url, shared=True)
        up = script("tr a-z A-Z")
        async with relaying(clouds={"west": cloud}, commands={"up": up}) as node:
            assert text_of(await answered(node.calls.answer(chat("up")))) == "HELLO!"
            parts = await answered(node.calls.answer(chat("cloud:west/m")))
            assert node.service.served == 2
            (client,) = node.clients.status()
    assert text_of(parts) == "salt water"
    assert parts[-1] == Finished(reason="stop", prompt_tokens=7, completion_tokens=2)
    assert west.asked[0].body["model"] == "m"
    assert (client["client"], client["requests"]) == ("front", 2)


async def test_what_is_not_shared_is_not_there_and_is_not_begun(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    private = {"up": script(f"touch {trace}", shared=False)}
    async with (
        upstream(says("no")) as west,
        relaying(clouds={"west": CloudSettings(url=west.url)}, commands=private) as node,
    ):
        for name in ("up", "cloud:west/m", "none"):
            with pytest.raises(NotFound, match=f"mini: no model '{name}' is shared here"):
                await node.calls.check(chat(name))
            with pytest.raises(NotFound):
                await answered(node.calls.answer(chat(name)))
        assert not west.asked
    assert not trace.exists()


async def test_what_an_answer_would_not_follow_is_told_before_it() -> None:
    async with relaying(commands={"up": script("cat")}) as node:
        assert await node.calls.check(chat("up", max_tokens=9)) == ("max_tokens",)
        with pytest.raises(Unsupported) as wrong:
            await node.calls.check(chat("up", top_logprobs=1))
        assert wrong.value.param == "logprobs"
        with pytest.raises(Unsupported):
            await answered(node.calls.answer(chat("up", top_logprobs=1)))
        prompts = CompletionRequest(params=chat("up").params, prompts=("a", (1, 2)))
        with pytest.raises(Unsupported, match="prompt in token ids"):
            await node.calls.check(prompts)
        assert not node.service.served


@pytest.mark.parametrize("kind", TYPED, ids=lambda kind: kind.__name__)
async def test_an_error_comes_back_as_the_same_type(kind: type[KakeyaError]) -> None:
    fault = kind("as the backend says")
    fault.retry_after_s = 7.0
    others = {"o": OtherSettings(shared=True, fault=fault)}
    async with relaying(others=others) as node:
        parts = node.calls.answer(chat("other:o"))
        assert await begin(parts) == Said("one")
        with pytest.raises(KakeyaError, match="mini: as the backend says") as caught:
            await anext(parts)
        await until(lambda: not node.running)
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidArgument), (401, UpstreamDenied), (429, UpstreamBusy), (500, PeerError)],
)
async def test_what_a_cloud_refuses_with_comes_back_typed(status: int, kind: type) -> None:
    refused = refuses(status, {"error": {"message": "no"}}, retry_after="3")
    async with (
        upstream(refused) as west,
        relaying(clouds={"west": CloudSettings(url=west.url, shared=True)}) as node,
    ):
        with pytest.raises(kind, match=f"mini: the cloud west answered {status}") as caught:
            await answered(node.calls.answer(chat("cloud:west/m")))
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == (3.0 if kind is UpstreamBusy else None)


async def test_the_deadline_of_a_request_holds_at_the_peer() -> None:
    async with relaying(commands={"slow": script("exec sleep 60")}) as node:
        with pytest.raises(DeadlineExceeded, match="gave no text within"):
            await answered(node.calls.answer(chat("slow", deadline_s=0.2)))


async def test_a_caller_that_leaves_ends_the_work_of_the_backend() -> None:
    left = asyncio.Event()

    async def respond(one) -> None:
        await stalls(one)
        left.set()

    async with (
        upstream(respond) as west,
        relaying(
            clouds={"west": CloudSettings(url=west.url, shared=True)},
            commands={"endless": script(ENDLESS)},
        ) as node,
    ):
        for name in ("cloud:west/m", "endless"):
            parts = node.calls.answer(chat(name))
            assert await begin(parts) == Said("one")
            assert node.running == 1
            await parts.aclose()
            await until(lambda: not node.running)
        async with asyncio.timeout(60):
            await left.wait()
        assert [one["running"] for one in node.relays.status()] == [0, 0]


async def test_a_backend_that_is_silent_for_long_is_alive_and_a_peer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    others = {"o": OtherSettings(shared=True, silent_s=0.3)}
    async with relaying(others=others, commands={"endless": script(ENDLESS)}) as node:
        monkeypatch.setattr(beats, "SILENT_S", 5.0)
        assert text_of(await answered(node.calls.answer(chat("other:o")))) == "one"
        parts = node.calls.answer(chat("endless"))
        await begin(parts)
        monkeypatch.setattr(beats, "BEAT_S", 100.0)
        monkeypatch.setattr(beats, "SILENT_S", 0.2)
        with pytest.raises(PeerUnavailable, match="mini: nothing was heard"):
            async with asyncio.timeout(60):
                _ = [part async for part in parts]
        await until(lambda: not node.running)


async def test_a_node_that_drains_takes_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waits = f"printf one; while [ ! -e {go} ]; do sleep 0.05; done; printf two"
    async with relaying(ToyPainter(), commands={"waits": script(waits)}) as node:
        parts = node.calls.answer(chat("waits"))
        said = [await begin(parts)]
        node.service.drain("an update")
        for refused in (
            node.calls.check(chat("waits")),
            answered(node.calls.answer(chat("waits"))),
            node.calls.draw("painter", ImageRequest(prompt="a", seed=1), lambda *_: None, None),
        ):
            with pytest.raises(Refused, match="mini: this node takes no requests: an update"):
                await refused
        go.touch()
        said += await answered(parts)
    assert text_of(said) == "onetwo"


async def test_a_request_that_is_too_large_for_the_way_is_refused_with_its_size() -> None:
    async with relaying(commands={"up": script("cat")}) as node:
        with pytest.raises(InvalidArgument, match="go to another node"):
            await node.calls.check(chat("up", "x" * 5_000_000))


# --- images


async def test_a_painter_draws_for_a_peer_and_its_steps_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_service, "PIECE_BYTES", 16)
    painter, steps = ToyPainter(), list[tuple[float, str]]()
    asked = ImageRequest(prompt="a fox", seed=7, count=2, size=(128, 64), steps=4)
    async with relaying(painter) as node:
        drawn = await node.calls.draw("painter", asked, lambda *step: steps.append(step), None)
    assert painter.asked == [asked]
    assert [image.seed for image in drawn] == [7, 8]
    assert [png_size(image.png) for image in drawn] == [(128, 64)] * 2
    assert drawn[0].png != drawn[1].png
    assert steps == [(0.5, "step 1 of 2")]


async def test_a_caller_that_leaves_ends_a_drawing() -> None:
    painter = ToyPainter(lasts=600.0)
    async with relaying(painter) as node:
        drawing = asyncio.ensure_future(
            node.calls.draw("painter", ImageRequest(prompt="a", seed=1), lambda *_: None, None)
        )
        await until(lambda: painter.asked)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        async with asyncio.timeout(60):
            await painter.cancelled.wait()
        await until(lambda: not node.running)


async def test_a_drawing_that_waits_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    waits = RequestWait(reason=WaitReason.PLACE, model_id="painter", position=2, seconds=3.5)
    go = asyncio.Event()

    class Waiting(ToyPainter):
        def waits_for(self) -> RequestWait:  # type: ignore[override]
            return waits

        async def draw(self, request, tell, wait=None) -> tuple[DrawnImage, ...]:
            await go.wait()
            return await super().draw(request, tell, wait)

    teller = WaitTeller(lambda: None)
    async with relaying(Waiting()) as node:
        asked = ImageRequest(prompt="a", seed=1)
        drawing = asyncio.ensure_future(node.calls.draw("painter", asked, lambda *_: None, teller))
        await until(lambda: teller.ask() == waits)
        go.set()
        await drawing
    assert teller.ask() is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"count": 0}, "n"),
        ({"count": 11}, "n"),
        ({"steps": 151}, "num_inference_steps"),
        ({"size": (32, 64)}, "size"),
        ({"size": (4096, 4096)}, "size"),
        ({"size": (72, 64)}, "size"),
    ],
)
async def test_images_that_no_door_asks_for_are_refused(change: dict, param: str) -> None:
    painter = ToyPainter(kind=PipelineKind.FLUX)
    async with relaying(painter) as node:
        asked = replace(ImageRequest(prompt="a", seed=1), **change)
        with pytest.raises(InvalidArgument) as wrong:
            await node.calls.draw("painter", asked, lambda *_: None, None)
    assert wrong.value.param == param
    assert not painter.asked


async def test_a_painter_fails_a_peer_as_its_own_clients() -> None:
    fault = errors.MemoryRefused("no room", retry_after_s=4.0)
    async with relaying(ToyPainter(fails=fault)) as node:
        asked = ImageRequest(prompt="a", seed=1)
        with pytest.raises(errors.MemoryRefused, match="mini: no room") as caught:
            await node.calls.draw("painter", asked, lambda *_: None, None)
        with pytest.raises(NotFound):
            await node.calls.draw("other", asked, lambda *_: None, None)
    assert caught.value.retry_after_s == 4.0


@pytest.mark.parametrize("png", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n"])
async def test_what_is_no_image_is_the_fault_of_the_peer(png: bytes) -> None:
    class Broken(ToyPainter):
        async def draw(self, request, tell, wait=None) -> tuple[DrawnImage, ...]:
            return (DrawnImage(png=png, seed=1),)

    async with relaying(Broken()) as node:
        with pytest.raises(PeerProtocol, match="1 PNG files were asked for"):
            await node.calls.draw(
                "painter", ImageRequest(prompt="a", seed=1), lambda *_: None, None
            )


async def test_of_more_images_than_were_asked_for_no_more_are_taken() -> None:
    class Many(ToyPainter):
        async def draw(self, request, tell, wait=None) -> tuple[DrawnImage, ...]:
            return (await super().draw(request, tell, wait)) * 5

    async with relaying(Many()) as node:
        with pytest.raises(PeerProtocol, match="sent 1 images and"):
            await node.calls.draw(
                "painter", ImageRequest(prompt="a", seed=1), lambda *_: None, None
            )
