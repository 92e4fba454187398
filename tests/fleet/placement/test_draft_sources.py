"""Draft policies over hand-made views of the fleet."""

from __future__ import annotations

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import ModelId
from kakeya.fleet.cards.cards import Card, CardRole, Offer, OfferedModel
from kakeya.fleet.cards.convert import from_wire, to_wire
from kakeya.fleet.placement.draft_sources import LOCAL_NGRAM, choose_sources
from kakeya.generation.facts import ModelFacts
from kakeya.generation.request import DraftSource
from tests.fleet.nodes import plain

NOW = 1_700_000_000.0
FACTS = ModelFacts(
    model_id="kakeya-tiny",
    model_path="/models/kakeya-tiny",
    vocab_size=4096,
    context_tokens=1024,
    eos_token_ids=(0,),
    vocabulary_digest="aa",
)


def proposer(model_id: str, speed: float = 0.0, digest: str = "") -> OfferedModel:
    return OfferedModel(ModelId(model_id), CardRole.PROPOSER, "", speed, digest)


def card(
    node_id: str, *models: OfferedModel, port: int = 1, at: float = NOW, address: str = ""
) -> Card:
    offer = Offer(grpc_address=address or f"10.0.0.{port}:50051", models=models)
    return from_wire(to_wire(node_id, offer, incarnation=1, announced_at=at))


OWN = card("own", proposer("ngram"), port=9)
NGRAM_PEER = card("ngram-peer", proposer("ngram"), port=1)
DRAFT_PEER = card("draft-peer", proposer("ngram"), proposer("draft", 900, "aa"), port=2)
FASTER_PEER = card("faster", proposer("draft", 1800, "aa"), port=3)
FOREIGN_PEER = card("foreign", proposer("draft", 9000, "bb"), proposer("other", 9000), port=4)


def remote(model_id: str, port: int) -> DraftSource:
    address = f"10.0.0.{port}:50051"
    return DraftSource(kind="remote", address=address, model_id=model_id, extended=True)


def choose(policy: str, *cards: Card, suspects: frozenset[str] = frozenset()) -> object:
    return choose_sources(FACTS, policy, cards, now=NOW, suspects=suspects)


@pytest.mark.parametrize(
    ("policy", "peers", "sources"),
    [
        ("", (), (LOCAL_NGRAM,)),
        ("auto", (NGRAM_PEER,), (LOCAL_NGRAM,)),
        ("auto", (NGRAM_PEER, DRAFT_PEER), (LOCAL_NGRAM, remote("draft", 2))),
        ("auto", (DRAFT_PEER, FASTER_PEER), (LOCAL_NGRAM, remote("draft", 3))),
        ("auto", (FOREIGN_PEER,), (LOCAL_NGRAM,)),
        ("off", (DRAFT_PEER,), ()),
        ("ngram", (DRAFT_PEER,), (LOCAL_NGRAM,)),
        ("peer", (), ()),
        ("peer", (NGRAM_PEER,), (remote("ngram", 1),)),
        ("peer", (NGRAM_PEER, DRAFT_PEER), (remote("draft", 2),)),
        ("peer", (FOREIGN_PEER,), ()),
    ],
)
def test_a_policy_chooses(policy: str, peers: tuple[Card, ...], sources: object) -> None:
    assert choose(policy, OWN, *peers) == sources


def test_a_draft_model_of_this_node_is_used_when_no_other_has_one() -> None:
    own = card("own", proposer("draft", 5, "aa"), port=9)
    assert choose("auto", own, NGRAM_PEER) == (LOCAL_NGRAM, remote("draft", 9))
    assert choose("auto", own, DRAFT_PEER) == (LOCAL_NGRAM, remote("draft", 2))
    assert choose("peer", own, NGRAM_PEER) == (remote("ngram", 1),)


def test_a_suspect_is_not_asked() -> None:
    suspects = frozenset({"faster"})
    assert choose("peer", OWN, FASTER_PEER, DRAFT_PEER, suspects=suspects) == (remote("draft", 2),)


def test_an_expired_card_of_a_node_that_does_not_beat_is_not_asked() -> None:
    gone = card("gone", proposer("draft", 900, "aa"), at=NOW - 121)
    assert choose("auto", OWN, from_wire(plain(gone.wire))) == (LOCAL_NGRAM,)


def test_without_digests_only_the_embedded_family_is_known_to_share_a_vocabulary() -> None:
    peer = card("peer", proposer("kakeya-tiny-draft", 10), proposer("stranger", 20), port=5)
    assert choose("auto", OWN, peer) == (LOCAL_NGRAM, remote("kakeya-tiny-draft", 5))


def test_an_explicit_source_is_taken_at_its_word() -> None:
    assert choose("ngram@10.0.0.1:50051", OWN, NGRAM_PEER) == (remote("ngram", 1),)
    near = DraftSource(kind="remote", address="127.0.0.1:1", model_id="a/b", extended=False)
    assert choose("a/b@127.0.0.1:1", OWN) == (near,)


def test_in_a_fleet_with_identities_a_peer_must_show_the_certificate_of_its_card() -> None:
    def chosen(policy: str, *cards: Card) -> list[tuple[str, str]]:
        sources = choose_sources(FACTS, policy, cards, now=NOW, is_secured=True)
        return [(source.address, source.server_name) for source in sources]

    near = card("near", proposer("draft", 900, "aa"), port=0, address="127.0.0.1:7")
    assert chosen("auto", OWN, DRAFT_PEER) == [("", ""), (DRAFT_PEER.grpc_address, "draft-peer")]
    assert chosen("peer", OWN, NGRAM_PEER) == [(NGRAM_PEER.grpc_address, "ngram-peer")]
    named = f"draft@{DRAFT_PEER.grpc_address}"
    assert chosen(named, OWN, DRAFT_PEER) == [(DRAFT_PEER.grpc_address, "draft-peer")]
    assert chosen("auto", OWN, near) == [("", ""), ("127.0.0.1:7", "")], "loopback stays plain"
    assert chosen("x@127.0.0.1:8", OWN) == [("127.0.0.1:8", "")]


def test_no_caller_can_send_a_prompt_to_a_machine_outside_the_fleet() -> None:
    with pytest.raises(InvalidArgument, match="no live node has"):
        choose("a/b@10.9.9.9:1", OWN, NGRAM_PEER)


@pytest.mark.parametrize("policy", ["on", "draft@", "@h:1", "draft@host", "draft@h:0", "Auto"])
def test_any_other_policy_is_refused_with_the_ones_there_are(policy: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        choose(policy, OWN)
    assert policy in refused.value.message
    assert "MODEL_ID@HOST:PORT" in refused.value.message
    assert refused.value.param == "draft_policy"


def test_an_endless_policy_is_quoted_in_part():
    """Status details travel in metadata, which is bounded: a longer one loses the whole status."""
    with pytest.raises(InvalidArgument) as refused:
        choose("\N{PILE OF POO}" * 100_000)
    assert len(refused.value.message) < 250
