"""The models of the fleet by name, as the front doors of one node find them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kakeya.backends.request import ModelNotFound
from kakeya.core.errors import Denied, InvalidArgument, NotFound, PeerUnavailable
from kakeya.dispatch.routed.embedder import RoutedEmbedder
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.dispatch.routed.models import AWAY_S, RoutedModels
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, PrefixClaim
from tests.dispatch.peers.world import QuotedToy, ToyEncoder, ToyModels, facts_of
from tests.dispatch.routed.world import Shelf, ToyNode


class World(Shelf):
    """Peers with `toy` and `shared`; this node has `mine`, `shared` and an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet.nodes["third"] = ToyNode("third", QuotedToy("shared"))
        self.fleet.nodes["vectors"] = ToyNode("vectors", ToyEncoder("their-encoder"))
        self.mine, self.shared = QuotedToy("mine"), QuotedToy("shared")
        self.encoder = ToyEncoder("my-encoder")
        self.own_models = ToyModels((self.mine, self.shared), (self.encoder,))
        self.models = RoutedModels(self.own_models, self.fleet, self.history)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def test_a_name_that_only_this_node_has_is_its_own_model(world: World) -> None:
    assert world.models.get("mine") is world.mine
    assert world.models.get("") is world.mine
    assert world.models.get("mine:private", "owner") is world.mine


def test_a_name_that_others_have_too_is_routed(world: World) -> None:
    model = world.models.get("shared", "owner")
    assert isinstance(model, RoutedModel)
    assert model.facts == world.shared.facts
    assert world.shared.clients == ["owner"]
    assert isinstance(world.models.get("toy"), RoutedModel)
    assert world.models.get("toy:french").model_id == "toy:french"


def test_a_model_that_no_peer_has_any_more_is_the_own_one(world: World) -> None:
    world.node("third").away_until_mono = float("inf")
    assert world.models.get("shared") is world.shared


def test_a_model_that_a_peer_has_out_of_reach_is_refused_with_its_name(world: World) -> None:
    world.fleet.unreached["big"] = "third serves it, and does not answer this node"
    with pytest.raises(ModelNotFound, match="'big' is not served here; third serves it"):
        world.models.get("big")


def test_a_model_that_a_peer_offered_lately_is_away_and_no_unknown_one(world: World) -> None:
    world.models.get("toy")
    for node in world.fleet.nodes.values():
        node.away_until_mono = float("inf")
    world.clock.advance(AWAY_S - 1)
    with pytest.raises(PeerUnavailable, match="one did 299 s ago") as away:
        world.models.get("toy")
    assert away.value.retry_after_s
    world.clock.advance(1)
    with pytest.raises(NotFound, match="no model 'toy' is served here"):
        world.models.get("toy")


def test_an_encoder_that_a_peer_offered_lately_is_away_as_an_encoder(world: World) -> None:
    world.models.embedder("their-encoder")
    world.node("vectors").away_until_mono = float("inf")
    with pytest.raises(PeerUnavailable, match="the model their-encoder just now"):
        world.models.embedder("their-encoder")
    with pytest.raises(NotFound):
        world.models.get("their-encoder")


def test_adapters_of_a_model_that_is_away_are_away_and_not_remembered_one_by_one(
    world: World,
) -> None:
    for number in range(9):
        world.models.get(f"toy:{number}")
    assert len(world.models._offered_mono) == 1
    for node in world.fleet.nodes.values():
        node.away_until_mono = float("inf")
    with pytest.raises(PeerUnavailable, match="the model toy:french just now"):
        world.models.get("toy:french")


def test_unknown_names_raise_as_at_this_node_alone(world: World) -> None:
    with pytest.raises(NotFound, match="no model 'none' is served here"):
        world.models.get("none")
    with pytest.raises(InvalidArgument, match="makes vectors"):
        world.models.get("my-encoder")
    with pytest.raises(Denied):
        world.models.get("mine:private", "somebody")
    with pytest.raises(NotFound, match="makes vectors here"):
        world.models.embedder("toy")


def test_without_a_model_of_its_own_the_default_is_the_first_of_the_peers(world: World) -> None:
    world.own_models.models = ()
    assert world.models.get("").model_id == "shared"
    for node in world.fleet.nodes.values():
        node.away_until_mono = float("inf")
    with pytest.raises(NotFound):
        world.models.get("")


def test_the_models_of_peers_are_listed_behind_the_own_ones(world: World) -> None:
    listed = world.models.verifiers()
    assert [model.model_id for model in listed] == ["mine", "shared", "toy"]
    assert listed[0] is world.mine
    assert [model.model_id for model in world.models.embedders()] == [
        "my-encoder",
        "their-encoder",
    ]


async def test_adapters_of_peers_are_listed_behind_the_own_ones(world: World) -> None:
    mine, theirs, shared = (
        AdaptedId(model_id=f"{base}:{name}", parent=base)
        for base, name in (("mine", "private"), ("toy", "french"), ("shared", "private"))
    )
    world.fleet.adapters = (mine, theirs)
    assert await world.models.adapted("owner") == (mine, shared, theirs)
    assert await world.models.adapted("another") == (mine, theirs)


def test_encoders_are_found_as_models_are(world: World) -> None:
    assert world.models.embedder("my-encoder") is world.encoder
    assert isinstance(world.models.embedder("their-encoder"), RoutedEmbedder)


async def test_a_turn_is_warmed_where_its_conversation_was_served(world: World) -> None:
    use = CacheUse(keys=CacheKeys(conversation_id="c"))
    claim = PrefixClaim(model_id="toy", facts=facts_of(), use=use)

    async def tokens() -> Sequence[int]:
        return [1]

    assert not world.models.turn_elsewhere(claim, "c1", tokens)
    request = DecodeRequest(token_ids=[1, 2], max_tokens=2, kv_key="c1")
    model = world.models.get("toy")
    _ = [frame async for frame in model.decode(request)]
    assert world.models.turn_elsewhere(claim, "c1", tokens)
    assert world.fleet.warmed == [("left", "c1")]
    world.node("left").away_until_mono = float("inf")
    assert not world.models.turn_elsewhere(claim, "c1", tokens)
