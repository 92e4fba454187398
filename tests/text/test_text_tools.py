"""A text model reads answers whose marks are special tokens, and forces them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from kakeya.core.errors import InvalidArgument
from kakeya.generation.cuts import unmarked
from kakeya.text.grammar import AnswerShape
from kakeya.text.prefix import encode_ahead
from kakeya.text.text import TextModel
from kakeya.text.tools.answer import Said, Thought
from kakeya.text.tools.calls import Called
from tests.gateway.toy import make_folder, make_tokenizer
from tests.text.test_detokenizer import sentence_tokenizer
from tests.text.test_template import PLAIN, QWEN3
from tests.text.texts import NOW, chat_of

MANY = 1 << 20
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hello"}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
OPENING = PLAIN + "<assistant>{% if enable_thinking is not false %}<think>\n{% endif %}"


def with_marks(made: Tokenizer, *, special: bool) -> Tokenizer:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<other>")
    made.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return made


def model_of(folder: Path, template: str, *, special: bool, kind: str = "bytes") -> TextModel:
    made = (
        make_tokenizer() if kind == "bytes" else Tokenizer.from_str(sentence_tokenizer().to_str())
    )
    make_folder(folder, template=template)
    with_marks(made, special=special).save(str(folder / "tokenizer.json"))
    return TextModel(folder, lambda: NOW)


def parts_of(model: TextModel, chat, said: str, token_ids=()):
    reader = model.reader(token_ids, chat)
    running = model.detokenizer(shown=reader.shown)
    parts = []
    for token in model.tokenizer.encode(said, add_special_tokens=False).ids:
        parts += reader.feed(running.feed((token,)), tokens=1)
    parts += [*reader.feed(running.finish()), *reader.finish()]
    return parts, reader.thought_tokens


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("special", [True, False])
def test_marks_reach_the_reader_whatever_tokens_they_are(tmp_path, kind, special):
    model = model_of(tmp_path, QWEN3, special=special, kind=kind)
    said = f"<think>a</think>b{CALL}"
    parts, thoughts = parts_of(model, chat_of(HI, tools=[TOOL]), said)
    joined = "".join(part.text for part in parts if isinstance(part, Said)).strip()
    assert (parts[0], joined, parts[-1]) == (Thought("a"), "b", Called("look", "{}"))
    assert thoughts >= 3


def test_only_marks_that_are_needed_are_shown(tmp_path):
    model = model_of(tmp_path, QWEN3, special=True)
    parts, _ = parts_of(model, chat_of(HI), f"a<other>{CALL}<|im_start|>")
    inner = '{"name": "look", "arguments": {}}'
    assert "".join(part.text for part in parts) == f"a{inner}", "no tools, so no calls"
    parts, _ = parts_of(model, chat_of(HI, tools=[TOOL]), f"a<other>{CALL}<|im_start|>")
    assert parts == [Said("a"), Called("look", "{}")]


def test_a_stop_string_finds_marks_that_are_shown(tmp_path):
    model = model_of(tmp_path, QWEN3, special=True)
    reader = model.reader((), chat_of(HI, tools=[TOOL]))
    stops = model.stops(["</tool_call>"], shown=reader.shown)
    running = model.detokenizer(shown=reader.shown)
    text = ""
    for token in model.tokenizer.encode(CALL).ids:
        text += stops.feed(running.feed((token,)) + stops.sign(token))
    assert stops.is_stopped
    assert text == CALL.removesuffix("</tool_call>")


async def test_an_answer_begins_inside_thoughts_where_the_prompt_opened_them(tmp_path):
    model = await asyncio.to_thread(model_of, tmp_path, OPENING, special=True)
    asks = {"role": "user", "content": "what is <think>?"}
    states = []
    for kwargs in ({}, {"enable_thinking": False}):
        chat = chat_of(asks, kwargs=kwargs)
        token_ids = await model.encode_chat(chat, at_most=MANY)
        states.append(model.reader(token_ids, chat).is_thinking)
    assert states == [True, False]
    for said, is_thinking in (("<think>so", True), ("<think>so</think>", False), ("so", False)):
        chat = chat_of(HI, {"role": "assistant", "content": said}, continues_last=True)
        token_ids = await model.encode_chat(chat, at_most=MANY)
        assert model.reader(token_ids, chat).is_thinking is is_thinking


async def test_old_thoughts_leave_the_prompt_and_the_next_turn_is_warm(tmp_path):
    """Behind calls thoughts stay; a message of the user's takes them out."""
    model = await asyncio.to_thread(model_of, tmp_path, QWEN3, special=False)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    asked = chat_of(HI, tools=[TOOL])
    called = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    first = await model.encode_chat(asked, at_most=MANY)
    answer = f'<think>\nhm\n</think>\n\n\n<tool_call>\n{"{"}"name": "look", "arguments": {{}}}}'
    written = model.tokenizer.encode(answer + "\n</tool_call>").ids
    more = asked.followed_by(called, {"role": "tool", "tool_call_id": "1", "content": "sea"})
    second = await model.encode_chat(more, at_most=MANY)
    assert second[: len(first) + len(written)] == [*first, *written], "the KV of the call is used"

    said = {"role": "assistant", "content": "the sea", "reasoning_content": "hm"}
    done = more.followed_by(said)
    ahead, cuts = unmarked(await encode_ahead(model, done, at_most=MANY))
    third = await model.encode_chat(done.followed_by(HI), at_most=MANY)
    assert third[: len(ahead) - 1] == ahead[:-1]
    shown = model.tokenizer.decode(ahead[:-1], skip_special_tokens=False)
    assert "hm" not in shown
    assert shown.endswith("the sea<|im_end|>\n<|im_start|>user\n")
    assert await model.cuts_of(third, done.followed_by(HI), at_most=MANY)
    assert cuts


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
async def test_what_is_warmed_for_a_conversation_has_its_variables(tmp_path, kwargs):
    model = await asyncio.to_thread(model_of, tmp_path, QWEN3, special=False)
    chat = chat_of(HI, {"role": "assistant", "content": "a"}, kwargs=kwargs)
    ahead, _ = unmarked(await encode_ahead(model, chat, at_most=MANY))
    following = await model.encode_chat(chat.followed_by(HI), at_most=MANY)
    assert following[: len(ahead) - 1] == ahead[:-1]
    request, _ = unmarked(await encode_ahead(model, chat_of(HI, kwargs=kwargs), at_most=MANY))
    assert request == await model.encode_chat(chat_of(HI, kwargs=kwargs), at_most=MANY)


