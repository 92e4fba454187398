"""Random JSON schemas of which every answer is short, and their grammars."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from llguidance import LLMatcher

Schema = dict[str, Any]
NAMES = ("a", "id", "name", "city", "is_open", "unité", 'quo"te')
LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.sampled_from(["^[a-c]{1,4}$", "^(ab|cd)+x?$", r"^\d{2}-\d{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 6}
    ),
    st.tuples(st.integers(-900, 0), st.integers(0, 900)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.lists(
        st.sampled_from(["red", "green", "redder", "", "a b", 1, 12, True, None, "ü"]),
        min_size=1,
        max_size=4,
        unique_by=repr,
    ).map(lambda values: {"enum": values}),
    st.sampled_from(["yes", 5, None, "a longer constant text"]).map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def made(properties: dict[str, Schema], needed: int) -> Schema:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:needed],
            "additionalProperties": False,
        }

    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    return st.builds(made, properties, st.integers(0, 3))


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    ends = st.integers(0, 2).flatmap(lambda least: st.tuples(st.just(least), st.integers(least, 3)))
    return st.builds(
        lambda item, ends: {
            "type": "array",
            "items": item,
            "minItems": ends[0],
            "maxItems": ends[1],
        },
        inner,
        ends,
    )


SCHEMAS: st.SearchStrategy[Schema] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=5,
)


def grammar_of(schema: Schema) -> str:
    """With fixed separators and no free white space: more tokens are forced."""
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    )
