"""Ollama's dialect, inbound: bodies of /api/chat and /api/generate to requests, or an error that
names the field.

    honoured     model (`:latest` may stand behind it), messages, tools, prompt, system, raw,
                 stream (true where it is absent), format ("json" or a schema), think, logprobs,
                 top_logprobs; options: temperature, top_k, top_p, min_p, seed, num_predict, stop,
                 repeat_penalty, presence_penalty, frequency_penalty
    accepted     keep_alive: the node's memory ledger decides; options that say how Ollama uses its
                 machine (`_MACHINE`), and values that change nothing (`_NO_OPS`)
    left out     options.num_ctx and repeat_last_n: the header x-kakeya-warning says so
    refused      everything else: 400, as template, suffix, context and images are

A prompt that is not raw is a message of the user's. A request without messages or prompt only loads
its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kakeya.backends.request import ChatRequest, CompletionRequest, GenerationParams
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, integer, object_of, refuse, text
from kakeya.gateway.http.fields import (
    NoOps,
    flag_field,
    is_one_of,
    opaque,
    refuse_unknown,
    table,
)
from kakeya.gateway.ollama.reply import ChatLines, GenerateLines
from kakeya.gateway.openai.generation_params import MODEL, STREAM, TOP_LOGPROBS, read_stops
from kakeya.gateway.openai.messages import parse_messages
from kakeya.gateway.openai.requests import (
    read_params,
    read_template_args,
)
from kakeya.gateway.openai.tools import parse_tools
from kakeya.text.chat import Chat, Message

_LATEST = ":latest"
_LOGPROBS = flag_field("logprobs")
_SHARED = table(MODEL, STREAM, _LOGPROBS, TOP_LOGPROBS) | opaque(
    "format", "options", "keep_alive", "think"
)
OLLAMA_CHAT = _SHARED | opaque("messages", "tools")
OLLAMA_GENERATE = _SHARED | opaque("prompt", "system", "raw")
_SAMPLING = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty"}
    | {"frequency_penalty"}
)
_MACHINE = frozenset(
    {"numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap"}
    | {"use_mlock", "num_thread", "num_keep"}
)
_NOT_APPLIED = {
    "num_ctx": "the context is the model's whole one",
    "repeat_last_n": "repeat_penalty looks at all tokens",
}


def _is_anything(given: object) -> bool:
    return True


def _is_empty(given: object) -> bool:
    return given in ("", [])


_NO_OPS: NoOps = {
    **dict.fromkeys(_MACHINE, _is_anything),
    "mirostat": is_one_of(0),
    # They have no effect without mirostat, or in every engine but the first.
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "penalize_newline"), _is_anything),
    "tfs_z": is_one_of(1, 1.0),
    "typical_p": is_one_of(1, 1.0),
}
OLLAMA_NO_OPS: NoOps = dict.fromkeys(("template", "suffix", "context", "images"), _is_empty)
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}


def parse_chat(body: Mapping[str, object]) -> ChatLines:
    """Read a body of /api/chat. Raises InvalidArgument or Unsupported naming the field."""
    refuse_unknown(body, OLLAMA_CHAT, OLLAMA_NO_OPS)
    given, tools = body.get("messages"), parse_tools(body.get("tools"))
    params = _params(body)
    if given is None or given == []:
        return ChatLines(_load(params, body))
    messages, continues_last = _messages(given)
    return ChatLines(
        ChatRequest(
            params=params,
            chat=Chat(
                messages=messages,
                tools=tools,
                kwargs=_template_args(body.get("think")),
                continues_last=continues_last,
            ),
            answer_schema=_answer_schema(body.get("format")),
            answer_schema_at="format",
        )
    )


def parse_generate(body: Mapping[str, object]) -> GenerateLines:
    """Read a body of /api/generate. Raises as `parse_chat`."""
    refuse_unknown(body, OLLAMA_GENERATE, OLLAMA_NO_OPS)
    prompt = text(body.get("prompt") or "", "prompt")
    system = text(body.get("system") or "", "system")
    schema = _answer_schema(body.get("format"))
    params = _params(body)
    if not prompt:
        return GenerateLines(_load(params, body))
    if flag(body, "raw"):
        for name, is_given in (("system", bool(system)), ("format", schema is not None)):
            if is_given:
                raise InvalidArgument(f"raw is true, and {name} is given; leave it out", param=name)
        return GenerateLines(CompletionRequest(params=params, prompts=(prompt,)))
    first = ({"role": "system", "content": system},) if system else ()
    return GenerateLines(
        ChatRequest(
            params=params,
            chat=Chat(
                messages=(*first, {"role": "user", "content": prompt}),
                kwargs=_template_args(body.get("think")),
            ),
            answer_schema=schema,
            answer_schema_at="format",
        )
    )


def read_model(body: Mapping[str, object]) -> str:
    """Read the id of a model, without the tag that Ollama puts behind it. Raises
    InvalidArgument."""
    return MODEL.read(body).removesuffix(_LATEST)


def check_keep_alive(value: object) -> None:
    """Raise InvalidArgument for what is no time."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, str))):
        refuse("keep_alive", value, "a number of seconds or a text like 5m")