def test_a_conversation_that_goes_on_puts_an_answer_behind_its_beginning():
    chat = chat_of(HI, {"role": "assistant", "content": "It is "}, continues_last=True)
    done = chat.followed_by({"role": "assistant", "content": "blue."}, HI)
    assert [message["content"] for message in done.messages] == ["hello", "It is blue.", "hello"]
    assert not done.continues_last


def test_the_abilities_of_a_folder_are_told(tmp_path):
    model = model_of(tmp_path / "a", QWEN3, special=True)
    assert (model.shows_tools, model.thinks, model.tool_family.name) == (True, True, "json_tools")
    plain = TextModel(make_folder(tmp_path / "b", template=PLAIN), lambda: NOW)
    assert (plain.shows_tools, plain.thinks, plain.tool_family.name) == (False, False, "json_tools")
    none = TextModel(make_folder(tmp_path / "c", template=None), lambda: NOW)
    assert (none.shows_tools, none.has_chat_template) == (False, False)


async def test_a_grammar_knows_where_the_answer_begins(tmp_path):
    model = await asyncio.to_thread(model_of, tmp_path, OPENING, special=True)
    shape = AnswerShape(calls="required")

    async def rule(shape: AnswerShape, **said) -> str | None:
        chat = chat_of(HI, tools=[TOOL], **said)
        token_ids = await model.encode_chat(chat, at_most=MANY)
        grammar = await model.grammar(token_ids, chat, shape)
        return grammar and grammar.splitlines()[1]

    assert await rule(shape) == "start: thoughts answer"
    assert await rule(shape, kwargs={"enable_thinking": False}) == "start: thoughts? answer"
    assert await rule(AnswerShape()) is None
    closed = await asyncio.to_thread(model_of, tmp_path / "q", QWEN3, special=True)
    chat = chat_of(HI, tools=[TOOL], kwargs={"enable_thinking": False})
    token_ids = await closed.encode_chat(chat, at_most=MANY)
    grammar = await closed.grammar(token_ids, chat, shape)
    assert grammar.splitlines()[1] == "start: answer"
    with pytest.raises(InvalidArgument, match="names 'x'"):
        await closed.grammar(token_ids, chat, AnswerShape(calls="required", names=("x",)))
