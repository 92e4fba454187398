"""A text that is encoded in parts, some of which were encoded before, has the ids of the whole."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import NFC, Lowercase, Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from tokenizers.processors import TemplateProcessing

from kakeya.text.encoder import Encoder
from tests.gateway.toy import CountingTokenizer

TINY = Path(__file__).parents[2] / "kakeya" / "models" / "kakeya-tiny"
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "s><|im")
"""The last one overlaps the others."""


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("Tool")])
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.normalizer = NFC()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return with_added(tokenizer)


def spaced(first: str) -> Tokenizer:
    vocab = {character: number for number, character in enumerate("▁abcdeims<>|_ Tol é")}
    tokenizer = Tokenizer(BPE(vocab, [], unk_token="é"))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme=first)
    return with_added(tokenizer)


def prepended() -> Tokenizer:
    tokenizer = spaced("never")
    tokenizer.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁"), Lowercase()])
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "b": 2, "##b": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return with_added(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "spaces first": lambda: spaced("first"),
    "spaces always": lambda: spaced("always"),
    "prepended": prepended,
    "words": words,
}


@functools.cache
def made(kind: str) -> tuple[Tokenizer, Encoder]:
    """The encoder is one for all examples: it has much to remember, and little room."""
    tokenizer = KINDS[kind]()
    return tokenizer, Encoder(tokenizer, json.loads(tokenizer.to_str()), kept_chars=64)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIALS, "<think>", "Tool", "<|im_", "start|>", " ", "\n", "a b", "é"]),
        st.text(max_size=6),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=TEXTS)
def test_the_ids_are_those_of_the_whole_text(kind: str, text: str) -> None:
    tokenizer, encoder = made(kind)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(2):
        assert encoder.encode(text) == whole


def counting(**options: int) -> tuple[CountingTokenizer, Encoder]:
    tokenizer = byte_level()
    counted = CountingTokenizer(tokenizer)
    return counted, Encoder(counted, json.loads(tokenizer.to_str()), **options)  # type: ignore[arg-type]


def test_a_conversation_that_grows_costs_what_is_new() -> None:
    counted, encoder = counting()
    said = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    encoder.encode(said)
    assert "".join(counted.texts) == said.removesuffix("<|im_end|>\n")  # the same text again
    counted.texts.clear()
    encoder.encode(said + "<|im_start|>assistant\nhi")
    assert counted.texts == ["<|im_start|>assistant\nhi"]


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    counted, encoder = counting(kept_chars=40)
    for text in ("first text", "second text", "third text"):
        encoder.encode(text)
    encoder.encode("first text")
    encoder.encode("fourth one")
    counted.texts.clear()
    for text in ("first text", "third text", "fourth one", "second text"):
        encoder.encode(text)
    assert counted.texts == ["second text"]


def test_a_text_that_would_put_out_all_others_is_not_kept() -> None:
    counted, encoder = counting(kept_chars=40)
    encoder.encode("short")
    encoder.encode("a much longer text than that")
    counted.texts.clear()
    encoder.encode("short")
    assert counted.texts == []


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_nothing_is_cut_where_an_added_token_looks_around_itself(flag: str) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken("<x>", normalized=False, **{flag: True})])
    counted = CountingTokenizer(tokenizer)
    encoder = Encoder(counted, json.loads(tokenizer.to_str()))  # type: ignore[arg-type]
    text = "a <x> <|im_start|> b"
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == whole
    assert counted.texts == [text]


def test_nothing_is_kept_where_the_same_text_is_encoded_in_many_ways() -> None:
    tokenizer = byte_level()
    spec = json.loads(tokenizer.to_str())
    spec["model"]["dropout"] = 0.1
    counted = CountingTokenizer(tokenizer)
    encoder = Encoder(counted, spec)  # type: ignore[arg-type]
    for _ in range(2):
        encoder.encode("text")
    assert counted.texts == ["text", "text"]


def test_threads_share_what_was_encoded() -> None:
    tokenizer, encoder = made("byte level")
    texts = [f"<|im_start|>text {number % 7}" * 3 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: encoder.encode(text), texts))
    assert found == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
