from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.draft.proposer import Proposer
from kakeya.decoding.ngram import ngram
from kakeya.decoding.ngram.ngram import LENGTHS, ROLLBACK, NGramIndex, NGramProposer


def reference(text: list[int], size: int, lengths=LENGTHS) -> list[int]:
    """What is to be drafted, by looking everywhere."""
    for length in lengths:
        for at in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[at - length : at] == text[-length:]:
                span = text[at:]
                return (span * (size // len(span) + 1))[:size]
    return []


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    size=st.integers(1, 12),
    chunk=st.integers(1, 9),
)
def test_drafts_what_followed_the_most_recent_longest_match(text, size, chunk):
    index = NGramIndex()
    for start in range(0, len(text), chunk):
        index.extend(text[start : start + chunk])
        index.draft(3)
    assert index.draft(size)[0] == reference(text, size)


@settings(deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_the_match_length_is_true_and_at_least_the_ngrams(text):
    index = NGramIndex()
    for token in text:
        index.extend([token])
        drafted, match = index.draft(1)
        assert (match == 0) == (not drafted)
        so_far = index.tokens
        assert (
            any(
                so_far[max(0, at - match) : at] == so_far[len(so_far) - match :]
                for at in range(match, len(so_far))
            )
            or match == 0
        )


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_cycle_drafts_as_much_as_asked(period):
    cycle = list(range(period))
    index = NGramIndex()
    index.extend(cycle * 4)
    assert index.draft(20)[0] == (cycle * 20)[:20]


def test_a_match_grows_while_a_span_is_copied():
    span = list(range(100, 140))
    index = NGramIndex()
    index.extend([*span, 1, 2, 3])
    grown = []
    for token in span[:30]:
        index.extend([token])
        grown.append(index.draft(4)[1])
    assert grown[0] == 1
    assert grown[-1] == 30


def test_recency_beats_the_first_occurrence():
    index = NGramIndex()
    index.extend([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3])
    assert index.draft(1)[0] == [60]


def test_the_longest_match_beats_a_more_recent_shorter_one():
    index = NGramIndex()
    index.extend([1, 2, 3, 50, 9, 3, 60, 1, 2, 3])
    assert index.draft(1)[0] == [50]


def test_text_without_repetition_drafts_nothing():
    index = NGramIndex()
    index.extend(range(500))
    assert index.draft(8) == ([], 0)


def test_min_n_refuses_short_matches():
    index = NGramIndex(max_n=4, min_n=3)
    index.extend([1, 2, 9, 1, 2])
    assert index.draft(2) == ([], 0)
    index.extend([9, 1, 2])
    assert index.draft(2) == ([9, 1], 4)


def test_an_empty_text_and_a_size_of_zero_draft_nothing():
    index = NGramIndex()
    assert index.draft(4) == ([], 0)
    index.extend([1, 1, 1])
    assert index.draft(0) == ([], 0)


@pytest.mark.parametrize("sizes", [(0, 0), (3, 4), (2, 0)])
def test_refuses_impossible_lengths(sizes):
    with pytest.raises(InvalidArgument):
        NGramIndex(*sizes)


@settings(deadline=None)
@given(data=st.data())
def test_after_taking_back_everything_is_as_if_it_had_never_come(data):
    index = NGramIndex(undo=20)
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        more = data.draw(st.lists(st.integers(0, 2), max_size=20))
        index.extend(more)
        index.draft(2)
        text += more
        keep = data.draw(st.integers(len(text) - len(more), len(text)))
        index.truncate(keep)
        del text[keep:]
        assert index.tokens == text
        drafted, match = index.draft(5)
        assert drafted == reference(text, 5)
        assert (match > 0) == bool(drafted)


def test_is_a_proposer():
    assert isinstance(NGramProposer(), Proposer)


def test_the_same_prefix_gives_the_same_draft():
    proposer = NGramProposer()
    prefix = [1, 2, 3, 4, 1, 2, 3]
    first = proposer.propose(prefix, 5)
    proposer.propose([*prefix, 4, 1], 5)
    assert proposer.propose(prefix, 5).tokens == first.tokens


def test_many_texts_in_turns_are_each_continued_by_their_own():
    proposer = NGramProposer(kept_texts=3)
    rng = random.Random(5)
    texts = [[rng.randrange(50) for _ in range(200)] for _ in range(5)]
    for _ in range(20):
        for text in texts:
            text += [rng.randrange(50) for _ in range(rng.randint(1, 5))]
            assert list(proposer.propose(text, 6).tokens) == reference(text, 6)


def test_long_texts_of_many_streams_are_not_all_kept(monkeypatch):
    monkeypatch.setattr(ngram, "KEPT_TOKENS", 1000)
    proposer = NGramProposer()
    for stream in range(5):
        proposer.propose([stream, *range(10, 410)], 4)
    kept = [proposer.unseen([stream, *range(10, 411)]) == 1 for stream in range(5)]
    assert kept == [False, False, False, True, True]
    longer = list(range(3000))
    proposer.propose(longer, 4)
    assert proposer.unseen([*longer, 1]) == 1, "the newest is kept, however long"
    assert proposer.unseen([4, *range(10, 411)]) > 1


def test_a_prefix_with_another_end_is_continued_as_itself():
    proposer = NGramProposer()
    rng = random.Random(6)
    text = [rng.randrange(9) for _ in range(400)]
    proposer.propose([*text, 1, 2, 3, 4, 5], 8)
    proposer.propose([*text, 7, 7], 8)
    assert proposer._recent[0].tokens == [*text, 7, 7]
    assert len(proposer._recent) == 1


def test_only_what_is_new_in_a_prefix_has_to_be_indexed():
    proposer = NGramProposer()
    text = [at % 17 for at in range(300)]
    assert proposer.unseen(text) == 300
    proposer.propose(text, 4)
    assert proposer.unseen(text) == 0
    assert proposer.unseen([*text, 1, 2]) == 2
    assert proposer.unseen([*text[:290], 50]) == 1


def test_a_prefix_that_differs_early_gets_an_index_of_its_own():
    proposer = NGramProposer()
    text = [at % 11 for at in range(5 * ROLLBACK)]
    proposer.propose(text, 4)
    other = [99, *text[1:]]
    proposer.propose(other, 4)
    assert [index.tokens for index in proposer._recent] == [other, text]


def test_propose_block_fills_up_with_the_fallback_id():
    proposal = NGramProposer(fallback_id=42).propose_block([1, 2, 3], 4, 1)
    assert proposal.tokens == (42, 42, 42, 42)
    assert proposal.num_valid == 0
    assert (proposal.diffusion_steps, proposal.forward_passes) == (0, 1)


def test_propose_block_copies_the_historical_continuation():
    proposal = NGramProposer().propose_block([5, 6, 7, 8, 5, 6], 3, 7)
    assert proposal.tokens == (7, 8, 5)
    assert proposal.num_valid == 3


def test_statistics_count_calls_drafts_and_abstentions():
    proposer = NGramProposer()
    proposer.propose([1, 2], 4)
    proposer.propose([1, 2, 1], 4)
    assert (proposer.stats.calls, proposer.stats.abstained, proposer.stats.drafted) == (2, 1, 4)


@pytest.mark.parametrize(("prefix", "size", "steps"), [([], 4, 1), ([1], 0, 1), ([1], 4, 0)])
def test_refuses_what_cannot_be_meant(prefix, size, steps):
    with pytest.raises(InvalidArgument):
        NGramProposer().propose_block(prefix, size, steps)


def test_a_longer_match_is_told_with_more_confidence():
    proposer = NGramProposer()
    span = list(range(40))
    short = proposer.propose([*span, 3], 2).confidence[0]
    long = proposer.propose([*span, *span[:20]], 2).confidence[0]
    assert 0 < short < long < 1


def test_a_prefix_that_turns_back_twice_is_indexed_anew():
    """What an index took back once, it cannot take back again."""
    text = [at % 7 for at in range(300)]
    proposer = NGramProposer()
    for prefix in (text, text[: 300 - ROLLBACK], [*text[: 250 - ROLLBACK], 9]):
        fresh = NGramIndex(undo=ROLLBACK)
        fresh.extend(prefix)
        assert proposer.propose(prefix, 8).tokens == tuple(fresh.draft(8)[0])
