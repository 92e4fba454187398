"""What a grammar accepts is read as what was asked for, and what it cannot force is named."""

from __future__ import annotations

import functools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kakeya.core.errors import InvalidArgument
from kakeya.text.grammar import JSON_OBJECT, AnswerShape, ModelMarks, answer_grammar
from kakeya.text.tools.answer import AnswerReader, Thought
from kakeya.text.tools.calls import Called, functions_of
from kakeya.text.tools.families import tool_families
from kakeya.text.tools.thinking import ThinkingMarks

FAMILIES = {family.name: family for family in tool_families()}
THINK = ThinkingMarks("<think>", "</think>")
LOOK = {
    "type": "object",
    "properties": {
        "at": {"enum": ["sea", "é"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "said": {"type": "string", "maxLength": 5},
    },
    "required": ["at", "said"],
    "additionalProperties": False,
}
GO = {"type": "object", "properties": {"to": {"type": "boolean"}}, "required": ["to"]}
GO["additionalProperties"] = False


def tools(*, strict: bool = True):
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in (("look", LOOK), ("go", GO))
    ]


@functools.cache
def tokenizer(*marks: str) -> Tokenizer:
    """The bytes, an end token, and marks as added tokens, every second one a special one."""
    made = Tokenizer(BPE({one: i for i, one in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Decoder()
    made.add_special_tokens(["<end>"])
    for index, mark in enumerate(marks):
        made.add_tokens([AddedToken(mark, special=index % 2 == 0, normalized=False)])
    return made


def marks_of(made: Tokenizer, family: str, **more) -> ModelMarks:
    added = made.get_added_tokens_decoder().items()
    tokens = {token.content: token_id for token_id, token in added}
    return ModelMarks(family=FAMILIES[family], tokens=tokens, **more)


def matcher(made: Tokenizer, grammar: str) -> LLMatcher:
    found = LLMatcher(
        LLTokenizer(made.to_str(), eos_token=made.token_to_id("<end>")), grammar, log_level=0
    )
    assert not found.get_error()
    return found


def accepts(made: Tokenizer, grammar: str, text: str) -> bool:
    running = matcher(made, grammar)
    ids = made.encode(text).ids
    return running.validate_tokens(ids) == len(ids) and (
        running.consume_tokens(ids) and running.is_accepting()
    )


def answer_of(made: Tokenizer, grammar: str, seed: int) -> str:
    """A random text that the grammar accepts; tokens that end something are likelier."""
    running, rng, ids = matcher(made, grammar), random.Random(seed), []
    end = made.token_to_id("<end>")
    ending = {end, *made.encode('"}]<').ids}
    while not running.is_stopped():
        mask = int.from_bytes(running.compute_bitmask(), "little")
        allowed = [one for one in range(made.get_vocab_size()) if mask >> one & 1]
        near = [one for one in allowed if one in ending or one > end]
        token = rng.choice(near if near and rng.random() < 0.4 else allowed)
        assert running.consume_tokens([token])
        ids.append(token)
    return made.decode([one for one in ids if one != end], skip_special_tokens=False)


def parts_of(text: str, family: str, *, is_thinking: bool = False):
    reader = AnswerReader(
        thinking=THINK, is_thinking=is_thinking, family=FAMILIES[family], tools=tools()
    )
    return [*reader.feed(text), *reader.finish()]


SCHEMAS = {function["function"]["name"]: function["function"]["parameters"] for function in tools()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("has_tokens", [True, False])
@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 32), is_parallel=st.booleans())
def test_calls_that_a_grammar_forces_are_read_and_validate(family, has_tokens, seed, is_parallel):
    own = FAMILIES[family]
    spelled = [own.start, own.end, *own.inner_marks] if has_tokens and family != "llama3" else []
    if family == "kimi_k3" and has_tokens:  # its marks are made of tokens and of text
        spelled = ["<|open|>", "<|close|>", "<|sep|>"]
    made = tokenizer(*filter(None, spelled))
    shape = AnswerShape(calls="required", is_parallel=is_parallel)
    grammar = answer_grammar(shape, functions_of(tools()), marks_of(made, family))
    text = answer_of(made, grammar, seed)
    calls = parts_of(text, family)
    assert calls
    assert all(isinstance(call, Called) for call in calls), text
    assert is_parallel or len(calls) == 1
    for call in calls:
        Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32), opened=st.booleans())
def test_thoughts_stand_in_front_of_a_forced_answer(seed, opened):
    made = tokenizer("<think>", "</think>")
    marks = marks_of(made, "json_tools", thinking=THINK, is_thinking=opened)
    grammar = answer_grammar(AnswerShape(schema=LOOK), (), marks)
    text = answer_of(made, grammar, seed)
    *thoughts, said = parts_of(text, "json_tools", is_thinking=opened)
    assert all(isinstance(part, Thought) for part in thoughts)
    Draft202012Validator(LOOK).validate(json.loads(said.text))


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32), is_special=st.booleans())
def test_calls_in_free_text_validate_where_they_are_strict(seed, is_special):
    made = tokenizer("<tool_call>", "</tool_call>") if is_special else tokenizer()
    shape = AnswerShape(calls="allowed")
    grammar = answer_grammar(shape, functions_of(tools()), marks_of(made, "json_tools"))
    text = answer_of(made, grammar, seed)
    parts = parts_of(text, "json_tools")
    assert text.count("<tool_call>") == 0 or isinstance(parts[-1], Called), text
    for call in (part for part in parts if isinstance(part, Called)):
        Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


