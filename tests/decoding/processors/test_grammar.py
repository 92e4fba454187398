"""A mask is a function of the tokens before it; what cannot be followed is refused at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.decoding.processors.edits import Words, allowed_tokens
from kakeya.decoding.processors.grammar import MOST_CHARS, GrammarMatcher, Grammars
from kakeya.decoding.processors.processors import processors_of
from kakeya.generation.request import DecodeRequest
from kakeya.generation.spec import EMBEDDED_FOLDER
from tests.decoding.processors.schemas import SCHEMAS, Schema, grammar_of
from tests.laws import law

TOKENIZER = EMBEDDED_FOLDER / "kakeya-tiny" / "tokenizer.json"
VOCABULARY, END = 3072, 0
TEXTS = Tokenizer.from_file(str(TOKENIZER))
WORD = grammar_of({"enum": ["red", "redder"]})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab_size=VOCABULARY, end_ids=(END,), model_id="tiny")


def tokens_of(mask: Words | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(allowed_tokens(mask, VOCABULARY)).tolist()


def walked(matcher: GrammarMatcher, rng: random.Random) -> list[int]:
    """A random answer, up to its end."""
    taken: list[int] = []
    while not matcher.is_over:
        token = rng.choice(tokens_of(matcher.masks()[0]))
        matcher.extend([token])
        taken.append(token)
    return taken


@given(schema=SCHEMAS, seed=st.integers(0, 2**32), other=st.integers(0, 400))
@law(400)
def test_a_mask_is_a_function_of_the_tokens_before_it(grammars, schema, seed, other):
    rng = random.Random(seed)
    grammar = grammar_of(schema)
    answer = walked(grammars.matcher(grammar), rng)
    jsonschema.validate(json.loads(TEXTS.decode(answer[:-1])), schema)
    matcher = grammars.matcher(grammar)
    at = 0
    while at < len(answer):
        size = rng.randint(1, 9)
        forced = matcher.forced() if rng.random() < 0.5 else ()
        assert list(forced) == answer[at : at + len(forced)]
        ahead = answer[at : at + size]
        assert matcher.allowed([*ahead, other]) in (len(ahead), len(ahead) + 1)
        masks = matcher.masks(ahead)
        for depth, mask in enumerate(masks[:-1]):
            fresh = grammars.matcher(grammar)
            fresh.extend(answer[: at + depth])
            assert tokens_of(mask) == tokens_of(fresh.masks()[0])
            if depth < len(forced):
                assert tokens_of(mask) == [forced[depth]]
            allowed = fresh.allowed([other])
            assert allowed == (other in tokens_of(mask))
        step = rng.randint(1, len(ahead))
        matcher.extend(ahead[:step])
        at += step
    assert matcher.is_over
    assert matcher.masks([1, 2]) == [None] * 3
    assert (matcher.allowed([1]), matcher.forced()) == (0, ())


def test_an_answer_ends_only_where_its_grammar_may(grammars: Grammars) -> None:
    matcher = grammars.matcher(WORD)
    taken = walked(matcher, random.Random(1))
    assert taken[-1] == END
    assert json.loads(TEXTS.decode(taken[:-1])) in ("red", "redder")
    for size in range(len(taken) - 1):
        before = grammars.matcher(WORD)
        before.extend(taken[:size])
        assert END not in tokens_of(before.masks()[0])
        assert before.allowed([END]) == 0


def test_rows_behind_an_end_or_a_wrong_token_have_no_mask(grammars: Grammars) -> None:
    matcher = grammars.matcher(WORD)
    answer = walked(grammars.matcher(WORD), random.Random(1))
    masks = matcher.masks([*answer, 5])
    assert [mask is None for mask in masks] == [False] * len(answer) + [True, True]
    assert matcher.masks([END, 5])[1:] == [None, None]
    assert matcher.allowed([*answer, 5]) == len(answer)


def test_a_special_token_may_be_part_of_a_grammar(grammars: Grammars) -> None:
    marks = [token for token, each in TEXTS.get_added_tokens_decoder().items() if token != END]
    matcher = grammars.matcher(f"start: <[{marks[0]}]> /[ab]/")
    assert tokens_of(matcher.masks()[0]) == [marks[0]]


def test_an_answer_so_far_is_followed_by_a_new_matcher(grammars: Grammars) -> None:
    answer = walked(grammars.matcher(WORD), random.Random(1))

    def follow(tokens: list[int]) -> list[int]:
        matcher = grammars.matcher(WORD)
        history = [7, 8, *tokens]
        processors_of(DecodeRequest(token_ids=history, max_tokens=1, prompt_tokens=2), matcher)
        return tokens_of(matcher.masks()[0])

    assert follow(answer[:-1]) == [END]
    with pytest.raises(InvalidArgument, match="has ended"):
        follow(answer)
    with pytest.raises(InvalidArgument, match="no token 5 at this place"):
        follow([5])


def wide(count: int) -> Schema:
    return {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(count)}}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("no grammar", "cannot be followed: .*Expected token"),
        (grammar_of({"enum": ["x" * 9 + str(at) for at in range(60_000)]}), f"{MOST_CHARS:,}"),
        (grammar_of(wide(5_000)), "has 5,000 keys, more than 1,000"),
        (grammar_of({"patternProperties": wide(500)["properties"]}), "500 keys, more than 80"),
        ("start: %json " + json.dumps(wide(5_000)), "has 5,000 keys"),
        (grammar_of({"anyOf": [wide(900)] * 4}), "grammar size|items"),
        (grammar_of({"type": "object", "not": {}}), "not"),
        (grammar_of({"$ref": "https://example.com/schema"}), "example.com"),
    ],
    ids=["wrong", "long", "wide", "patterns", "inline", "large", "unknown keyword", "remote"],
)
def test_a_grammar_that_cannot_be_followed_is_refused(
    grammars: Grammars, grammar: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        grammars.begin(grammar).result()


def test_a_number_of_a_schema_is_no_number_of_keys(grammars: Grammars) -> None:
    for name in ("an object", "patternProperties"):
        matcher = grammars.matcher("start: %json " + json.dumps({"const": {name: 5_000}}))
        assert not matcher.is_over


def test_a_grammar_that_explodes_later_ends_its_answer_with_an_error(grammars: Grammars) -> None:
    matcher = grammars.matcher(grammar_of({"anyOf": [{"type": "null"}, wide(900)]}))
    tokens = TEXTS.encode('{"k7": "x", "k9": "y"').ids
    with pytest.raises(InvalidArgument, match=r"cannot be followed: .*items"):
        matcher.masks(tokens)


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


def test_a_model_that_can_follow_no_grammar_says_so(broken: Path, tmp_path: Path) -> None:
    for file, ends in ((broken, (END,)), (tmp_path / "none.json", (END,)), (TOKENIZER, ())):
        grammars = Grammars(file, vocab_size=VOCABULARY, end_ids=ends, model_id="tiny")
        with pytest.raises(Unsupported, match="tiny"):
            grammars.matcher(WORD)
