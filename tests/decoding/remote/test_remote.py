from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.decoding.draft.decoder import Decoding
from kakeya.decoding.draft.proposer import Proposer
from kakeya.decoding.library.speculative import DistributedSpeculativeDecoder, SpeculativeDecoder
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.decoding.remote.remote import (
    PROPOSAL_TIMEOUT_S,
    RemoteDraftBook,
    RemoteProposer,
    RemoteProposerError,
)
from kakeya.decoding.serve.service import ProposerService
from tests.decoding.remote.test_stream import PATIENCE_S, connected
from tests.decoding.servers import PlainServicer, child_server, plain_server, serving
from tests.decoding.toys import GREEDY, SAMPLED, VOCAB, HashModel, ToyProposer, oracle
from tests.fakes import FakeClock

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def ngram_address():
    with serving(ProposerService({"ngram": NGramProposer()})) as address:
        yield address


@pytest.fixture
def connect():
    """RemoteProposers that are closed after the test."""
    made = []

    def make(
        address, model_id="", *, timeout_s=PATIENCE_S, is_served=True, **more
    ) -> RemoteProposer:
        rng = random.Random(1)
        made.append(RemoteProposer(address, model_id, timeout_s=timeout_s, rng=rng, **more))
        return connected(made[-1]) if is_served else made[-1]

    yield make
    for proposer in made:
        proposer.close()


def test_is_a_proposer(connect):
    assert isinstance(connect("127.0.0.1:9", is_served=False), Proposer)


@pytest.mark.parametrize("extended", [True, False])
def test_drafts_what_the_served_proposer_drafts(ngram_address, connect, extended):
    remote = connect(ngram_address, "ngram", extended=extended)
    local = NGramProposer()
    prefix = [1, 2, 3, 4, 1, 2]
    assert remote.propose(prefix, 6).tokens == local.propose(prefix, 6).tokens
    assert remote.propose_block(prefix, 6, 2).tokens == local.propose_block(prefix, 6).tokens
    assert remote.stats.calls == 2
    assert remote.stats.drafted == 12
    assert remote.stats.total_forward_passes == remote.stats.total_blocks == 2
    assert remote.stats.wait_s > 0


def test_an_extended_peer_abstains_without_padding(ngram_address, connect):
    remote = connect(ngram_address, "ngram")
    assert remote.propose([1, 2, 3], 4).tokens == ()
    assert remote.stats.abstained == 1
    assert remote.propose_block([1, 2, 3], 4).num_valid == 0
    assert remote.propose_block([1, 2, 3], 4).tokens == (0, 0, 0, 0)


def test_one_channel_serves_all_calls(ngram_address):
    channel = grpc.insecure_channel(ngram_address)
    states = []
    channel.subscribe(states.append)
    remote = RemoteProposer(ngram_address, "ngram", channel=channel, timeout_s=PATIENCE_S)
    connected(remote)
    for size in range(1, 20):
        remote.propose([1, 2, 1], size)
    remote.close()
    assert remote.propose([1, 2, 1], 3).tokens == (2, 1, 2)
    assert states.count(grpc.ChannelConnectivity.CONNECTING) <= 1
    channel.close()


@pytest.mark.parametrize(("prefix", "size", "steps"), [([], 4, 1), ([1], 0, 1), ([1], 4, 0)])
def test_refuses_what_cannot_be_meant_before_it_calls(connect, prefix, size, steps):
    remote = connect("127.0.0.1:9", is_served=False)
    with pytest.raises(InvalidArgument):
        remote.propose_block(prefix, size, steps)
    assert remote.stats.calls == 0


@pytest.mark.parametrize(
    "terms",
    [
        {"address": ""},
        {"address": "nonsense"},
        {"address": "mini:0"},
        {"address": "mini:9", "timeout_s": 0},
        {"address": "mini:9", "timeout_s": float("nan")},
        {"address": "mini:9", "vocab_size": 0},
    ],
)
def test_refuses_terms_on_which_no_peer_can_be_asked(terms):
    with pytest.raises(InvalidArgument):
        RemoteProposer(**terms)


