"""Law: what a grammar in GBNF accepts, the grammar that it was made of accepts."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kakeya.backends.llama.gbnf import gbnf
from kakeya.backends.llama.json_gbnf import SchemaRules, is_followed
from kakeya.core.errors import Unsupported
from kakeya.text.grammar import AnswerShape, answer_grammar
from kakeya.text.tools.calls import functions_of
from tests.text.test_grammar import FAMILIES, THINK, accepts, marks_of, tokenizer, tools

_TOKEN = re.compile(
    r'\s*(?:("(?:[^"\\]|\\.)*")|(\[(?:[^\]\\]|\\.)*\])|<\[(\d+)\]>|([a-z][\w-]*)|([()|*?])|(\{\d+,?\d*\}))'
)
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|.)", re.DOTALL)


def unescaped(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        said = found[1]
        return (
            chr(int(said[1:], 16))
            if said[0] == "x" and len(said) == 3
            else {"n": "\n"}.get(said, said)
        )

    return _ESCAPE.sub(plain, text)


class Derivation:
    """Random texts of a grammar in GBNF; ends sooner the longer it is."""

    def __init__(self, grammar: str, names: dict[int, str], seed: int) -> None:
        self._names = names
        self._rng = random.Random(seed)
        self._rules = {}
        for line in grammar.split("\n"):
            name, _, body = line.partition(" ::= ")
            assert name not in self._rules
            tokens = self._tokens(body)
            self._rules[name] = self._choice(tokens)
            assert not tokens
        self._depth = 0

    def text(self) -> str:
        return self._write(self._rules["root"])

    def _tokens(self, body: str) -> list[tuple[str, str]]:
        found, at = [], 0
        while body[at:].strip():
            match = _TOKEN.match(body, at)
            assert match, body[at:]
            at = match.end()
            kinds = ("quote", "letters", "token", "name", "sign", "times")
            found += [
                (kind, text) for kind, text in zip(kinds, match.groups(), strict=True) if text
            ]
        return found[::-1]

    def _choice(self, tokens: list) -> Any:
        ways = [[]]
        while tokens and tokens[-1] != ("sign", ")"):
            kind, text = tokens.pop()
            if (kind, text) == ("sign", "|"):
                ways.append([])
                continue
            if (kind, text) == ("sign", "("):
                part = self._choice(tokens)
                assert tokens.pop() == ("sign", ")")
            else:
                part = (kind, text)
            if tokens and (
                tokens[-1][0] == "times" or tokens[-1] in (("sign", "*"), ("sign", "?"))
            ):
                part = ("repeat", part, tokens.pop()[1])
            ways[-1].append(part)
        return ("choice", ways)

    def _write(self, part: Any) -> str:
        kind, *rest = part
        match kind:
            case "quote":
                return unescaped(rest[0][1:-1])
            case "token":
                return self._names[int(rest[0])]
            case "letters":
                return self._letter(rest[0][1:-1])
            case "repeat":
                least, most = {"*": (0, 9), "?": (0, 1)}.get(rest[1]) or self._bounds(rest[1])
                count = self._rng.randint(least, max(least, min(most, least + 3)))
                return "".join(
                    self._write(rest[0]) for _ in range(least if self._depth > 9 else count)
                )
            case "choice":
                return "".join(map(self._write, self._rng.choice(rest[0])))
        self._depth += 1
        try:
            body = self._rules[rest[0]]
            if self._depth > 40:  # the shortest way out
                ways = sorted(body[1], key=lambda way: len(str(way)))
                body = ("choice", ways[:1])
            return self._write(body)
        finally:
            self._depth -= 1

    def _bounds(self, times: str) -> tuple[int, int]:
        least, comma, most = times[1:-1].partition(",")
        return int(least), int(most or 9) if comma else int(least)

    def _letter(self, inner: str) -> str:
        if inner.startswith("^"):
            pattern = re.compile(f"[{inner}]")
            found = [one for one in map(chr, [*range(10, 127), 233]) if pattern.fullmatch(one)]
        else:
            pattern = re.compile(f"[{inner}]")
            found = [one for one in map(chr, range(127)) if pattern.fullmatch(one)]
        return self._rng.choice(found)


def derived(made: Any, grammar: str, seed: int) -> str:
    added = made.get_added_tokens_decoder().items()
    return Derivation(gbnf(grammar), {one: token.content for one, token in added}, seed).text()


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    calls=st.sampled_from(["required", "allowed"]),
    has_tokens=st.booleans(),
    is_parallel=st.booleans(),
    thinking=st.sampled_from([None, False, True]),
    seed=st.integers(0, 2**32),
)
def test_forced_calls(family, calls, has_tokens, is_parallel, thinking, seed) -> None:
    form = FAMILIES[family]
    given_marks = [one for one in (form.start, form.end, *form.inner_marks) if one]
    made = tokenizer(*(given_marks if has_tokens else ()), THINK.start, THINK.end)
    more = {} if thinking is None else {"thinking": THINK, "is_thinking": thinking}
    shape = AnswerShape(calls=calls if has_tokens else "required", is_parallel=is_parallel)
    grammar = answer_grammar(shape, functions_of(tools()), marks_of(made, family, **more))
    text = derived(made, grammar, seed)
    assert accepts(made, grammar, text), text


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"a": {}, "b": {"type": "null"}, "c": {"const": [1, {"x": "é\n"}]}},
    },
    {
        "type": "object",
        "properties": {one: {"type": "boolean"} for one in "abcd"},
        "required": ["b", "d"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "z"]},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}},
    {"type": ["string", "null"], "maxLength": 2},
    {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"n": {"type": "number"}}}]},
    {"type": "integer", "minimum": -120, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": 7, "maximum": 1234},
    {"type": "integer", "minimum": 0},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "maximum": -3},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_json_of_a_schema(schema: dict[str, Any]) -> None:
    made = tokenizer()
    rules = SchemaRules()
    name = rules.add(schema)
    written = "\n".join(
        [f"root ::= {name}", *(f"{one} ::= {body}" for one, body in rules.rules.items())]
    )
    grammar = answer_grammar(AnswerShape(schema=schema), (), marks_of(made, next(iter(FAMILIES))))
    for seed in range(40):
        text = Derivation(written, {}, seed).text()
        Draft202012Validator(schema).validate(json.loads(text))
        assert accepts(made, grammar, text), text


@given(low=st.integers(-2000, 2000), more=st.integers(0, 3000), probe=st.integers(-6000, 6000))
def test_bounds_of_whole_numbers(low: int, more: int, probe: int) -> None:
    """As a regular expression, which these rules are: exactly the numbers between the bounds."""
    rules = SchemaRules()
    schema = {"type": "integer", "minimum": low, "maximum": low + more}
    body = rules.rules[rules.add(schema)]
    pattern = re.compile(body.replace('"', "").replace(" ", ""))
    assert bool(pattern.fullmatch(str(probe))) == (low <= probe <= low + more)


@pytest.mark.parametrize(
    ("schema", "word", "is_llama"),
    [
        ({"type": "string", "pattern": "^a$"}, "pattern", True),
        ({"type": "string", "format": "date"}, "format", True),
        ({"type": "string", "format": "email"}, "format", False),
        ({"type": "integer", "multipleOf": 3}, "multipleOf", False),
        ({"type": "number", "minimum": 0.5}, "minimum", False),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties", False),
        (
            {"allOf": [{"type": "object", "properties": {"format": {"type": "string"}}}]},
            "allOf",
            True,
        ),
        ({"type": "string", "maxLength": 5000}, "maxLength", True),
        ({"$ref": "#/$defs/none"}, "none", True),
    ],
)
def test_what_cannot_be_forced_is_named(schema: dict[str, Any], word: str, is_llama: bool) -> None:
    with pytest.raises(Unsupported, match=word):
        SchemaRules().add(schema)
    assert is_followed(schema) is is_llama


@pytest.mark.parametrize(
    "grammar",
    [
        "start: a",
        "%llguidance {}\nstart: /[a-z]+/",
        '%llguidance {}\nstart: "a"{2}',
        "%llguidance {}\nx",
    ],
)
def test_any_other_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(Unsupported, match="cannot be forced"):
        gbnf(grammar)
