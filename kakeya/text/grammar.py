"""Grammars that force the form of an answer: JSON by a schema, and calls of tools.

The grammar is text, for llguidance: made and checked here, without a vocabulary, and matched where
tokens are selected. Law: what a grammar accepts, `AnswerReader` reads as what was asked for.

    answer    thoughts? then one of
      schema    JSON that validates
      required  calls, or one
      strict    free text, then perhaps calls: arguments of strict tools validate, those of others
                are any object

JSON has the separators ", " and ": " and no other white space: a model cannot write blanks without
end, and more of its tokens are forced. A mark that is a token of the vocabulary is named by its id;
free text holds no mark, in no spelling.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llguidance import LLMatcher

from kakeya.core.errors import InvalidArgument
from kakeya.text.tools.calls import INDEX, FunctionTool, ToolFamily
from kakeya.text.tools.thinking import ThinkingMarks

JSON_OBJECT: Mapping[str, object] = {"type": "object"}
"""The schema of any JSON object."""
MAX_SCHEMA_CHARS = 128 * 1024
"""Longest schema, as JSON text; the slowest that was found takes half a second to check."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that are enforced. By JSON Schema another is a remark, which any text satisfies."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose content is no schema."""
_ANY = "/(?s:.*)/"
_ONLY_JSON = re.compile(
    r"%llguidance \{\}\nstart: (?:thoughts\? )?answer\nanswer: %json (.*)(?:\n|\Z)"
)
_KEYWORD = re.compile(r"Unimplemented keys: \[(.*?)\]|^(\w+) constraints are not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What an answer must be; by default anything."""

    schema: Mapping[str, object] | None = None
    """The JSON schema of its text, if any; `JSON_OBJECT` for any object."""
    schema_at: str = "response_format.json_schema.schema"
    """The place of the schema in the request, as errors name it."""
    calls: Literal["none", "allowed", "required"] = "none"
    names: tuple[str, ...] = ()
    """The tools that may be called, () = any."""
    is_parallel: bool = True
    """Whether there may be several calls."""

    def forces(self, functions: Iterable[FunctionTool]) -> bool:
        """Whether a grammar is needed: not every text is such an answer."""
        if self.schema is not None or self.calls == "required":
            return True
        is_narrowed = bool(self.names) or any(one.is_strict for one in functions)
        return self.calls == "allowed" and is_narrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMarks:
    """What a grammar needs to know of a model, and of where its answer begins."""

    family: ToolFamily
    tokens: Mapping[str, int]
    """The ids of the tokens that are more than a piece of text, by their text."""
    thinking: ThinkingMarks | None = None
    """The marks of thoughts, where the answer may begin with these."""
    is_thinking: bool = False
    """Whether the prompt ends inside thoughts."""


def answer_grammar(shape: AnswerShape, functions: Sequence[FunctionTool], marks: ModelMarks) -> str:
    """Write the grammar of an answer, checked. Blocks for up to half a second.

    Raises InvalidArgument that names the keyword and the parameter that cannot be enforced.
    """
    callable_ = _callable(shape, functions)
    rules = ["%llguidance {}", f"start: {_thoughts_rule(marks)}answer"]
    forms = []
    if shape.schema is not None:
        forms.append(_json(shape.schema, shape.schema_at))
    if callable_:
        is_free = shape.calls == "allowed" and shape.schema is None
        forms.append("FREE calls?" if is_free else "calls")
        rules += _call_rules(shape, callable_, marks)
        if is_free:
            rules.append(f"FREE: {_free_of(marks.family.start)}")
    rules.append(f"answer: {' | '.join(forms)}")
    if marks.thinking is not None:
        start, end = (_literal(one, marks) for one in (marks.thinking.start, marks.thinking.end))
        opening = "" if marks.is_thinking else start
        rules.append(f"thoughts: {opening} THOUGHTS {end} /\\n{{0,2}}/")
        rules.append(f"THOUGHTS: {_free_of(marks.thinking.end)}")
    grammar = "\n".join(rules)
    fault = LLMatcher.validate_grammar(grammar)
    if fault:
        raise InvalidArgument(
            f"the answer that is asked for has no grammar: {fault.splitlines()[0]}",
            param="tools" if callable_ else shape.schema_at,
        )
    return grammar


