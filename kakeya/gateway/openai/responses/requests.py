"""A Responses request: a body to a chat, or an error that names the parameter.

honoured     model, input, instructions, previous_response_id, store, tools, tool_choice,
             parallel_tool_calls, text.format, reasoning.effort, max_output_tokens, temperature,
             top_p, stream, background, include of "message.output_text.logprobs" with
             top_logprobs, and what `read_params` reads in all of OpenAI's dialect
repeated     metadata, truncation, user and what else OpenAI's response repeats
without use  include of all else: of what is told here, all is; reasoning.summary: thoughts come
             whole; client_metadata and others of `RESPONSE_NO_OPS`
refused      everything else: 400, code unsupported_parameter
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from kakeya.backends.request import ChatRequest
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, object_of, refuse, shown, text
from kakeya.gateway.http.fields import (
    NoOps,
    flag_field,
    integer_field,
    is_object,
    is_one_of,
    opaque,
    refuse_unknown,
    table,
)
from kakeya.gateway.openai.generation_params import (
    EFFORTS,
    GENERATION_PARAMS,
    MOST_INT,
    TEMPLATE_PARAMS,
    TOP_LOGPROBS,
)
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.requests import (
    read_params,
    read_template_args,
)
from kakeya.gateway.openai.responses.items import parse_items, read_input
from kakeya.gateway.openai.responses.reply import ResponseReply, ResponseRequest
from kakeya.gateway.openai.responses.store import ResponseStore
from kakeya.gateway.openai.responses.tools import read_choice, read_text_form, read_tools
from kakeya.text.chat import Chat

_MAX_TOKENS = integer_field("max_output_tokens", 1, MOST_INT)
_BACKGROUND = flag_field("background")
RESPONSE = (
    GENERATION_PARAMS
    | TEMPLATE_PARAMS
    | table(_MAX_TOKENS, TOP_LOGPROBS, _BACKGROUND)
    | opaque("input", "instructions", "previous_response_id", "store", "include", "metadata")
    | opaque("truncation", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning")
)
RESPONSE_NO_OPS: NoOps = {
    "client_metadata": is_object,
    # Of hosted tools, which there are none of.
    "max_tool_calls": lambda given: type(given) is int and given > 0,
    "stream_options": is_object,
    "context_management": is_one_of([]),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {"file_search_call.results", "web_search_call.results", "web_search_call.action.sources"}
    | {"message.input_image.image_url", "computer_call_output.output.image_url"}
    | {"code_interpreter_call.outputs", "reasoning.encrypted_content", _LOGPROBS}
)
_SUMMARIES = ("auto", "concise", "detailed", "none")


def parse_response(
    body: Mapping[str, object],
    store: ResponseStore,
    client: str = "",
    *,
    earlier: Sequence[object] | None = None,
) -> ResponseReply:
    """Read a request for a response, of a client as the store knows it. `earlier` are the items of
    `previous_response_id`, None = those of the store. Raises InvalidArgument or Unsupported naming
    the parameter."""
    body = _sendable(body)
    is_background = _BACKGROUND.read(body)
    if is_background and body.get("store") is False:
        raise Unsupported(
            "store=false is not supported with background=true: the response is kept until it is "
            "asked for; leave one of them out",
            param="store",
        )
    refuse_unknown(body, RESPONSE, RESPONSE_NO_OPS)
    warnings: list[str] = []
    top_logprobs = _top_logprobs(body)
    previous_id = _word(body, "previous_response_id")
    if earlier is None:
        earlier = store.items(previous_id, client) if previous_id is not None else []
    items = [*earlier, *read_input(body.get("input"))]
    instructions = _word(body, "instructions")
    messages = parse_items(items, instructions=instructions or "", warn=warnings.append)
    tools = read_tools(body.get("tools"), warn=warnings.append)
    max_tokens = _MAX_TOKENS.read(body)
    if _truncation(body) == "auto":
        warnings.append("truncation is disabled: input that is too long for the model is refused")
    asked = ChatRequest(
        params=replace(
            read_params(body, max_tokens=max_tokens, top_logprobs=top_logprobs),
            left_out=tuple(warnings),
        ),
        chat=Chat(messages=messages, tools=tools.tools, kwargs=_template_args(body)),
        tool_choice=read_choice(body, tools),
        answer_schema=read_text_form(body.get("text")),
        answer_schema_at="text.format.schema",
    )
    # One that is made in the background is kept by its job.
    is_kept = (body.get("store") is None or flag(body, "store")) and store.is_on
    is_kept = is_kept and not is_background
    echo = {
        "background": is_background,
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": object_of(body, "metadata"),
        "parallel_tool_calls": asked.tool_choice.is_parallel,
        "previous_response_id": previous_id,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": body.get("service_tier") or "default",
        "store": is_kept or is_background,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools.given,
        "top_logprobs": top_logprobs or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
    return ResponseReply(
        ResponseRequest(
            chat=asked,
            echo=echo,
            names=tools.names,
            body={**body, "input": items},
            keep=partial(store.keep, asked=compact(items), client=client) if is_kept else None,
        )
    )


def _sendable(body: Mapping[str, object]) -> Mapping[str, object]:
    """The body in characters that UTF-8 can carry, as `text` makes them: a response repeats it."""
    written = json.dumps(body, ensure_ascii=False)
    sendable = text(written, "body")
    if sendable == written:
        return body
    read: dict[str, object] = json.loads(sendable)
    return read


def _template_args(body: Mapping[str, object]) -> dict[str, object]:
    given = body.get("reasoning")
    if given is not None and not isinstance(given, dict):
        refuse("reasoning", given, 'an object like {"effort": "medium"}')
    reasoning = given or {}
    summaries = {name: is_one_of(*_SUMMARIES) for name in ("summary", "generate_summary")}
    refuse_unknown(reasoning, frozenset({"effort"}), summaries, "reasoning.")
    effort = reasoning.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        refuse("reasoning.effort", effort, f"one of {', '.join(EFFORTS)}")
    return read_template_args({**body, "reasoning_effort": effort})


def _top_logprobs(body: Mapping[str, object]) -> int | None:
    """Read `include` and `top_logprobs`; None = no logprobs are asked for."""
    value = body.get("include")
    if value is not None and not isinstance(value, list):
        refuse("include", value, "a list of names")
    included = value or []
    for index, name in enumerate(included):
        if not isinstance(name, str) or name not in _INCLUDABLE:
            at = f"include[{index}]"
            raise Unsupported(f"{at}={shown(name)} is not supported; leave it out", param=at)
    top = TOP_LOGPROBS.read(body) or 0
    if top and _LOGPROBS not in included:
        raise InvalidArgument(
            f'top_logprobs={top} needs include=["{_LOGPROBS}"]', param=TOP_LOGPROBS.name
        )
    return top if _LOGPROBS in included else None


def _truncation(body: Mapping[str, object]) -> str:
    value = body.get("truncation")
    if value not in (None, "auto", "disabled"):
        refuse("truncation", value, '"auto" or "disabled"')
    return str(value or "disabled")


def _word(body: Mapping[str, object], name: str) -> str | None:
    value = body.get(name)
    return None if value is None else text(value, name)
