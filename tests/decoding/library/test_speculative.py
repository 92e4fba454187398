from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.library.speculative import DistributedSpeculativeDecoder, SpeculativeDecoder
from kakeya.decoding.ngram.ngram import NGramProposer
from tests.decoding import toys
from tests.decoding.toys import GREEDY, SAMPLED, VOCAB, HashModel, ToyProposer

PROMPT = [3, 1, 4, 1, 5]
CONTEXT = 4096
SOURCES = {
    "oracle": toys.oracle,
    "always wrong": toys.always_wrong,
    "half corrupted": lambda model: toys.corrupted(model, 0.5, random.Random(3)),
    "empty": toys.empty,
    "too long": toys.too_long,
    "out of vocabulary": toys.out_of_vocabulary,
    "stale": toys.stale,
    "failing": toys.failing,
    "killed mid-stream": toys.dying,
    "n-gram": lambda _: NGramProposer(),
}


def decoder(model: HashModel, proposer, **more) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, proposer, context_tokens=CONTEXT, vocab_size=VOCAB, **more)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("controlled", [False, True], ids=["fixed block", "controlled"])
@pytest.mark.parametrize("block_size", [1, 4, 17])
@pytest.mark.parametrize("source", SOURCES)
def test_no_draft_source_changes_a_token(source, block_size, controlled, params):
    model = HashModel(params)
    drafting = decoder(
        model,
        SOURCES[source](HashModel(params)),
        block_size=block_size,
        controller=DraftController() if controlled else None,
    )
    out = list(drafting.generate(PROMPT, 60))
    assert out == HashModel(params).plain(PROMPT, 60)
    assert drafting.history == PROMPT + out
    assert drafting.stats.committed == 60


def test_an_oracle_is_always_accepted_and_needs_the_least_forwards():
    model = HashModel()
    drafting = decoder(model, toys.oracle(model), block_size=7)
    out = list(drafting.generate(PROMPT, 64))
    assert len(out) == 64
    assert drafting.stats.accepted == drafting.stats.verified
    assert model.forwards == drafting.stats.forwards == 8
    assert drafting.stats.tau == 8.0
    assert drafting.stats.acceptance == 1.0
    assert drafting.stats.accepted_at == drafting.stats.verified_at == [8] * 7


def test_a_wrong_proposer_costs_rows_but_never_a_forward_more():
    model = HashModel()
    drafting = decoder(model, toys.always_wrong(model), block_size=4)
    list(drafting.generate(PROMPT, 50))
    assert drafting.stats.accepted == 0
    assert model.forwards == 50
    assert model.rows <= 50 * 5


def test_with_a_controller_a_wrong_proposer_costs_hardly_a_row():
    model = HashModel()
    controller = DraftController()
    controller.seed_costs({1: 1.0, 2: 1.4, 4: 1.8, 8: 2.5})
    drafting = decoder(model, toys.always_wrong(model), controller=controller, block_size=8)
    drafting._clock = type("Still", (), {"mono": staticmethod(lambda: 0.0)})()
    list(drafting.generate(PROMPT, 200))
    assert model.forwards == 200
    assert model.rows <= 210


def test_ngrams_are_accepted_on_text_that_repeats():
    model = HashModel(order=1)
    drafting = decoder(model, NGramProposer())
    list(drafting.generate(PROMPT, 300))
    assert drafting.stats.tau > 5


def test_a_stop_token_inside_a_block_ends_the_text():
    plain = HashModel().plain(PROMPT, 60)
    stop = plain[37]
    drafting = decoder(
        HashModel(), toys.oracle(HashModel()), block_size=16, stop_token_ids=frozenset({stop})
    )
    assert list(drafting.generate(PROMPT, 60)) == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_never_more_than_max_tokens(count):
    drafting = decoder(HashModel(), toys.oracle(HashModel()))
    assert len(list(drafting.generate(PROMPT, count))) == count


def test_no_row_goes_beyond_the_context():
    model = HashModel()
    drafting = SpeculativeDecoder(model, toys.oracle(HashModel()), context_tokens=12, block_size=16)
    assert len(list(drafting.generate(PROMPT, 100))) == 7
    assert len(model.cache) <= 12


def test_drafts_are_only_asked_where_they_can_be_of_use():
    proposer = toys.oracle(HashModel())
    list(decoder(HashModel(), proposer).generate(PROMPT, 1))
    assert proposer.stats.calls == 0


def test_an_error_may_be_raised_and_the_generation_goes_on_elsewhere():
    model = HashModel()
    first = decoder(model, toys.dying(HashModel(), after=4), on_proposer_error="raise")
    out: list[int] = []
    with pytest.raises(ConnectionError):
        out.extend(first.generate(PROMPT, 80))
    assert first.history == PROMPT + out
    assert 0 < len(out) < 80
    second = decoder(model, NGramProposer())
    out += second.generate(first.history, 80 - len(out))
    assert out == HashModel().plain(PROMPT, 80)