def schema_of(grammar: str) -> dict[str, object] | None:
    """The JSON schema of the answers that a grammar of `answer_grammar` accepts, where these are
    nothing but JSON; thoughts before it are left out where they need not be. None = it is more."""
    found = _ONLY_JSON.match(grammar)
    schema: dict[str, object] | None = json.loads(found[1]) if found else None
    if schema is not None:
        schema.pop("x-guidance", None)
    return schema


def _callable(shape: AnswerShape, functions: Sequence[FunctionTool]) -> list[FunctionTool]:
    if shape.calls == "none":
        return []
    found = [one for one in functions if not shape.names or one.name in shape.names]
    if not found and shape.names:
        named = ", ".join(one.name for one in functions) or "none"
        raise InvalidArgument(
            f"tool_choice names {shape.names[0]!r}; the functions among tools are: {named}",
            param="tool_choice",
        )
    if not found and shape.calls == "required":
        raise InvalidArgument(
            "tool_choice asks for a call, and no function is among tools", param="tool_choice"
        )
    return found


def _thoughts_rule(marks: ModelMarks) -> str:
    if marks.thinking is None:
        return ""
    return "thoughts " if marks.is_thinking else "thoughts? "


def _call_rules(
    shape: AnswerShape, functions: Sequence[FunctionTool], marks: ModelMarks
) -> Iterator[str]:
    """The rules of `calls`, in the form of a family."""
    family, form = marks.family, marks.family.form
    start = _literal(family.start + form.opening, marks)
    end = _literal(form.closing + family.end, marks)
    joint = _literal("\n" if form.joint is None else form.joint, marks)
    if not shape.is_parallel:
        yield f"calls: {start} call {end}"
    elif form.joint is None:
        yield f"calls: one ({joint} one)*\none: {start} call {end}"
    else:
        yield f"calls: {start} call ({joint} call)* {end}"
    yield f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"
    for index, function in enumerate(functions):
        name = json.dumps(function.name)[1:-1]
        before = _literal(f"{form.before}{name}{form.between}", marks)
        is_checked = shape.calls == "required" or function.is_strict
        schema = function.parameters if is_checked else JSON_OBJECT
        arguments = _json({"type": "object", **schema}, function.at)
        yield f"call_{index}: {before} {arguments} {_literal(form.after, marks)}"


def _literal(text: str, marks: ModelMarks) -> str:
    """A text as a grammar writes it: its tokens by their ids, the rest quoted."""
    tokens = sorted((one for one in marks.tokens if one in text), key=len, reverse=True)
    either = "|".join(map(re.escape, [*tokens, INDEX]))
    return " ".join(
        f"<[{marks.tokens[part]}]>"
        if part in marks.tokens
        else "/[0-9]{1,3}/"
        if part == INDEX
        else json.dumps(part, ensure_ascii=False)
        for part in re.split(f"({either})", text)
        if part
    )


def _free_of(mark: str) -> str:
    """The lexeme of any text without a mark."""
    spelled = re.escape(mark).replace("/", r"\/")
    return f"{_ANY} & ~/(?s:.*){spelled}(?s:.*)/"


def _json(schema: Mapping[str, object], at: str) -> str:
    """The rule of JSON that validates. Raises InvalidArgument naming what cannot be enforced."""
    text = json.dumps(_without_remarks({**schema, "x-guidance": _SPACING}))
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidArgument(
            f"{at} has {len(text)} characters; a schema may have {MAX_SCHEMA_CHARS}", param=at
        )
    fault = _fault_of(text)
    if fault:
        raise InvalidArgument(f"{at} {fault}", param=at)
    return f"%json {text}"


@functools.lru_cache(maxsize=256)
def _fault_of(schema: str) -> str:
    """What of a schema cannot be enforced, in words; "" = all can."""
    said: str = LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: %json {schema}")
    if not said:
        return ""
    # The compiler says the place, its reason, and then the grammar with a pointer into it.
    reason = said.partition("JSON schema: ")[2].partition("\n   1 |")[0].strip() or said
    found = _KEYWORD.search(reason)
    if found is None:
        return f"cannot be enforced: {' '.join(reason.split())[:300]}"
    keyword = found[1] or f'"{found[2]}"'
    return f"uses {keyword}, which cannot be enforced; leave it out"


def _without_remarks(schema: object) -> object:
    """A schema without the formats that are remarks only."""
    match schema:
        case Mapping():
            return {
                name: value if name in _VALUES else _without_remarks(value)
                for name, value in schema.items()
                if name != "format" or not isinstance(value, str) or value in _FORMATS
            }
        case list():
            return [_without_remarks(one) for one in schema]
        case _:
            return schema
