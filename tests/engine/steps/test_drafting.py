"""What the sequences of an engine share, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.draft.proposer import Draft, ProposerStats
from kakeya.decoding.serve.service import ProposerService
from kakeya.engine.steps.drafting import KEPT_PEERS, Drafting, RemoteBooks
from kakeya.generation.request import DraftSource, Sampling
from tests.decoding.servers import serving


def peer(port: int, *, extended: bool = True) -> DraftSource:
    address = f"127.0.0.1:{port}"
    return DraftSource(kind="remote", address=address, model_id="draft", extended=extended)


def drafting(books: RemoteBooks, *specs: DraftSource) -> Drafting:
    return Drafting(specs, DraftController(), books, vocab_size=100, sampling=Sampling())


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


def test_a_peer_with_an_address_that_is_none_costs_its_drafts_only() -> None:
    spec = DraftSource(kind="remote", address="nonsense", model_id="draft", extended=True)
    source = drafting(RemoteBooks(), spec)
    assert not source.has_offer()
    assert [tally.failed for tally in source.tallies()] == [1]
    source.close()


class Slow:
    """Counts on, after a while."""

    name = "draft"
    stats = ProposerStats()

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        time.sleep(0.1)
        return Draft(
            source=self.name, tokens=tuple((prefix[-1] + 1 + n) % 100 for n in range(size))
        )


def test_a_peer_that_was_slow_is_asked_by_every_generation_and_judged_by_its_late_answer() -> None:
    """However much was waited for it before, and whatever other texts made of its drafts."""
    controller, books = DraftController(), RemoteBooks()
    controller.seed_costs({1: 0.001, 17: 0.01})
    with serving(ProposerService({"draft": Slow()})) as address:
        spec = DraftSource(kind="remote", address=address, model_id="draft", extended=True)
        wrong = Draft(source=spec.name, tokens=(1,) * 8)
        for _ in range(40):
            controller.observe_wait(spec.name, 0.5)
            controller.observe_shadow(wrong, (2,))
        judged, deadline = 0, time.monotonic() + 60
        while judged < 2:
            assert time.monotonic() < deadline
            drafting = Drafting((spec,), controller, books, 100, Sampling())
            history = [1, 2]
            drafting.begin(history)
            draft, _ = drafting.choose(history, 8)
            assert not draft.tokens, "it is asked, not waited for"
            while not (tally := drafting.tallies()[0]).shadow_hits and not tally.failed:
                assert time.monotonic() < deadline
                history.append((history[-1] + 1) % 100)
                drafting.extend(history[-1:])
                time.sleep(0.005)
            # A call that failed, as on a busy machine, judges nothing.
            judged += tally.shadow_hits > 0
            drafting.close()