def test_a_failing_proposer_is_counted():
    drafting = decoder(HashModel(), toys.failing(HashModel()))
    list(drafting.generate(PROMPT, 10))
    assert drafting.stats.failures == 9
    assert drafting.stats.forwards == 10


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_diffusion_steps": 0}, "num_diffusion_steps is 0"),
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"on_proposer_error": "plan"}, "'plain' or 'raise'"),
    ],
)
def test_refuses_terms_with_which_no_draft_could_be_taken(terms, words):
    with pytest.raises(InvalidArgument, match=words):
        SpeculativeDecoder(
            HashModel(), ToyProposer(lambda *_: ()), **{"context_tokens": 9, **terms}
        )


@pytest.mark.parametrize(
    ("verifier", "proposer", "words"),
    [
        (HashModel(), object(), "object is no proposer"),
        (HashModel(), NGramProposer, "is no proposer"),
        (object(), NGramProposer(), "object is no verifier"),
        (NGramProposer(), HashModel(), "the verifier comes first"),
    ],
)
def test_objects_of_the_wrong_shape_are_refused_at_once(verifier, proposer, words):
    with pytest.raises(InvalidArgument, match=words):
        SpeculativeDecoder(verifier, proposer, context_tokens=9, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (toys.failing, "RuntimeError('out of order')"),
        (toys.out_of_vocabulary, "toy drafted id 29, outside the vocabulary of 29 ids"),
        (lambda _: ToyProposer(lambda prefix, size: ["a"]), "TypeError"),
    ],
)
def test_the_first_failure_is_logged_once_and_stands_in_the_stats(make, words, caplog):
    drafting = decoder(HashModel(), make(HashModel()))
    assert list(drafting.generate(PROMPT, 12)) == HashModel().plain(PROMPT, 12)
    assert drafting.stats.failures > 1
    assert words in drafting.stats.first_failure
    problem = drafting.stats.first_failure
    assert [record.message for record in caplog.records] == [
        f"the proposer toy failed: {problem}; further failures are only counted"
    ]


def test_an_answer_that_is_no_draft_is_a_failure():
    class Lists(ToyProposer):
        def propose(self, prefix, size, num_steps=1):
            return [1, 2]

    drafting = decoder(HashModel(), Lists(lambda *_: ()))
    assert list(drafting.generate(PROMPT, 12)) == HashModel().plain(PROMPT, 12)
    assert drafting.stats.first_failure == "toy answered a list, it must be a Draft"


@dataclass
class Block:
    tokens: list[int]
    diffusion_steps: int
    forward_passes: int
    peak_activation_bytes: int


class Diffusing:
    """A proposer of the original engine."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def propose_block(self, committed_token_ids, block_size, num_steps):
        self.asked.append((block_size, num_steps))
        tokens = HashModel().plain(committed_token_ids, block_size)
        return Block(tokens, num_steps, num_steps, 4096)


def test_a_proposer_of_the_original_engine_drafts_in_its_steps():
    proposer = Diffusing()
    drafting = decoder(HashModel(), proposer, block_size=4, num_diffusion_steps=16)
    assert list(drafting.generate(PROMPT, 20)) == HashModel().plain(PROMPT, 20)
    assert drafting.stats.tau == 5.0
    assert set(proposer.asked) == {(4, 16), (3, 16)} or set(proposer.asked) == {(4, 16)}
    stats = drafting.proposer.stats
    blocks = len(proposer.asked)
    assert (stats.total_blocks, stats.total_diffusion_steps) == (blocks, 16 * blocks)
    assert (stats.total_forward_passes, stats.peak_activation_bytes) == (16 * blocks, 4096)


def test_no_id_outside_the_vocabulary_reaches_a_real_model():
    run = [sys.executable, "-m", "tests.decoding.child_vocabulary"]
    child = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, (child.returncode, child.stdout, child.stderr)
    without, with_size, prompt = child.stdout.splitlines()
    assert without.startswith("refused: the vocabulary of Lookup is not known")
    assert "pass vocab_size" in without
    assert with_size == "5 tokens"
    assert prompt == ("refused: the prompt's token 1 is 50000000, outside the vocabulary of 64 ids")


def test_the_verifiers_own_vocabulary_counts_where_none_is_given():
    drafting = SpeculativeDecoder(
        HashModel(), toys.out_of_vocabulary(HashModel()), context_tokens=CONTEXT
    )
    assert list(drafting.generate(PROMPT, 30)) == HashModel().plain(PROMPT, 30)
    assert drafting.stats.accepted > 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_vocabulary_has_ids(size):
    with pytest.raises(InvalidArgument, match=f"vocab_size is {size}"):
        SpeculativeDecoder(HashModel(), NGramProposer(), context_tokens=9, vocab_size=size)


def test_a_placed_proposer_is_not_connected_to_without_a_vocabulary():
    class Bare:
        def verify(self, history, draft):
            raise AssertionError

    with pytest.raises(InvalidArgument, match="vocabulary of Bare"):
        DistributedSpeculativeDecoder.from_placement(None, verifier=Bare(), context_tokens=9)
