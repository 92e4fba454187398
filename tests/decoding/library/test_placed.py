"""Proposers of other nodes: what their ids mean, and the keys that their nodes want to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.decoding.library.speculative import DistributedSpeculativeDecoder, SpeculativeDecoder
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.decoding.remote import remote
from kakeya.decoding.remote.remote import RemoteProposer, RemoteProposerError
from kakeya.decoding.remote.vocabulary import VocabularyMismatch
from kakeya.decoding.serve.service import ProposerService
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import distributed_pb2_grpc as rpc
from kakeya.wire.security import CertRole
from kakeya.wire.server.listeners import Listeners
from tests.decoding.remote.test_stream import PATIENCE_S, connected
from tests.decoding.servers import LoopThread
from tests.decoding.toys import VOCAB, HashModel
from tests.wire.certificates import Fleet, write

PROMPT = [3, 1, 4, 1, 5, 3, 1]


class Worded(HashModel):
    """A verifier whose vocabulary has a name."""

    vocabulary_digest = "english"


class Card(rpc.CapabilityServiceServicer):
    """A node's card that says what its proposers' ids mean."""

    def __init__(self, digests: dict[str, str]) -> None:
        self._digests = digests
        self.asked = 0

    async def GetNodeCapability(self, request, context):
        self.asked += 1
        models = [
            pb.ModelCapability(
                model_id=model_id, role=pb.CAPABILITY_ROLE_PROPOSER, vocabulary_digest=digest
            )
            for model_id, digest in self._digests.items()
        ]
        return pb.GetNodeCapabilityResponse(node=pb.NodeCapability(node_id="n", models=models))


@dataclass(frozen=True)
class Placed:
    proposer_address: str
    proposer_node: str
    proposer_model: str = "ngram"
    proposer_is_extended: bool = True


@contextmanager
def node(card: Card | None) -> Iterator[str]:
    """A plain node that drafts under two names, with a card or without; yields its address."""
    host = LoopThread()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        proposers = ProposerService({"ngram": NGramProposer(), "tiny": NGramProposer()})
        rpc.add_ProposerServiceServicer_to_server(proposers, server)
        if card is not None:
            rpc.add_CapabilityServiceServicer_to_server(card, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = host.run(start())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        host.run(server.stop(0))
        host.close()


@contextmanager
def secured(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """A node behind mutual TLS; yields its address and node id."""
    host = LoopThread()
    node_id, shown = fleet.issue()

    async def start() -> tuple[Listeners, str]:
        proposers = ProposerService({"ngram": NGramProposer()})
        listeners = Listeners(
            lambda server: rpc.add_ProposerServiceServicer_to_server(proposers, server),
            clock=SystemClock(),
            material=lambda: shown,
            trust=fleet.trust,
        )
        address = await listeners.open_tls("127.0.0.1:0", flag="--bind")
        await listeners.start()
        return listeners, address

    listeners, address = host.run(start())
    try:
        yield address, node_id
    finally:
        host.run(listeners.stop(None))
        host.close()


@contextmanager
def proposing(card: Card | None, model_id: str) -> Iterator[RemoteProposer]:
    """A proposer of a plain node, connected."""
    with (
        node(card) as address,
        RemoteProposer(address, model_id, timeout_s=PATIENCE_S) as proposer,
    ):
        yield connected(proposer)


def decode(proposer: RemoteProposer, verifier: HashModel, **terms: object) -> list[int]:
    decoder = SpeculativeDecoder(verifier, proposer, context_tokens=99, **terms)  # type: ignore[arg-type]
    return list(decoder.generate(PROMPT, 20))


@pytest.mark.parametrize("on_error", ["plain", "raise"])
def test_a_proposer_with_another_vocabulary_is_refused_before_the_first_token(on_error) -> None:
    with (
        proposing(Card({"ngram": "", "tiny": "french"}), "tiny") as proposer,
        pytest.raises(VocabularyMismatch, match=f"{proposer.name} has another vocabulary"),
    ):
        decode(proposer, Worded(), on_proposer_error=on_error)
    assert proposer.stats.calls == 0


@pytest.mark.parametrize(
    ("model_id", "digests"),
    [
        ("tiny", {"tiny": "english"}),
        ("ngram", {"ngram": "", "tiny": "french"}),
        ("", {"ngram": "", "tiny": "french"}),
        ("tiny", {}),
    ],
)
def test_one_with_the_same_or_an_unknown_vocabulary_drafts(model_id, digests) -> None:
    card = Card(digests)
    with proposing(card, model_id) as proposer:
        decoder = SpeculativeDecoder(Worded(), proposer, context_tokens=99)
        for _ in range(2):
            assert list(decoder.generate(PROMPT, 20)) == HashModel().plain(PROMPT, 20)
        assert proposer.stats.calls > 0
        assert proposer.stats.failures == 0
    assert card.asked == 1


def test_a_node_without_cards_and_a_verifier_without_a_name_are_no_mismatch() -> None:
    with proposing(None, "tiny") as proposer:
        assert decode(proposer, Worded()) == HashModel().plain(PROMPT, 20)
    card = Card({"tiny": "french"})
    with proposing(card, "tiny") as proposer:
        assert decode(proposer, HashModel()) == HashModel().plain(PROMPT, 20)
    assert card.asked == 0


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loopback count as another machine, to which a plain connection will not do."""
    monkeypatch.setattr(remote, "is_local", lambda address: False)


