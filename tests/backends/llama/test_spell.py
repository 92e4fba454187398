"""Token ids that llama-server does not tell are found by the text that they spell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.llama.spell import TokenSpelling
from kakeya.text.gguf import gguf_tokenizer
from tests.gguf_files import tiny_meta

TOKENIZER = gguf_tokenizer(tiny_meta())
SPELLING = TokenSpelling(TOKENIZER)


@pytest.mark.law
@given(
    text=st.text(
        st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1, max_size=1
    )
)
def test_a_character_of_several_tokens_is_spelled(text: str) -> None:
    *before, last = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert list(SPELLING.before(text, len(before), last)) == before


def test_another_spelling_than_the_usual_one_is_found() -> None:
    """The usual one has fewer tokens here: `he` is one."""
    accent = TOKENIZER.encode("\u00e9", add_special_tokens=False).ids
    h, e = (TOKENIZER.token_to_id(one) for one in "he")
    usual = TOKENIZER.encode("he\u00e9", add_special_tokens=False).ids
    assert usual == [TOKENIZER.token_to_id("he"), *accent]
    # h and e end at whole characters: llama-server would have told them.
    assert list(SPELLING.before("he\u00e9", 2, accent[-1])) == usual[:-1]
    assert [h, e] != usual[:2]


def test_a_text_that_was_mended_gives_the_ids_of_what_is_left() -> None:
    mended = TOKENIZER.encode("\ufffd", add_special_tokens=False).ids
    assert list(SPELLING.before("\ufffd", 7, TOKENIZER.token_to_id("a"))) == mended
