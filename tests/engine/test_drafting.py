"""What the sequences of an engine share, and what they leave behind."""

from __future__ import annotations

import threading

from kakeya.decoding.controller import DraftController
from kakeya.decoding.sampling import SamplingParams
from kakeya.engine.drafting import KEPT_PEERS, Drafting, RemoteBooks
from kakeya.engine.job import SourceSpec


def peer(port: int, *, extended: bool = True) -> SourceSpec:
    address = f"127.0.0.1:{port}"
    return SourceSpec(kind="remote", address=address, model_id="draft", extended=extended)


def drafting(books: RemoteBooks, *specs: SourceSpec) -> Drafting:
    return Drafting(specs, DraftController(), books, vocab_size=100, sampling=SamplingParams())


def test_peers_that_come_and_go_leave_the_last_few_channels() -> None:
    books = RemoteBooks()
    threads = threading.active_count()
    lasting = drafting(books, peer(1))
    for port in range(2, 100):
        passing = drafting(books, peer(port))
        passing.choose([1, 2, 3], 4)
        passing.close()
        passing.close()
    assert len(books) == KEPT_PEERS + 1
    assert threading.active_count() <= threads + KEPT_PEERS + 8
    assert lasting.choose([1, 2, 3], 4)[1] == 0, "its proposer still takes calls"
    lasting.close()
    assert len(books) == KEPT_PEERS


def test_a_peer_that_turns_out_to_know_the_extensions_is_asked_in_that_way() -> None:
    books = RemoteBooks()
    for extended in (False, True):
        drafting(books, peer(1, extended=extended)).close()
    assert len(books) == 2