def test_its_context_ends_its_connection(ngram_address):
    with RemoteProposer(ngram_address, model_id="ngram", timeout_s=PATIENCE_S) as remote:
        connected(remote)
        assert remote.propose([1, 2, 1], 2).tokens == (2, 1)
        assert (remote.address, remote.model_id) == (ngram_address, "ngram")
    with pytest.raises(ValueError, match="closed"):
        remote.propose([1, 2, 1], 2)


def test_the_steps_of_a_decoder_reach_a_remote_proposer(connect):
    toy = oracle(HashModel())
    with serving(ProposerService({"oracle": toy})) as address:
        decoder = SpeculativeDecoder(
            HashModel(), connect(address), context_tokens=999, num_diffusion_steps=16
        )
        assert list(decoder.generate(PROMPT, 20)) == HashModel().plain(PROMPT, 20)
    assert set(toy.asked_steps) == {16}


def test_a_model_that_is_not_served_is_logged_once_and_named(ngram_address, connect, caplog):
    remote = connect(ngram_address, "gone")
    decoder = SpeculativeDecoder(HashModel(), remote, context_tokens=999)
    assert list(decoder.generate(PROMPT, 12)) == HashModel().plain(PROMPT, 12)
    for stats in (remote.stats, decoder.stats):
        assert "NOT_FOUND" in stats.first_failure
        assert "this node serves ngram" in stats.first_failure
    (line,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert remote.stats.first_failure in line


class OldServicer(PlainServicer):
    """Reads only the fields that it knows, and refuses an empty prefix as it likes."""

    def __init__(self, answer, status: grpc.StatusCode | None) -> None:
        super().__init__(answer)
        self.status = status

    def ProposeBlock(self, request, context):
        if self.status is not None and not request.committed_token_ids:
            context.abort(self.status, "committed must be non-empty")
        return super().ProposeBlock(request, context)


@pytest.mark.parametrize(
    "status", [None, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN]
)
def test_a_node_without_the_extension_is_noticed_and_asked_plainly(connect, status):
    model = HashModel()
    servicer = OldServicer(lambda prefix, size: model.plain(prefix or [0], size), status)
    with plain_server(servicer) as address:
        remote = connect(address, "plain", vocab_size=VOCAB)
        for _ in range(3):
            assert list(remote.propose(PROMPT, 4).tokens) == model.plain(PROMPT, 4)
        assert not remote.extended
        assert (remote.stats.calls, remote.stats.failures) == (3, 0)
        assert sum(not seen.committed_token_ids for seen in servicer.seen) <= 1


def test_a_draft_after_a_prefix_that_was_not_read_is_not_taken(connect):
    with plain_server(PlainServicer(lambda prefix, size: [1] * size)) as address:
        remote = connect(address, "plain")
        for is_read in (False, True):
            pending = remote.begin(PROMPT, 4)
            assert pending.wait(60)
            if is_read:
                assert remote.finish(pending).tokens == (1, 1, 1, 1)
            else:
                with pytest.raises(PeerProtocol, match="lacks the extension"):
                    remote.finish(pending)


def test_a_model_that_was_unloaded_is_an_error_with_its_status(ngram_address, connect):
    with pytest.raises(RemoteProposerError, match=r"NOT_FOUND.*serves ngram") as failure:
        connect(ngram_address, "gone").propose([1], 2)
    assert failure.value.status is grpc.StatusCode.NOT_FOUND


def test_nobody_there_is_an_error_within_the_deadline(connect):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        remote = connect(address, is_served=False)
        began = time.monotonic()
        with pytest.raises(RemoteProposerError) as failure:
            remote.propose([1], 2)
    assert failure.value.status is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began < PATIENCE_S


def test_a_peer_that_never_answers_costs_one_timeout(connect):
    hold = threading.Event()

    def make(prefix, size):
        hold.wait(60)
        return []

    with serving(ProposerService({"slow": ToyProposer(make)})) as address:
        began = time.monotonic()
        with pytest.raises(RemoteProposerError) as failure:
            connect(address, timeout_s=0.3).propose([1], 2)
        assert failure.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 30
        hold.set()


def test_three_failures_in_a_row_open_the_breaker_and_time_closes_it(connect):
    clock = FakeClock()
    with plain_server(PlainServicer(lambda prefix, size: [1] * size)) as address:
        remote = connect(address, "wrong", clock=clock)
        for _ in range(3):
            with pytest.raises(RemoteProposerError, match="NOT_FOUND"):
                remote.propose([1], 2)
        with pytest.raises(RemoteProposerError, match="asked again in") as refusal:
            remote.propose([1], 2)
        assert 0 < refusal.value.retry_after_s <= 1.2
        assert remote.begin([1], 2) is None
        assert remote.stats.calls == 3
        clock.advance(2)
        with pytest.raises(RemoteProposerError, match="NOT_FOUND"):
            remote.propose([1], 2)


@pytest.mark.parametrize(
    "answer",
    [
        lambda prefix, size: [1] * (size - 1),
        lambda prefix, size: [1] * (size + 1),
        lambda prefix, size: [],
        lambda prefix, size: [VOCAB] * size,
    ],
    ids=["short", "long", "nothing", "out of vocabulary"],
)
def test_refuses_blocks_that_no_correct_peer_sends(connect, answer):
    with plain_server(PlainServicer(answer)) as address:
        remote = connect(address, vocab_size=VOCAB)
        with pytest.raises(PeerProtocol):
            remote.propose([1], 4)
        assert remote.stats.failures == 1


def test_works_with_a_placed_node_that_knows_no_extensions():
    model = HashModel()
    servicer = PlainServicer(model.plain)
    with plain_server(servicer) as address:
        decoder = placed(Placed(address, "plain", is_extended=False), HashModel())
        assert list(decoder.generate(PROMPT, 50)) == model.plain(PROMPT, 50)
        decoder.close()
        assert decoder.stats.tau > 7
    assert all(list(seen.committed_token_ids) for seen in servicer.seen)
    assert not any(seen.committed_token_ids_le32 for seen in servicer.seen)


class Babbler:
    """Accepts connections and speaks something that is no HTTP/2."""

    def __init__(self, words: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._words = words
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            try:
                client.sendall(self._words)
            except OSError:
                client.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._open:
            client.close()


@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.1 200 OK\r\n\r\nhello", b"\x00" * 4096, random.Random(3).randbytes(65536), b""],
    ids=["http/1", "zeros", "noise", "silence"],
)
def test_a_peer_that_speaks_garbage_costs_its_drafts_and_nothing_else(connect, words):
    babbler = Babbler(words)
    try:
        remote = connect(babbler.address, timeout_s=0.3, is_served=False, clock=FakeClock())
        model = HashModel()
        decoder = SpeculativeDecoder(model, remote, context_tokens=999)
        assert list(decoder.generate(PROMPT, 30)) == HashModel().plain(PROMPT, 30)
        assert decoder.stats.verified == 0
        assert remote.stats.calls == 3
    finally:
        babbler.close()


class Placed:
    def __init__(self, address: str, model: str, *, is_extended: bool = True) -> None:
        self.proposer_address = address
        self.proposer_model = model
        self.proposer_is_extended = is_extended


def placed(placement: Placed, verifier: HashModel) -> DistributedSpeculativeDecoder:
    decoder = DistributedSpeculativeDecoder.from_placement(
        placement,
        verifier=verifier,
        context_tokens=999,
        vocab_size=VOCAB,
        timeout_s=PATIENCE_S,
    )
    assert isinstance(decoder.proposer, RemoteProposer)
    connected(decoder.proposer)
    return decoder


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_placement_drives_the_decoder(ngram_address, params):
    model = HashModel(params, order=1)
    decoder = placed(Placed(ngram_address, "ngram"), model)
    out = list(decoder.generate(PROMPT, 120))
    decoder.close()
    assert out == HashModel(params, order=1).plain(PROMPT, 120)
    assert decoder.stats.accepted > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_remote_and_local_drafts_are_accepted_alike(ngram_address, connect, params):
    def run(proposer) -> SpeculativeDecoder:
        decoder = SpeculativeDecoder(HashModel(params, order=2), proposer, context_tokens=999)
        list(decoder.generate(PROMPT, 150))
        return decoder

    local, remote = run(NGramProposer()), run(connect(ngram_address, "ngram"))
    assert remote.stats == local.stats


def test_a_placed_proposer_that_is_gone_raises_and_the_session_goes_on():
    with child_server() as (child, address):
        model = HashModel(order=1)
        decoder = placed(Placed(address, "ngram"), model)
        out = []
        stream = decoder.generate(PROMPT, 200)
        while len(out) < 60:
            out.append(next(stream))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with pytest.raises(RemoteProposerError) as failure:
            out.extend(stream)
        assert failure.value.status is grpc.StatusCode.UNAVAILABLE
        assert decoder.history[: len(PROMPT) + len(out)] == PROMPT + out
        decoder.close()
    resumed = SpeculativeDecoder(model, NGramProposer(), context_tokens=999)
    committed = decoder.history[len(PROMPT) :]
    rest = list(resumed.generate(decoder.history, 200 - len(committed)))
    assert committed + rest == HashModel(order=1).plain(PROMPT, 200)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_proposer_server_killed_mid_generation_changes_no_token(connect, params):
    """RELIABILITY row 29: the next block comes within one proposal timeout.

    A killed process breaks its connection at once, so most of the timeout is left for the machine.
    """
    timeout_s = PROPOSAL_TIMEOUT_S
    expected = HashModel(params, order=1).plain(PROMPT, 300)
    with child_server() as (child, address):
        remote = connect(address, "ngram", timeout_s=timeout_s)
        model = HashModel(params, order=1)
        decoder = SpeculativeDecoder(model, remote, context_tokens=999)
        out, longest = [], 0.0
        stream = decoder.generate(PROMPT, 300)
        while len(out) < 100:
            out.append(next(stream))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        while True:
            began = time.monotonic()
            token = next(stream, None)
            longest = max(longest, time.monotonic() - began)
            if token is None:
                break
            out.append(token)
    assert out == expected
    assert decoder.stats.accepted > 0
    assert decoder.stats.failures > 0
    assert longest <= timeout_s


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in time; it is tried at least once."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        pass
    return holds


def decode_with_book(remote: RemoteProposer, model: HashModel, count: int, wait_s: float) -> list:
    """The step loop of an engine, in small."""
    book = RemoteDraftBook(remote)
    state = Decoding(PROMPT, max_tokens=count, stop_token_ids=frozenset(), context_tokens=9999)
    while state.finish is None:
        size = min(8, state.room())
        draft = book.poll(state.history, size, wait_s=wait_s).tokens if size else ()
        if draft:
            book.ahead(state.history, draft)
        state.commit(draft, model.verify(state.history, draft))
    book.close()
    return state.history[len(PROMPT) :]


def test_requests_over_a_closed_channel_fail_one_by_one_and_the_sender_lives():
    channel = grpc.insecure_channel("127.0.0.1:9")
    remote = RemoteProposer("127.0.0.1:9", channel=channel)
    channel.close()
    for _ in range(2):
        pending = remote.begin([1, 2], 4)
        assert pending is not None
        assert pending.wait(60)
        with pytest.raises(RemoteProposerError):
            remote.finish(pending)
    remote.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_the_book_drafts_ahead_over_a_real_connection(connect, wait_s):
    expected = HashModel().plain(PROMPT, 200)
    with serving(ProposerService({"oracle": oracle(HashModel())})) as address:
        remote = connect(address, "oracle", vocab_size=VOCAB)

        def drafts_help() -> bool:
            model = HashModel()
            assert decode_with_book(remote, model, 200, wait_s) == expected
            return remote.stats.drafted > 0 and (wait_s == 0 or model.forwards < 100)

        # On a busy machine a toy decode may end before the first answer is there.
        assert within(60, drafts_help)


def test_the_book_survives_the_death_of_its_peer(connect):
    expected = HashModel(order=1).plain(PROMPT, 400)
    with child_server() as (child, address):
        remote = connect(address, "ngram", timeout_s=0.5)
        killer = threading.Timer(0.05, child.kill)
        killer.start()

        def has_failed() -> bool:
            assert decode_with_book(remote, HashModel(order=1), 400, 0.05) == expected
            return remote.stats.failures > 0

        has_failed()
        killer.join()
        assert within(60, has_failed)
