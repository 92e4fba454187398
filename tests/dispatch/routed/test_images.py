"""Image models of the fleet, as the front doors of one node find them: by real cards, and by real
calls."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from kakeya.core.errors import (
    InvalidArgument,
    KakeyaError,
    MemoryRefused,
    NotFound,
    PeerUnavailable,
    QueueFull,
)
from kakeya.core.ids import ModelId
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.images import RoutedImageModel
from kakeya.dispatch.routed.models import RoutedModels
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.generation.facts import ModelState
from kakeya.generation.image import DrawnImage, ImageRequest, PipelineKind
from tests.dispatch.peers.relaying import relaying
from tests.dispatch.peers.test_neighbours import Front
from tests.fleet.nodes import verifier
from tests.gateway.openai.test_images import ToyPainter
from tests.gateway.toy import Directory
from tests.waiting import until

ASKED = ImageRequest(prompt="a fox", seed=7, size=(64, 64))


def drawing(name: str = "painter") -> OfferedModel:
    return OfferedModel(ModelId(name), CardRole.TOOL, capability="image")


def fleet(front: Front, *own: ToyPainter) -> RoutedModels:
    return RoutedModels(Directory(images=own), front.peers, RouteHistory(front.clock))  # type: ignore[arg-type]


async def draw(models: RoutedModels, name: str = "painter") -> tuple[DrawnImage, ...]:
    async with asyncio.timeout(60):
        return await models.image_model(name).draw(ASKED, lambda *_: None)


def test_models_of_peers_are_found_and_listed_behind_the_own_ones(front: Front) -> None:
    mine = ToyPainter("mine")
    models = fleet(front, mine)
    assert models.image_model("") is models.image_model("mine") is mine
    front.hear("left", drawing("painter"), drawing("other"))
    front.hear("right", drawing("painter"), OfferedModel(ModelId("up"), CardRole.TOOL))
    assert [one.model_id for one in models.image_models()] == ["mine", "other", "painter"]
    assert models.image_model("") is mine
    found = models.image_model("painter")
    assert isinstance(found, RoutedImageModel)
    assert (found.nodes, found.kind, found.state) == (["left", "right"], None, ModelState.READY)
    assert fleet(front).image_model("").model_id == "other"
    for name in ("up", "none"):
        with pytest.raises(NotFound):
            models.image_model(name)


def test_an_image_model_that_a_peer_offered_lately_is_away(front: Front) -> None:
    models = fleet(front)
    front.hear("left", drawing("painter"))
    models.image_model("painter")
    front.clock.advance(1)
    front.hear("left", drawing("other"))
    with pytest.raises(PeerUnavailable, match="the model painter just now"):
        models.image_model("painter")
    with pytest.raises(NotFound):
        models.image_model("none")


def test_a_model_that_peers_have_too_is_described_by_the_own_one(front: Front) -> None:
    front.hear("left", drawing())
    found = fleet(front, ToyPainter(kind=PipelineKind.FLUX)).image_model("painter")
    assert isinstance(found, RoutedImageModel)
    assert (found.kind, found.state) == (PipelineKind.FLUX, ModelState.UNLOADED)


async def test_a_peer_draws_what_this_node_cannot(front: Front) -> None:
    theirs = ToyPainter()
    async with relaying(theirs) as left:
        front.hear("left", drawing(), address=left.address)
        (image,) = await draw(fleet(front))
        assert (image.seed, theirs.asked) == (7, [ASKED])


async def test_requests_at_once_go_to_nodes_in_turn_this_one_first(front: Front) -> None:
    mine, theirs = ToyPainter(lasts=600.0), ToyPainter(lasts=600.0)
    async with relaying(theirs) as left:
        front.hear("left", drawing(), address=left.address)
        models = fleet(front, mine)
        drawings = []
        for counts in ((1, 0), (1, 1), (2, 1), (2, 2)):
            drawings.append(asyncio.ensure_future(draw(models)))
            await until(lambda wanted=counts: (len(mine.asked), len(theirs.asked)) == wanted)
        for one in drawings:
            one.cancel()
        await asyncio.gather(*drawings, return_exceptions=True)
        mine.lasts = 0.0
        await draw(models)
        assert len(mine.asked) == 3, "nothing is counted any more"


@pytest.mark.parametrize(
    "failure", [MemoryRefused("no room"), QueueFull("full"), PeerUnavailable("its worker died")]
)
async def test_a_request_that_one_node_fails_is_drawn_by_the_next(
    front: Front, failure: KakeyaError
) -> None:
    mine, broken, theirs = ToyPainter(fails=failure), ToyPainter(fails=failure), ToyPainter()
    async with relaying(broken) as left, relaying(theirs) as right:
        front.hear("left", drawing(), address=left.address)
        front.hear("right", drawing(), address=right.address)
        models = fleet(front, mine)
        await draw(models)
        assert [len(one.asked) for one in (mine, broken, theirs)] == [1, 1, 1]
        theirs.fails = failure
        with pytest.raises(type(failure), match=f"right: {failure.message}"):
            await draw(models)
        assert not front.failed, "all of them answered"


async def test_a_node_of_an_older_build_draws_nothing_and_serves_text_on(front: Front) -> None:
    older, theirs = grpc.aio.server(), ToyPainter()
    address = f"127.0.0.1:{older.add_insecure_port('127.0.0.1:0')}"
    await older.start()
    try:
        async with relaying(theirs) as right:
            front.hear("left", drawing(), verifier("toy"), address=address)
            front.hear("right", drawing(), address=right.address)
            await draw(fleet(front))
    finally:
        await older.stop(None)
    assert len(theirs.asked) == 1
    assert front.offering("toy") == ["left"]
    assert not front.failed


async def test_a_wrong_request_is_asked_of_one_node(front: Front) -> None:
    mine, theirs = ToyPainter(fails=InvalidArgument("no such size")), ToyPainter()
    async with relaying(theirs) as left:
        front.hear("left", drawing(), address=left.address)
        with pytest.raises(InvalidArgument):
            await draw(fleet(front, mine))
    assert not theirs.asked


async def test_a_node_that_drains_has_peers_draw(front: Front) -> None:
    mine, theirs = ToyPainter(), ToyPainter()
    models = fleet(front, mine)
    models.drain("an update")
    with pytest.raises(PeerUnavailable, match="no other node has painter"):
        models.image_model("painter")
    async with relaying(theirs) as left:
        front.hear("left", drawing(), address=left.address)
        await draw(models)
    assert (len(mine.asked), len(theirs.asked)) == (0, 1)
