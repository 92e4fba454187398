"""No content forges a mark of a template, and a template sees what was sent."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import Replace as Decoded
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence

from kakeya.core.errors import InvalidArgument
from kakeya.text.chat import Chat
from kakeya.text.guard import GuardedTemplate
from kakeya.text.template import ChatTemplate
from kakeya.text.text import TextModel
from tests.gateway.toy import make_folder, make_tokenizer
from tests.text.texts import NOW, chat_of

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "s><|im", "<tool>", "</think>")
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TEMPLATES = {
    "data": PLAIN,
    "expression": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}{{ '<|im_start|>' ~ 'assistant\n' }}",
    "variable": "{% for m in messages %}{{ bos_token }}{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}<tool>",
    "thoughts": "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant\n</think>",
    "parts": "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p.text }}{% endfor %}"
    "<|im_end|>{% endfor %}",
}
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
CONTENTS = st.lists(
    st.one_of(
        st.sampled_from([*MARKS, "<|im_", "start|>", "<", "<|", "|>", " ", "\n", "s", "a", "é"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


@functools.cache
def byte_level() -> Tokenizer:
    return with_marks(make_tokenizer())


@functools.cache
def blank_first() -> Tokenizer:
    """A vocabulary that puts a blank in front of each text, as many older models have it."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [*"▁abcdeimnrst<>|_/", "<s>"]
    tokenizer = Tokenizer(
        BPE({one: number for number, one in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    tokenizer.decoder = Decoders([Decoded("▁", " "), ByteFallback(), Fuse()])
    return with_marks(tokenizer)


def with_marks(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS[:-2]])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[-2:]])
    return tokenizer


@functools.cache
def guarded(name: str, tokenizer: str) -> tuple[ChatTemplate, GuardedTemplate]:
    made = ChatTemplate(TEMPLATES[name], TOKENS, lambda: NOW)
    return made, GuardedTemplate(made, {"bytes": byte_level, "blank": blank_first}[tokenizer]())


def marks_in(pieces: list[str], tokenizer: Tokenizer) -> list[int]:
    named = {tokenizer.token_to_id(mark) for mark in MARKS}
    return [
        one
        for piece in pieces
        for one in tokenizer.encode(piece, add_special_tokens=False).ids
        if one in named
    ]


@given(
    st.sampled_from(list(TEMPLATES)),
    st.sampled_from(["bytes", "blank"]),
    st.lists(CONTENTS, min_size=1, max_size=3),
)
def test_no_content_gives_a_mark_that_the_template_did_not_write(name, kind, contents):
    template, guard = guarded(name, kind)
    tokenizer = {"bytes": byte_level, "blank": blank_first}[kind]()

    def chat(said: list[str]) -> Chat:
        roles = ("user", "assistant")
        return chat_of(*({"role": roles[i % 2], "content": one} for i, one in enumerate(said)))

    pieces = guard.pieces(chat(contents))
    assert "".join(pieces) == template.render(chat(contents)), "the template sees what was sent"
    unmarked = {tokenizer.token_to_id(mark) for mark in MARKS[-2:]} - set(
        marks_in(guard.pieces(chat(["a"])), tokenizer)
    )  # added tokens that mark nothing in this template are a caller's to write
    own = marks_in(guard.pieces(chat(["a"] * len(contents))), tokenizer)
    assert [one for one in marks_in(pieces, tokenizer) if one not in unmarked] == own


@pytest.mark.parametrize("kind", ["bytes", "blank"])
def test_text_that_was_cut_decodes_as_it_was_sent(tmp_path, kind):
    folder = make_folder(tmp_path, template=PLAIN)
    tokenizer = {"bytes": byte_level, "blank": blank_first}[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = TextModel(folder, lambda: NOW)
    said = "a<|im_end|>b<s>"
    ids = model._encode_chat(chat_of({"role": "user", "content": said}), 1 << 20)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert f"user\n{said}<|im_end|>" in shown
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 1


def test_a_template_finds_a_special_token_that_a_message_holds():
    _, guard = guarded("thoughts", "bytes")
    chat = chat_of({"role": "assistant", "content": "long thoughts</think>short"})
    assert "".join(guard.pieces(chat)).startswith("<|im_start|>assistant\nshort<|im_end|>")


def test_marks_whose_writer_cannot_be_told_are_kept_from_callers():
    formatted = ChatTemplate(
        "{% for m in messages %}{{ '{}<|im_end|>'.format(m.content) }}{% endfor %}",
        {},
        lambda: NOW,
    )
    guard = GuardedTemplate(formatted, byte_level())
    assert guard.pieces(chat_of({"role": "user", "content": "hello"})) == ["hello<|im_end|>"]
    with pytest.raises(InvalidArgument, match=r"a message holds '<\|im_end\|>'"):
        guard.pieces(chat_of({"role": "user", "content": "hello<|im_end|>"}))


def test_marks_of_tools_are_guarded_too():
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    guard = GuardedTemplate(ChatTemplate(source, {}, lambda: NOW), byte_level())
    pieces = guard.pieces(
        chat_of({"role": "user", "content": "a"}, tools=[{"<|im_end|>": ["<s>"]}])
    )
    assert [byte_level().id_to_token(one) for one in marks_in(pieces, byte_level())] == [
        "<|im_end|>"
    ]
