"""The nodes that serve a model, as one node knows them: by real cards, and by real calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from kakeya.core.errors import (
    KakeyaError,
    LoadFailed,
    ModelLoading,
    NotFound,
    PeerProtocol,
    PeerUnavailable,
    Refused,
    StoreFailed,
)
from kakeya.core.ids import ModelId
from kakeya.dispatch.peers import client, neighbours
from kakeya.dispatch.peers.neighbours import DESCRIBED_S, LATE, QUOTE_S, ServingPeer, ServingPeers
from kakeya.dispatch.peers.quote import Quote
from kakeya.dispatch.peers.text_files import TextFiles
from kakeya.fleet.cards.cards import Card, CardRole, Endpoint, OfferedModel
from kakeya.fleet.paths.link_rates import LinkRates
from kakeya.generation.manifest import Manifest
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, PrefixClaim
from kakeya.wire.channels import Channels
from tests.dispatch.peers.world import QuotedToy, ServingNode, ToyEncoder, ToyModels, facts_of
from tests.fakes import FakeClock
from tests.fleet.nodes import make_registry, make_wire, proposer, verifier
from tests.waiting import until

NORMAL = GenerationPriority.NORMAL
PROMPT = [5, 6, 7]


class Plain:
    """Each node is called where its card says."""

    def address_for(self, card: Card) -> str:
        return card.grpc_address


class Front:
    """One node, and what it sees of the others."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.registry = make_registry("front", now=self.clock.wall(), mono=self.clock.mono())
        self.channels = Channels()
        self.routes = Plain()
        self.links = LinkRates()
        self.forbidden: set[str] = set()
        self.failed: list[str] = []
        self.texts = TextFiles(folder)
        self.peers = ServingPeers(self, self.texts, self.clock)

    def why_not_dial(self, address: str) -> str:
        return "forbidden" if address in self.forbidden else ""

    def call_failed(self, address: str) -> None:
        self.failed.append(address)
        self.registry.mark_failed(address, mono=self.clock.mono())

    def hear(
        self,
        node_id: str,
        *models: OfferedModel,
        address: str = "",
        life: int = 7,
        is_plain: bool = False,
        endpoints: Sequence[Endpoint] = (),
    ) -> str:
        address = address or f"127.0.0.1:{len(node_id)}"
        wire = make_wire(
            node_id,
            at=self.clock.wall(),
            address=address,
            models=models or (verifier("toy"),),
            life=0 if is_plain else life,
            is_plain=is_plain,
            endpoints=endpoints,
        )
        self.registry.merge([wire], now=self.clock.wall(), mono=self.clock.mono())
        return address

    def offering(self, model_id: str = "toy", role: CardRole = CardRole.VERIFIER) -> list[str]:
        return [peer.node_id for peer in self.peers.offering(model_id, role)]

    def peer(self, node_id: str) -> ServingPeer:
        return next(one for one in self.peers.offering() if one.node_id == node_id)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(neighbours, "QUOTE_S", 60.0)
    monkeypatch.setattr(client, "_SHORT_S", 60.0)