def placed(address: str, node_id: str, identity: Path | None) -> DistributedSpeculativeDecoder:
    return DistributedSpeculativeDecoder.from_placement(
        Placed(address, node_id),
        verifier=HashModel(),
        context_tokens=99,
        vocab_size=VOCAB,
        timeout_s=PATIENCE_S,
        identity=identity,
    )


@pytest.mark.usefixtures("as_elsewhere")
def test_a_member_connects_with_the_keys_in_its_data_directory(tmp_path: Path) -> None:
    fleet = Fleet()
    keys = write(tmp_path / "identity", fleet.issue()[1])
    with secured(fleet) as (address, node_id):
        for identity in (tmp_path, keys):
            decoder = placed(address, node_id, identity)
            assert list(decoder.generate(PROMPT, 20)) == HashModel().plain(PROMPT, 20)
            decoder.close()
            assert decoder.stats.failures == 0
        with RemoteProposer(
            address, "ngram", identity=tmp_path, timeout_s=PATIENCE_S
        ) as any_member:
            assert any_member.propose(PROMPT, 2).tokens


@pytest.mark.usefixtures("as_elsewhere")
def test_wrong_keys_are_told(tmp_path: Path) -> None:
    fleet = Fleet()
    member, client, stranger = (
        write(tmp_path / name, made.issue(role)[1])
        for name, made, role in (
            ("member", fleet, CertRole.MEMBER),
            ("client", fleet, CertRole.CLIENT),
            ("stranger", Fleet(), CertRole.MEMBER),
        )
    )
    with secured(fleet) as (address, node_id):
        for identity, wanted, status, words in (
            (client, node_id, grpc.StatusCode.PERMISSION_DENIED, "roles that may call it"),
            (stranger, node_id, grpc.StatusCode.UNAVAILABLE, "is of another fleet"),
            (member, "a" * 52, grpc.StatusCode.UNAVAILABLE, "is of another node"),
            (None, node_id, grpc.StatusCode.UNAVAILABLE, "without a certificate"),
        ):
            decoder = placed(address, wanted, identity)
            with pytest.raises(RemoteProposerError, match=words) as caught:
                list(decoder.generate(PROMPT, 20))
            decoder.close()
            assert caught.value.status is status
            assert decoder.history == PROMPT
        with pytest.raises(ConfigError, match="holds no identity"):
            placed(address, node_id, tmp_path / "nothing")