def _load(params: GenerationParams, body: Mapping[str, object]) -> CompletionRequest:
    """A request without prompts: its model is loaded, and that is all."""
    if body.get("keep_alive") in (0, "0", "0s"):
        raise Unsupported(
            "keep_alive=0 is not supported; a node unloads a model when it needs the memory",
            param="keep_alive",
        )
    return CompletionRequest(params=params, prompts=())


def _params(body: Mapping[str, object]) -> GenerationParams:
    check_keep_alive(body.get("keep_alive"))
    given = object_of(body, "options")
    options = {name: value for name, value in given.items() if value is not None}
    known = _SAMPLING | {"num_predict", "stop"} | _NOT_APPLIED.keys()
    refuse_unknown(options, known, _NO_OPS, "options.")
    asked = {name: value for name, value in options.items() if name in _SAMPLING}
    predict = integer(options, "num_predict", -2, 2**31 - 1, default=-1)
    top = TOP_LOGPROBS.read(body) or 0
    params = read_params(
        {**asked, "model": read_model(body)},
        max_tokens=predict if predict > 0 else None,
        top_logprobs=top if _LOGPROBS.read(body) else None,
    )
    return replace(
        params,
        stop=read_stops(options.get("stop"), "options.stop"),
        stream=body.get(STREAM.name) is None or STREAM.read(body),
        left_out=tuple(
            f"options.{name} is not applied: {why}"
            for name, why in _NOT_APPLIED.items()
            if name in options
        ),
    )


def _template_args(think: object) -> Mapping[str, object]:
    if think is None or isinstance(think, bool):
        return read_template_args({"thinking": think})
    if not isinstance(think, str) or think not in _EFFORTS:
        refuse("think", think, f"true, false, or one of {', '.join(_EFFORTS)}")
    return read_template_args({"thinking": True, "reasoning_effort": _EFFORTS[think]})


def _answer_schema(value: object) -> Mapping[str, object] | None:
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "object"}
    if not isinstance(value, dict):
        refuse("format", value, '"json" or a JSON Schema object')
    return value


def _messages(value: object) -> tuple[tuple[Message, ...], bool]:
    """Ollama's messages are OpenAI's with other names; an answer at the end is gone on with."""
    if not isinstance(value, list):
        refuse("messages", value, "a list of messages")
    read = [_message(entry, f"messages[{index}]") for index, entry in enumerate(value)]
    last = read[-1]
    if isinstance(last, dict) and last.get("role") == "assistant" and not last.get("tool_calls"):
        last["prefix"] = True
    return parse_messages(read)


def _message(entry: object, at: str) -> object:
    if not isinstance(entry, dict):
        return entry
    if entry.get("images"):
        raise Unsupported(
            f"{at}.images is not supported; this model takes text", param=f"{at}.images"
        )
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    content = {"content": entry.get("content") or ""}
    kept = {names.get(name, name): one for name, one in entry.items() if name != "images"}
    return kept | content
