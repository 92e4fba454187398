"""Tokens to text: the laws that hold however tokens are cut into frames."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from kakeya.text.detokenizer import WindowDetokenizer
from tests.text.texts import SIZES, cut, text_model


@pytest.fixture(scope="module", autouse=True)
def _text_is_loaded():
    """Before any test with an event loop, which may not read files."""
    text_model()


@given(st.lists(st.integers(0, 330), max_size=60), SIZES)
def test_any_tokens_in_any_frames_give_the_full_decode(ids, sizes):
    model = text_model()
    running = model.detokenizer()
    pieces = [running.feed(tuple(piece)) for piece in cut(ids, sizes)] + [running.finish()]
    assert "".join(pieces) == model.tokenizer.decode(ids)


@given(st.text(max_size=60), SIZES)
def test_text_never_comes_in_half_characters(text, sizes):
    model = text_model()
    ids = model.tokenizer.encode(text).ids
    running = model.detokenizer()
    shown = ""
    for piece in cut(ids, sizes):
        shown += running.feed(tuple(piece))
        assert model.tokenizer.decode(ids).startswith(shown)
    assert shown + running.finish() == model.tokenizer.decode(ids)


@functools.cache
def sentence_tokenizer() -> Tokenizer:
    """The other common family: `▁` for spaces, bytes as <0xAB> tokens."""
    words = ["▁hello", "▁world", "▁", "日", ",", "lo"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({word: 256 + index for index, word in enumerate(words)})
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


WORDS = st.one_of(
    st.integers(256, 261).map(lambda word: [word]),
    st.characters(codec="utf-8").map(lambda char: list(char.encode())),
)


@given(st.lists(WORDS, max_size=20), SIZES)
def test_a_window_decoder_gives_the_full_decode_of_valid_text(words, sizes):
    ids = [token for word in words for token in word]
    running = WindowDetokenizer(sentence_tokenizer(), frozenset())
    pieces = [running.feed(tuple(piece)) for piece in cut(ids, sizes)] + [running.finish()]
    assert "".join(pieces) == sentence_tokenizer().decode(ids)


@example(prompt=[[239, 191, 189]], words=[], sizes=[1])  # U+FFFD itself
@example(prompt=[[239, 191, 189]], words=[[65]], sizes=[1])
@given(st.lists(WORDS, min_size=1, max_size=6), st.lists(WORDS, max_size=9), SIZES)
def test_a_text_goes_on_from_its_prompt_as_the_whole_is_decoded(prompt, words, sizes):
    before, ids = ([token for word in some for token in word] for some in (prompt, words))
    running = WindowDetokenizer(sentence_tokenizer(), frozenset(), before)
    pieces = [running.feed(tuple(piece)) for piece in cut(ids, sizes)] + [running.finish()]
    tokenizer = sentence_tokenizer()
    assert tokenizer.decode(before) + "".join(pieces) == tokenizer.decode(before + ids)


def test_a_character_that_began_in_the_prompt_is_whole_in_the_text():
    first, *rest = "日".encode()
    running = WindowDetokenizer(sentence_tokenizer(), frozenset(), [256, first])
    assert running.feed(tuple(rest)) + running.finish() == "日"


def test_an_answer_of_its_own_begins_without_a_blank():
    running = WindowDetokenizer(sentence_tokenizer(), frozenset())
    assert running.feed((256, 257)) == "hello world"
