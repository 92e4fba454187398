"""The clouds and commands of the fleet, as the front doors of one node find them: by real cards and
by real calls."""

from __future__ import annotations

import pytest

from kakeya.backends.relay.config import CloudSettings
from kakeya.backends.relay.relays import Relays
from kakeya.core.clock import SystemClock
from kakeya.core.errors import NotFound, PeerUnavailable, Refused, Unsupported
from kakeya.core.ids import ModelId
from kakeya.dispatch.peers import relay_calls
from kakeya.dispatch.routed.relays import MOST_TOLD, RoutedRelays, offered
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.generation.facts import ModelState
from tests.backends.relay.upstream import answered, chat, text_of
from tests.dispatch.peers.relaying import RelayNode, relaying, script
from tests.dispatch.peers.test_neighbours import Front
from tests.dispatch.peers.world import QuotedToy, ToyModels
from tests.fleet.nodes import verifier
from tests.waiting import until


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(relay_calls, "_CHECK_S", 60.0)


def tool(name: str, kind: str = "text/commands") -> OfferedModel:
    return OfferedModel(ModelId(name), CardRole.TOOL, capability=kind)


def routed(front: Front, *names: str, **backends: object) -> RoutedRelays:
    """The backends of the fleet at a node with text models of these names."""
    own = Relays(backends, SystemClock())  # type: ignore[arg-type]
    return RoutedRelays(own, ToyModels(tuple(map(QuotedToy, names))), front.peers)  # type: ignore[arg-type]


def test_a_card_tells_of_what_is_shared_as_far_as_it_has_room() -> None:
    commands = {"x" * 200: script("cat"), "up": script("cat"), "mine": script("cat", shared=False)}
    clouds = {"west": CloudSettings(url="http://a/v1", shared=True)}
    told = offered(Relays({"clouds": clouds, "commands": commands}, SystemClock()))
    assert told == [tool("cloud:west/*", "text/clouds"), tool("up")]
    many = {f"c{number}": script("cat") for number in range(100)}
    assert len(offered(Relays({"commands": many}, SystemClock()))) == MOST_TOLD


def test_models_of_peers_are_found_by_name_and_by_what_names_begin_with(front: Front) -> None:
    front.hear("left", tool("up"), tool("cloud:west/m", "text/clouds"), tool("painter", "image"))
    front.hear("right", tool("cloud:east/*", "text/clouds"), tool("cloud:claude/*", "text/clouds"))
    relays = routed(front)

    def found(name: str) -> tuple[str, str]:
        model = relays.find(name)
        return ("", "") if model is None else (model.relay.kind, model.relay.name)

    assert found("up") == ("commands", "left")
    assert found("cloud:west/m") == ("clouds", "left")
    assert found("cloud:east/org/n:8b") == ("clouds", "right")
    assert found("claude:sonnet") == found("cloud:claude/sonnet") == ("clouds", "right")
    for name in (
        "",
        "u",
        "cloud:west/n",
        "cloud:east/",
        "cloud:east",
        "cloud:east/*x"[:-2],
        "painter",
    ):
        assert relays.find(name) is None, name
    listed = relays.models(["cloud:east/n", "small"])
    assert [one.model_id for one in listed] == ["cloud:west/m", "up", "cloud:east/n"]
    assert [one.relay.nodes for one in listed] == [("left",), ("left",), ("right",)]
    assert {one.state for one in listed} == {ModelState.READY}


def test_a_name_that_this_node_knows_is_asked_of_no_peer(front: Front) -> None:
    front.hear("left", tool("up"), tool("mine"), tool("cloud:west/*", "text/clouds"), tool("toy"))
    front.hear("right", verifier("toy"))
    clouds = {"west": CloudSettings(url="http://a/v1")}
    relays = routed(front, "toy", clouds=clouds, commands={"mine": script("cat")})
    for name in ("mine", "cloud:west/m"):
        found = relays.find(name)
        assert found is not None
        assert found.relay.nodes == ()
    assert relays.find("toy") is None
    assert [one.model_id for one in relays.models()] == ["mine", "up"]


def test_a_peer_that_no_node_reaches_offers_nothing(front: Front) -> None:
    address = front.hear("left", tool("up"))
    relays = routed(front)
    front.registry.mark_failed(address, mono=front.clock.mono())
    found = relays.find("up")
    assert found is not None
    assert found.state is ModelState.FAILED
    front.forbidden.add(address)
    assert relays.find("up") is None


async def test_the_first_peer_that_takes_a_request_answers_it(front: Front) -> None:
    async with (
        relaying(commands={"up": script("printf left")}) as left,
        relaying(commands={"up": script("printf right")}) as right,
    ):
        front.hear("left", tool("up"), address=left.address)
        front.hear("right", tool("up"), address=right.address)
        relays = routed(front)
        assert await said(relays, "up") == ("left", "left")
        left.service.drain("an update")
        assert await said(relays, "up") == ("right", "right")
        right.service.drain("an update")
        with pytest.raises(Refused, match="right: this node takes no requests"):
            await said(relays, "up")


async def said(relays: RoutedRelays, name: str, **params: object) -> tuple[str, str]:
    """The text of an answer, and the node that gave it."""
    found = relays.find(name)
    assert found is not None
    await found.relay.check(chat(name, **params))
    parts = await answered(found.relay.answer(chat(name, **params)))
    return text_of(parts), found.relay.name


async def test_an_answer_that_was_begun_is_never_asked_for_again(front: Front) -> None:
    """A cloud would be paid twice, and a program would run twice."""
    async with (
        relaying(commands={"up": script("exit 3")}) as left,
        relaying(commands={"up": script("printf right")}) as right,
    ):
        front.hear("left", tool("up"), address=left.address)
        front.hear("right", tool("up"), address=right.address)
        with pytest.raises(Exception, match="left: the command up ended with 3"):
            await said(routed(front), "up")
        assert not right.service.served
        assert not front.failed, "the node answered"


async def test_a_request_that_no_backend_of_its_kind_takes_is_asked_once(front: Front) -> None:
    async with relaying(commands={"up": script("cat")}) as left:
        front.hear("left", tool("up"), address=left.address)
        with pytest.raises(Unsupported):
            await said(routed(front), "up", top_logprobs=1)


async def test_a_card_that_is_out_of_date_is_corrected_by_its_node(front: Front) -> None:
    async with relaying(commands={"up": script("cat", shared=False)}) as left:
        front.hear("left", tool("up"), address=left.address)
        with pytest.raises(NotFound, match="left: no model 'up' is shared here"):
            await said(routed(front), "up")


async def test_a_lost_peer_is_in_doubt_afterwards(front: Front) -> None:
    async with RelayNode(
        {"commands": {"up": script("printf one; exec sleep 60")}}
    ).serving() as left:
        front.hear("left", tool("up"), address=left.address)
        relays = routed(front)
        found = relays.find("up")
        assert found is not None
        await found.relay.check(chat("up"))
        parts = found.relay.answer(chat("up"))
        await anext(parts)
        await left.server.stop(None)
        with pytest.raises(PeerUnavailable):
            _ = [part async for part in parts]
        await until(lambda: [one["running"] for one in left.relays.status()] == [0])
        assert front.failed == [left.address]
        found = relays.find("up")
        assert found is not None
        assert found.state is ModelState.FAILED
