"""Vectors by an encoder of another node."""

from __future__ import annotations

import pytest

from kakeya.core.errors import (
    InvalidArgument,
    KakeyaError,
    LoadFailed,
    NotFound,
    PeerUnavailable,
    QueueFull,
)
from kakeya.dispatch.routed.embedder import KEPT_S, RoutedEmbedder, VectorWeights
from kakeya.generation.facts import ModelState
from kakeya.generation.manifest import NO_MANIFEST
from tests.dispatch.peers.world import ToyEncoder, facts_of
from tests.dispatch.routed.world import Shelf, ToyNode


class World(Shelf):
    """Two peers with one encoder."""

    def __init__(self) -> None:
        super().__init__(())
        for name in ("left", "right"):
            self.fleet.nodes[name] = ToyNode(name, ToyEncoder("e"))
        self.weights = VectorWeights(self.clock)
        self.embedder = self.another()

    def another(self) -> RoutedEmbedder:
        """As each request has its own."""
        return RoutedEmbedder("e", self.fleet, self.weights)  # type: ignore[arg-type]

    def encoder(self, name: str) -> ToyEncoder:
        model = self.node(name).model
        assert isinstance(model, ToyEncoder)
        return model


@pytest.fixture
def world() -> World:
    return World()


async def test_texts_go_to_a_peer_that_has_the_encoder(world: World) -> None:
    one = world.embedder
    assert (one.model_id, one.manifest, one.folder) == ("e", NO_MANIFEST, None)
    assert (one.state, one.last_error, one.waits_for()) == (ModelState.READY, "", None)
    assert one.facts is None
    assert await one.ready(1.0) == one.facts == facts_of()
    assert await one.embed([[1, 2], [3]], size=8, client="c") == bytes([2, 1])
    assert world.encoder("left").asked == [([[1, 2], [3]], 8)]


@pytest.mark.parametrize("kind", [PeerUnavailable, QueueFull, NotFound, LoadFailed])
async def test_after_a_loss_the_next_peer_makes_all_vectors(
    world: World, kind: type[KakeyaError]
) -> None:
    world.encoder("left").fails = kind("not here")
    assert await world.embedder.embed([[1, 2]]) == bytes([2])
    assert [name for name, _ in world.fleet.failures] == ["left"]
    world.encoder("right").fails = kind("nor here")
    with pytest.raises(kind, match="nor here"):
        await world.embedder.embed([[1, 2]])


async def test_a_wrong_text_ends_the_call_at_once(world: World) -> None:
    world.encoder("left").fails = InvalidArgument("a text is empty")
    with pytest.raises(InvalidArgument):
        await world.embedder.embed([[]])
    assert world.encoder("right").asked == []


async def test_an_encoder_with_other_words_gets_no_texts(world: World) -> None:
    await world.embedder.ready(1.0)
    world.node("right").vocabulary_digest = "other words"
    world.encoder("left").fails = PeerUnavailable("lost")
    with pytest.raises(PeerUnavailable, match="lost"):
        await world.embedder.embed([[1]])
    assert world.encoder("right").asked == []


@pytest.mark.parametrize("is_old", [False, True], ids=["other weights", "an older node"])
async def test_vectors_of_one_name_come_from_one_state_of_weights(
    world: World, is_old: bool
) -> None:
    """Two nodes have unlike encoders by one name."""
    if is_old:
        world.node("right").is_old = True
    else:
        world.told("right", base_fingerprint="others")
    assert await world.embedder.embed([[1, 2]]) == bytes([2])
    world.encoder("left").fails = PeerUnavailable("left is lost")
    with pytest.raises(PeerUnavailable, match="left is lost"):
        await world.another().embed([[1, 2]])
    world.node("left").away_until_mono = world.clock.mono() + 60
    for _ in range(2):
        with pytest.raises(PeerUnavailable, match="right has other weights by the name e"):
            await world.another().embed([[1, 2]])
    assert len(world.encoder("right").asked) == 1, "it is not asked each time"
    world.clock.advance(61)
    world.encoder("left").fails = None
    assert await world.another().embed([[1, 2]]) == bytes([2])
    assert len(world.encoder("left").asked) == 3


async def test_weights_that_no_node_has_any_more_are_given_up(world: World) -> None:
    world.told("right", base_fingerprint="others")
    await world.embedder.embed([[1, 2]])
    world.node("left").away_until_mono = float("inf")
    world.clock.advance(KEPT_S)
    assert await world.another().embed([[1, 2]]) == bytes([2])


async def test_without_a_peer_there_is_none(world: World) -> None:
    for node in world.fleet.nodes.values():
        node.away_until_mono = float("inf")
    with pytest.raises(NotFound, match="no node makes embeddings with e now"):
        await world.embedder.embed([[1]])
    with pytest.raises(NotFound):
        await world.embedder.ready(1.0)
