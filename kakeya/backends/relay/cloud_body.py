"""A request as the body of OpenAI's API. Pure.

What its caller gave is sent, and the service refuses what it does not know: `top_k`, `min_p` and
`repetition_penalty` are known to most servers and not to OpenAI's own. Not sent: thoughts of
earlier answers, which services refuse, and what only this node's engines follow (`not_sent`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from kakeya.backends.request import ChatRequest, CompletionRequest, Request, ToolChoice
from kakeya.text.chat import Message

_EFFORT = "reasoning_effort"
_CLAUDE = "claude"
"""The cloud that has the short names claude:MODEL for its models."""


def model_of(name: str, model_id: str) -> str:
    """The name that the cloud NAME itself gives a model; "" = the model is not of this cloud."""
    for front in (f"cloud:{name}/", *([f"{_CLAUDE}:"] if name == _CLAUDE else [])):
        if model_id.startswith(front):
            return model_id.removeprefix(front)
    return ""


def whole_name(model_id: str) -> str:
    """The name of a cloud's model without the short form."""
    model = model_id.removeprefix(f"{_CLAUDE}:")
    return model_id if model == model_id else f"cloud:{_CLAUDE}/{model}"


def chat_body(asked: ChatRequest, model: str, limit: str) -> dict[str, object]:
    """The body of a streamed chat; `limit` is what the service calls the most tokens."""
    messages = [_message(one) for one in asked.chat.messages]
    if asked.chat.continues_last:
        messages[-1]["prefix"] = True
    body = {**_shared(asked, model, limit), "messages": messages}
    if asked.chat.tools:
        body["tools"] = [dict(tool) for tool in asked.chat.tools]
        body |= _choice(asked.tool_choice)
    if asked.answer_schema is not None:
        body["response_format"] = _format(asked.answer_schema)
    if _EFFORT in asked.chat.kwargs:
        body[_EFFORT] = asked.chat.kwargs[_EFFORT]
    return body


def completion_body(asked: CompletionRequest, model: str) -> dict[str, object]:
    """The body of a streamed completion of the one prompt."""
    (prompt,) = asked.prompts
    shown = prompt if isinstance(prompt, str) else list(prompt)
    return {**_shared(asked, model, "max_tokens"), "prompt": shown}


def not_sent(asked: Request) -> list[str]:
    """The names of the parameters that the body leaves out."""
    names = ["draft_policy"] if asked.params.draft_policy else []
    if isinstance(asked, ChatRequest) and asked.chat.kwargs.keys() - {_EFFORT}:
        names.append("chat_template_kwargs")
    return names


def _shared(asked: Request, model: str, limit: str) -> dict[str, object]:
    params, sampling = asked.params, asdict(asked.params.sampling)
    if params.sampling.logit_bias is not None:
        sampling["logit_bias"] = {str(token): bias for token, bias in params.sampling.logit_bias}
    given = {
        **sampling,
        limit: params.max_tokens,
        "stop": list(params.stop) or None,
        "user": params.user or None,
    }
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in given.items() if value is not None},
    }


def _message(message: Message) -> dict[str, object]:
    sent = {name: value for name, value in message.items() if name != "reasoning_content"}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        sent["tool_calls"] = [_call(call) for call in calls]
        sent["content"] = sent["content"] or None
    return sent


def _call(call: Mapping[str, object]) -> dict[str, object]:
    """A call with its arguments as text, as the API has them."""
    function = call["function"]
    assert isinstance(function, Mapping)
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _choice(choice: ToolChoice) -> dict[str, object]:
    said: dict[str, object] = {"tool_choice": choice.mode}
    if choice.names:
        tools = [{"type": "function", "function": {"name": name}} for name in choice.names]
        if len(tools) == 1 and choice.mode == "required":
            said["tool_choice"] = tools[0]
        else:
            allowed = {"mode": choice.mode, "tools": tools}
            said["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    if not choice.is_parallel:
        said["parallel_tool_calls"] = False
    return said


def _format(schema: Mapping[str, object]) -> dict[str, object]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema)}}