@pytest.fixture
async def minis(front: Front, tmp_path: Path) -> AsyncIterator[dict[str, ServingNode]]:
    """Two nodes that serve `toy`, and are known to the front one."""
    async with AsyncExitStack() as stack:
        made = {}
        for name in ("left", "right"):
            models = ToyModels((QuotedToy(),))
            node = ServingNode(models, tmp_path / name)
            made[name] = await stack.enter_async_context(node.serving())
            front.hear(name, address=node.address)
        yield made


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """The address of a node that takes calls and answers none."""

    async def never(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = grpc.aio.server()
    handlers = {"Quote": grpc.unary_unary_rpc_method_handler(never)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kakeya.v1.ServingService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_a_node_without_a_model_is_live_and_offers_none(front: Front) -> None:
    front.hear("plain", is_plain=True)
    front.hear("started", proposer("drafts"))
    front.hear("verifies")
    assert front.offering("") == ["verifies"]
    assert [peer.node_id for peer in front.peers.live()] == ["started", "verifies"]


async def test_adapters_of_all_peers_are_told_and_a_silent_or_older_one_takes_no_part(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    listed = [AdaptedId(model_id="toy:private", parent="toy")]
    minis["left"].models.models[0].model_id = "other"
    both = [AdaptedId(model_id="other:private", parent="other"), *listed]
    assert list(await front.peers.adapted("owner")) == both
    assert await front.peers.adapted("another") == ()
    older = grpc.aio.server()
    port = older.add_insecure_port("127.0.0.1:0")
    await older.start()
    try:
        front.hear("older", address=f"127.0.0.1:{port}")
        assert list(await front.peers.adapted("owner")) == both
        assert "older" in front.offering(), "it serves as before"
    finally:
        await older.stop(None)


def toy(node: ServingNode) -> QuotedToy:
    return node.models.models[0]


def with_text(node: ServingNode, folder: Path, text: bytes = b"{}") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(text)
    toy(node).facts = facts_of(model_path=str(folder))


async def describe(front: Front, model_id: str = "toy", client: str = "", timeout_s: float = 5.0):
    return await front.peers.describe(model_id, client, timeout_s, NORMAL)


# --- offering


async def test_peers_with_a_model_are_told_by_their_cards(front: Front) -> None:
    front.hear("b", verifier("toy"), verifier("other"))
    front.hear("a")
    front.hear("drafts", proposer("toy"))
    front.hear("vectors", OfferedModel(ModelId("e"), CardRole.EMBEDDER))
    assert front.offering() == ["a", "b"]
    assert front.offering("other") == ["b"]
    assert front.offering("none") == []
    assert [(one.node_id, one.offered.model_id) for one in front.peers.offering()] == [
        ("a", "toy"),
        ("b", "toy"),
        ("b", "other"),
    ]
    assert front.offering("e", CardRole.EMBEDDER) == ["vectors"]
    assert front.peers.own_id == "front"


async def test_peers_in_doubt_come_last(front: Front) -> None:
    address = front.hear("a", address="127.0.0.1:1")
    front.hear("b", address="127.0.0.1:2")
    front.registry.mark_failed(address, mono=front.clock.mono())
    assert front.offering() == ["b", "a"]
    assert [one.is_suspect for one in front.peers.offering()] == [False, True]
    front.registry.mark_alive(address)
    assert front.offering() == ["a", "b"]


async def test_plain_nodes_and_forbidden_addresses_are_left_out(front: Front) -> None:
    front.hear("original", is_plain=True)
    front.forbidden.add(front.hear("foreign", address="203.0.113.1:1"))
    front.hear("a")
    assert front.offering() == ["a"]


async def test_a_node_that_left_is_not_offered(front: Front) -> None:
    front.hear("a")
    front.clock.advance(10_000.0)
    assert front.offering() == []


async def test_a_model_with_an_adapter_is_looked_for_where_its_base_is(front: Front) -> None:
    front.hear("a")
    front.hear("b", verifier("toy:8b"))
    assert front.offering("toy:french") == ["a"]
    assert front.offering("toy:8b") == ["b"]
    assert front.offering("toy:8b:french") == ["b"]
    assert front.offering(":french") == []


async def test_the_round_trip_is_that_of_the_address_in_use(front: Front) -> None:
    ways = [Endpoint("10.0.0.1:1", "lan", 1, 4.0), Endpoint("127.0.0.1:1", "thunderbolt", 0, 0.5)]
    front.hear("a", address="127.0.0.1:1", endpoints=ways)
    assert front.peer("a").rtt_s == 0.0005


# --- quotes


async def test_quotes_come_of_all_at_once_and_a_failure_is_a_text(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    toy(minis["left"]).held = 2
    minis["right"].service.drain("an update")
    quotes = await front.peers.quotes(front.peers.offering("toy"), "toy", "", PROMPT, ())
    left, right = quotes["left"], quotes["right"]
    assert isinstance(left, Quote)
    assert left.cached_tokens == 2
    assert right == "right: this node takes no requests: an update"
    assert front.failed == []


async def test_a_node_that_does_not_answer_is_in_doubt_for_a_while(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "QUOTE_S", QUOTE_S)
    async with silent() as address:
        front.hear("a", address=address)
        front.hear("b")
        quotes = await front.peers.quotes([front.peer("a")], "toy", "", PROMPT, ())
        assert quotes["a"] == LATE
        assert front.offering() == ["b", "a"]
        front.clock.advance(3.1)
        assert front.offering() == ["a", "b"]
        assert front.failed == []


async def test_a_node_of_an_older_build_is_spared_for_a_while(front: Front) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        front.hear("old", address=f"127.0.0.1:{port}")
        await front.peers.quotes(front.peers.offering(), "toy", "", PROMPT, ())
        assert front.offering() == []
        front.clock.advance(31.0)
        assert front.offering() == ["old"]
        assert front.failed == []
    finally:
        await server.stop(None)


async def test_a_node_that_is_gone_comes_in_doubt(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    peer = front.peer("left")
    await minis["left"].server.stop(None)
    with pytest.raises(PeerUnavailable) as caught:
        await front.peers.calls(peer).release("toy", "", "key")
    front.peers.failed(peer, caught.value)
    assert front.failed == [peer.address]
    assert front.offering() == ["right", "left"]


@pytest.mark.parametrize("kind", [PeerUnavailable, PeerProtocol, ModelLoading, LoadFailed, Refused])
async def test_a_node_that_tells_of_a_failure_itself_is_not_in_doubt(
    front: Front, minis: dict[str, ServingNode], kind: type[KakeyaError]
) -> None:
    """Its engine may be lost, and its other models serve."""
    toy(minis["left"]).fails = kind("the engine does not start")
    toy(minis["left"]).facts = None
    told = await describe(front)
    assert told.facts.model_id == "toy"
    assert toy(minis["left"]).loads
    assert front.failed == []
    assert front.offering() == ["left", "right"]


# --- descriptions


async def test_a_description_brings_the_text_once_for_two_requests_at_once(
    front: Front, minis: dict[str, ServingNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, node in minis.items():
        with_text(node, tmp_path / f"model of {name}")
    brought: list[str] = []

    real = TextFiles.keep

    async def keep(self, digest, parts):
        brought.append(digest)
        return await real(self, digest, parts)

    monkeypatch.setattr(TextFiles, "keep", keep)
    told = await asyncio.gather(*(describe(front) for _ in range(5)))
    assert len(brought) == 1
    (path,) = {one.facts.model_path for one in told}
    assert (Path(path) / "tokenizer.json").read_bytes() == b"{}"
    assert front.peers.known("toy") == told[0]


async def test_changes_by_the_owner_of_a_model_are_heard_of_after_a_while(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    toy(minis["left"]).manifest = Manifest(max_tokens=5)
    assert (await describe(front)).manifest.max_tokens == 5
    toy(minis["left"]).manifest = Manifest(max_tokens=7)
    front.clock.advance(DESCRIBED_S - 0.1)
    assert (await describe(front)).manifest.max_tokens == 5
    front.clock.advance(0.1)
    assert (await describe(front)).manifest.max_tokens == 7


async def test_a_text_is_brought_by_one_request_at_a_time_though_the_first_fails(
    front: Front, minis: dict[str, ServingNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, node in minis.items():
        with_text(node, tmp_path / f"model of {name}")
    bringing, most, tries, real = 0, 0, 0, TextFiles.keep

    async def keep(self, digest, parts):
        nonlocal bringing, most, tries
        tries, bringing = tries + 1, bringing + 1
        most = max(most, bringing)
        await asyncio.sleep(0.05)
        bringing -= 1
        if tries == 1:
            raise PeerUnavailable("lost on the way")
        return await real(self, digest, parts)

    monkeypatch.setattr(TextFiles, "keep", keep)
    await asyncio.gather(*(describe(front) for _ in range(4)))
    assert (most, tries) == (1, 2)


async def test_a_description_is_asked_for_once_in_the_life_of_a_node(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    assert front.peers.known("toy") is None
    told = await describe(front)
    assert front.peers.known("toy") == told
    asked = len(toy(minis["left"]).clients)
    assert await describe(front) == told
    assert len(toy(minis["left"]).clients) == asked
    toy(minis["left"]).facts = facts_of(context_tokens=77)
    assert (await describe(front)).facts.context_tokens == 10_000
    front.clock.advance(1.0)
    front.hear("left", address=minis["left"].address, life=6)
    assert front.peers.known("toy") is None
    assert (await describe(front)).facts.context_tokens == 77


async def test_an_adapter_is_asked_for_each_client(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    await describe(front, "toy:private", "owner")
    with pytest.raises(KakeyaError, match="of another client"):
        await describe(front, "toy:private", "somebody")


async def test_the_next_peer_tells_where_the_first_cannot(
    front: Front, minis: dict[str, ServingNode], tmp_path: Path
) -> None:
    with_text(minis["right"], tmp_path / "model", b"of right")
    with_text(minis["left"], tmp_path / "lost")
    await minis["left"].server.stop(None)
    told = await describe(front)
    assert (Path(told.facts.model_path) / "tokenizer.json").read_bytes() == b"of right"
    assert front.failed == [minis["left"].address]


async def test_the_last_peers_error_is_raised(front: Front, minis: dict[str, ServingNode]) -> None:
    for name, node in minis.items():
        toy(node).facts, toy(node).fails = None, LoadFailed(f"no memory at {name}")
    with pytest.raises(LoadFailed, match="no memory at right"):
        await describe(front)
    with pytest.raises(NotFound, match="'none' is not served by the fleet"):
        await describe(front, "none")


async def test_a_text_that_changes_on_the_way_is_not_taken(
    front: Front, minis: dict[str, ServingNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, node in minis.items():
        with_text(node, tmp_path / f"model of {name}", f"of {name}".encode())

    async def other(self, model_path):
        yield "tokenizer.json", b"of right"

    monkeypatch.setattr(TextFiles, "parts", other)
    told = await describe(front)
    assert (Path(told.facts.model_path) / "tokenizer.json").read_bytes() == b"of right"


async def test_a_folder_that_cannot_be_written_is_told(
    front: Front, minis: dict[str, ServingNode], tmp_path: Path
) -> None:
    for name, node in minis.items():
        with_text(node, tmp_path / f"model of {name}")
    (tmp_path / "texts").write_bytes(b"a file, no folder")
    with pytest.raises(StoreFailed, match="the text of toy cannot be kept here"):
        await describe(front)
    assert front.failed == [], "no node is to blame"


async def test_encoders_are_described_too(front: Front, tmp_path: Path) -> None:
    node = ServingNode(ToyModels((), (ToyEncoder("e"),)), tmp_path / "node")
    async with node.serving():
        role = CardRole.EMBEDDER
        front.hear("vectors", OfferedModel(ModelId("e"), role), address=node.address)
        told = await front.peers.describe("e", "", 5.0, NORMAL, role=role)
        assert front.peers.known("e", role) == told
        assert front.peers.known("e") is None


# --- keys


async def test_the_keys_of_two_nodes_never_meet(front: Front) -> None:
    assert front.peers.abroad("c1") == "front/c1"
    assert front.peers.abroad("") == ""


async def test_a_turn_is_warmed_at_a_peer_in_the_background(
    front: Front, minis: dict[str, ServingNode]
) -> None:
    use = CacheUse(keys=CacheKeys(conversation_id="c"), retention=Retention.SHORT)
    claim = PrefixClaim(model_id="toy", facts=facts_of(), client="owner", use=use)

    async def tokens() -> Sequence[int]:
        return [1, 2, 3]

    front.peers.warm_turn(front.peer("left"), claim, "c1", tokens)
    await until(lambda: minis["left"].precache.ended)
    ((came, _),) = minis["left"].precache.ended
    assert minis["left"].precache.kv_key(came) == "owner|front/c1"

    async def broken() -> Sequence[int]:
        raise Refused("the text is gone")

    front.peers.warm_turn(front.peer("left"), claim, "c1", broken)
    await front.peers.aclose()


def test_a_peer_that_has_a_model_out_of_reach_is_named_with_the_reason(front: Front) -> None:
    front.hear("serves", verifier("toy"))
    front.hear("apart", verifier("big"), address="127.0.0.1:999")
    front.hear("drafts", OfferedModel(ModelId("small"), CardRole.PROPOSER))
    front.forbidden.add("127.0.0.1:999")
    assert front.peers.out_of_reach("toy") == ""
    assert front.peers.out_of_reach("none") == ""
    said = "apart serves it, and does not answer this node: kakeya doctor apart"
    assert front.peers.out_of_reach("big") == said
    assert front.peers.out_of_reach("small") == "drafts only drafts with it"