def test_text_may_be_all_of_an_answer_and_a_wrong_call_none():
    made = tokenizer("<tool_call>", "</tool_call>")
    loose = [
        *tools(),
        *(
            {**tool, "function": {**tool["function"], "name": "any", "strict": False}}
            for tool in tools()[:1]
        ),
    ]
    shape = AnswerShape(calls="allowed")
    grammar = answer_grammar(shape, functions_of(loose), marks_of(made, "json_tools"))
    good = '<tool_call>\n{"name": "go", "arguments": {"to": true}}\n</tool_call>'
    free = '<tool_call>\n{"name": "any", "arguments": {"x": [1, 2]}}\n</tool_call>'
    for text in ("", "Hello < you.\n", good, "I go.\n" + good, f"{good}\n{good}", free):
        assert accepts(made, grammar, text), text
    for text in (good.replace("true", "1"), good[:-12], good.replace("go", "gone"), good + "x"):
        assert not accepts(made, grammar, text), text


def test_an_answer_is_json_or_calls_where_both_are_asked_for():
    made = tokenizer("<tool_call>", "</tool_call>")
    shape = AnswerShape(schema=JSON_OBJECT, calls="allowed", is_parallel=False)
    grammar = answer_grammar(shape, functions_of(tools()), marks_of(made, "json_tools"))
    good = '<tool_call>\n{"name": "go", "arguments": {"to": true}}\n</tool_call>'
    assert accepts(made, grammar, '{"a": [1, {"b": null}], "c": "d"}')
    assert accepts(made, grammar, good)
    for text in ("text", '{"a":1}', '{"a": 1 }', "[1]", f"{good}\n{good}", ""):
        assert not accepts(made, grammar, text), text


def test_one_tool_is_named():
    made = tokenizer()
    shape = AnswerShape(calls="required", names=("go",), is_parallel=False)
    grammar = answer_grammar(shape, functions_of(tools()), marks_of(made, "json_tools"))
    assert accepts(
        made, grammar, '<tool_call>\n{"name": "go", "arguments": {"to": true}}\n</tool_call>'
    )
    assert "look" not in grammar


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "if": {}}, 'uses "if"'),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, 'uses "uniqueItems"'),
        ({"not": {}}, 'uses "not"'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 'uses "oneOf"'),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://example.com/x"}, "http://example.com/x"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": ["a" * 200_000]}, "characters"),
    ],
)
def test_what_a_grammar_cannot_force_is_named_with_its_place(schema, says):
    marks = marks_of(tokenizer(), "json_tools")
    with pytest.raises(InvalidArgument) as refused:
        answer_grammar(AnswerShape(schema=schema), (), marks)
    assert says in refused.value.message
    assert refused.value.param == "response_format.json_schema.schema"
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": schema}}},
    }
    with pytest.raises(InvalidArgument) as refused:
        answer_grammar(AnswerShape(calls="required"), functions_of([tool]), marks)
    assert refused.value.param == "tools[0].function.parameters"


def test_a_format_that_is_a_remark_forces_nothing():
    made = tokenizer()
    schema = {
        "properties": {"n": {"type": "integer", "format": "uint32"}, "format": {"type": "null"}},
        "const": {"n": 1, "format": "x"},
    }
    shape = AnswerShape(schema={"const": {"n": 1, "format": "x"}})
    assert accepts(
        made, answer_grammar(shape, (), marks_of(made, "json_tools")), '{"n": 1, "format": "x"}'
    )
    del schema["const"]
    answer_grammar(AnswerShape(schema=schema), (), marks_of(made, "json_tools"))


def test_a_choice_of_tools_that_cannot_be_is_refused():
    marks = marks_of(tokenizer(), "json_tools")
    with pytest.raises(InvalidArgument, match="the functions among tools are: look, go"):
        answer_grammar(AnswerShape(calls="required", names=("x",)), functions_of(tools()), marks)
    with pytest.raises(InvalidArgument, match="no function is among tools"):
        answer_grammar(AnswerShape(calls="required"), (), marks)


def test_a_grammar_is_needed_only_where_not_every_text_will_do():
    strict, loose = functions_of(tools()), functions_of(tools(strict=False))
    assert not AnswerShape().forces(strict)
    assert not AnswerShape(calls="allowed").forces(loose)
    assert AnswerShape(calls="allowed").forces(strict)
    assert AnswerShape(calls="required").forces(loose)
    assert AnswerShape(schema=JSON_OBJECT).forces(())
