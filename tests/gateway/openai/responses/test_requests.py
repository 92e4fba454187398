"""Bodies of any shape: read, or refused by a name; never a fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import ResponseStore
from tests.gateway.openai.test_reply import answer

WORDS = (
    *("type", "effort", "role", "content", "text", "name", "tools", "format", "schema", "call_id"),
    *("output", "arguments", "summary", "namespace", "mode", "description", "parameters"),
    *("message", "function", "function_call", "function_call_output", "reasoning", "user"),
    *("assistant", "system", "input_text", "output_text", "web_search", "mcp", "custom"),
    *("json_schema", "json_object", "allowed_tools", "auto", "required", "none", "low", "\ud800"),
)
WORD = st.sampled_from(WORDS)
LEAF = WORD | st.none() | st.booleans() | st.integers(-2, 3) | st.floats(0, 2)
ANY = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({"role": WORD, "content": WORD})
ITEM = st.fixed_dictionaries(
    {"type": WORD},
    optional=dict.fromkeys(WORDS[2:17], ANY),
)
OTHERS = (
    *("instructions", "text", "reasoning", "include", "metadata", "truncation", "store", "other"),
    *("max_output_tokens", "parallel_tool_calls", "previous_response_id"),
)
OPTIONAL = {
    "tools": st.lists(ITEM, max_size=3) | ANY,
    "tool_choice": ITEM | ANY,
    **dict.fromkeys(OTHERS, ANY),
}
BODY = st.fixed_dictionaries(
    {"model": st.just("m"), "input": WORD | st.lists(MESSAGE | ITEM, max_size=4) | ANY},
    optional=OPTIONAL,
)


@given(BODY, st.booleans())
def test_a_body_is_read_or_refused_by_the_name_of_a_field(body, is_on):
    store = ResponseStore(most_bytes=10**6 * is_on, mono=lambda: 0.0)
    refused: InvalidArgument | None = None
    try:
        reply = parse_response(body, store)
    except InvalidArgument as error:
        refused = error
    if refused:
        assert refused.param
        return
    whole = reply.whole([answer()])
    assert compact(whole)
    assert whole["store"] == bool(is_on and body.get("store") in (None, True))


def test_half_a_character_is_repeated_as_one_that_can_be_sent():
    body = {"model": "m", "input": "\ud800", "metadata": {"a": "\ud800"}}
    reply = parse_response(body, ResponseStore(most_bytes=0, mono=lambda: 0.0))
    assert reply.asked.chat.messages[0]["content"] == "\ufffd"
    assert '"a":"\ufffd"'.encode() in reply.opening(())
