"""The OpenAI dialect, inbound: a request body to a request, or an error that names the parameter.
Nothing is ignored in silence.

    honoured      model, messages | prompt (or a list of prompts), max_tokens,
                  max_completion_tokens, temperature, top_p, seed, stop, n, stream, stream_options,
                  presence_penalty, frequency_penalty, logit_bias, logprobs, top_logprobs;
                  of chats tools, tool_choice, parallel_tool_calls, response_format,
                  reasoning_effort
    defaults      of sampling: the model's own, from its generation_config.json
    extensions    top_k; min_p; repetition_penalty, repeat_penalty; draft_policy ("auto", "off",
                  "ngram", "peer", MODEL@HOST:PORT);
                  deadline_s: how long the caller waits for the first token, loading included;
                  enable_thinking, thinking, chat_template_kwargs: variables of the chat template;
                  conversation_id, prompt_cache_key, prompt_cache_retention: see `cache_params`;
                  priority, service_tier, user, safety_identifier: see `share_params`
    accepted      a parameter that is absent, null, or has a value that changes nothing (`_NO_OPS`);
                  values that mean "off": seed, top_k and max_tokens -1, top_p 0, an empty stop
    refused       everything else: 400, code unsupported_parameter

Messages are read by `messages`, tools and schemas by `tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import UnknownParameters, flag, integer, number, refuse, shown, text
from kakeya.gateway.openai.cache_params import CACHE_PARAMS, STABLE_TOKENS, read_cache_use
from kakeya.gateway.openai.messages import parse_messages
from kakeya.gateway.openai.reply import ChatReply, CompletionReply
from kakeya.gateway.openai.share_params import SHARE_PARAMS, read_priority, read_user
from kakeya.gateway.openai.tools import parse_tools, read_answer_schema, read_tool_choice
from kakeya.gateway.request import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    SamplingWish,
)
from kakeya.generation.request import MOST_BIAS, MOST_PENALTY, MOST_TOP_LOGPROBS, Sampling
from kakeya.text.chat import Chat

MAX_STOPS = 32
MAX_STOP_CHARS = 1000
SEED_BITS = 64
MAX_DEADLINE_S = 86400.0
MAX_BIASES = 4096
MAX_ROWS = 64
"""Answers of one request: prompts times n."""
COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions when `max_tokens` is absent; a chat goes on to the end of the context."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def is_one_of(*values: object) -> Callable[[object], bool]:
    """Whether a value is one of these; true is not 1."""
    return lambda given: any(type(given) is type(v) and given == v for v in values)


def _is_number(value: float) -> Callable[[object], bool]:
    return lambda given: type(given) in (int, float) and given == value


def is_object(given: object) -> bool:
    """Whether a value is a JSON object."""
    return isinstance(given, dict)


_NO_OPS: Mapping[str, Callable[[object], bool]] = {
    "best_of": is_one_of(1),
    "echo": is_one_of(False),
    "suffix": is_one_of(""),
    "store": is_one_of(False),
    # A label of the request: never changes the output.
    "metadata": is_object,
    "functions": is_one_of([]),
    "modalities": is_one_of(["text"]),
    "verbosity": is_one_of("medium"),
    "function_call": is_one_of("none", "auto"),
    # The values at which llama.cpp's and vLLM's parameters do nothing.
    "typical_p": _is_number(1),
    "tfs_z": _is_number(1),
    "mirostat": _is_number(0),
    "ignore_eos": is_one_of(False),
    "cache_prompt": is_one_of(True),
    "add_generation_prompt": is_one_of(True),
    "skip_special_tokens": is_one_of(True),
}
GENERATION_PARAMS = frozenset(
    {"model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "logit_bias"}
    | {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty"}
    | {"draft_policy", "deadline_s"}
    | CACHE_PARAMS
    | SHARE_PARAMS
)
"""Parameters of all routes that generate; `read_params` reads them."""
TEMPLATE_PARAMS = frozenset({"enable_thinking", "thinking", "chat_template_kwargs"})
_SHARED = GENERATION_PARAMS | {"max_tokens", "n", "logprobs", "stream_options"}
_OF_CHATS = frozenset(
    {"messages", "max_completion_tokens", "top_logprobs", "response_format"}
    | {"tools", "tool_choice", "parallel_tool_calls"}
    | {"reasoning_effort"}
    | TEMPLATE_PARAMS
)


def parse_chat(body: Mapping[str, object]) -> ChatReply:
    """Read a chat request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, _SHARED | _OF_CHATS, _NO_OPS)
    messages, continues_last = parse_messages(body.get("messages"))
    tools = parse_tools(body.get("tools"))
    asked = ChatRequest(
        params=read_params(
            body, max_tokens=_max_tokens(body, None), top_logprobs=_top_logprobs(body)
        ),
        chat=Chat(
            messages=messages,
            tools=tools,
            kwargs=read_template_args(body),
            continues_last=continues_last,
        ),
        tool_choice=read_tool_choice(body, tools),
        answer_schema=read_answer_schema(body.get("response_format")),
    )
    return ChatReply(asked, include_usage=_include_usage(body.get("stream_options")))


def parse_completion(body: Mapping[str, object]) -> CompletionReply:
    """Read a completion request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, _SHARED | {"prompt", STABLE_TOKENS}, _NO_OPS)
    is_off = body.get("logprobs") is False
    top = None if is_off else integer(body, "logprobs", 0, MOST_TOP_LOGPROBS, default=None)
    asked = CompletionRequest(
        params=read_params(
            body, max_tokens=_max_tokens(body, COMPLETION_MAX_TOKENS), top_logprobs=top
        ),
        prompts=parse_prompts(body.get("prompt")),
    )
    shortest = min(0 if isinstance(one, str) else len(one) for one in asked.prompts)
    if asked.params.cache.stable_tokens > shortest:
        raise InvalidArgument(
            f"stable_tokens is {asked.params.cache.stable_tokens}; it counts the token ids that a "
            "prompt begins with, and each prompt must be a list of at least so many",
            param=STABLE_TOKENS,
        )
    rows = asked.params.rows * len(asked.prompts)
    if rows > MAX_ROWS:
        raise InvalidArgument(
            f"{len(asked.prompts)} prompts with n={asked.params.rows} are {rows} answers; one "
            f"request may ask for {MAX_ROWS}",
            param="prompt",
        )
    return CompletionReply(asked, include_usage=_include_usage(body.get("stream_options")))


def read_template_args(body: Mapping[str, object]) -> dict[str, object]:
    """Read the variables of the chat template. Raises InvalidArgument naming the parameter.

    What a template calls thinking has two names; both are set.
    """
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        refuse("chat_template_kwargs", given, "an object")
    args: dict[str, object] = dict(given or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            refuse("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
        args["reasoning_effort"] = effort
        if effort == "none":
            args |= {"enable_thinking": False, "thinking": False}
    for name in ("thinking", "enable_thinking"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, dict) and value.get("type") in ("enabled", "disabled", "adaptive"):
            value = value["type"] != "disabled"
        if not isinstance(value, bool):
            refuse(name, value, 'true, false or {"type": "enabled"}')
        args |= {"enable_thinking": value, "thinking": value}
    return args


def parse_model(value: object) -> str:
    """Read the id of a model. Raises InvalidArgument."""
    if not isinstance(value, str) or not value:
        refuse("model", value, "the id of a served model (GET /v1/models lists them)")
    return value


def parse_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, token ids, or a list of these. Raises as `parse_completion`."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        return tuple(_prompt(one, f"prompt[{index}]") for index, one in enumerate(value))
    return (_prompt(value, "prompt"),)


def _prompt(value: object, at: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return text(value, at)
    if not isinstance(value, list) or not value:
        refuse(at, value, "a text that is not empty, or a list of token ids")
    return tuple(_token_id(entry, f"{at}[{index}]") for index, entry in enumerate(value))


def read_params(
    body: Mapping[str, object], *, max_tokens: int | None, top_logprobs: int | None = None
) -> GenerationParams:
    """Read GENERATION_PARAMS and `n`; the others have other names elsewhere. Raises
    InvalidArgument."""
    return GenerationParams(
        model=parse_model(body.get("model")),
        max_tokens=max_tokens,
        sampling=_sampling(body),
        stop=read_stops(body.get("stop")),
        stream=flag(body, "stream"),
        draft_policy=_draft_policy(body.get("draft_policy")),
        deadline_s=_deadline_s(body),
        cache=read_cache_use(body),
        priority=read_priority(body),
        user=read_user(body),
        rows=integer(body, "n", 1, MAX_ROWS, default=1),
        top_logprobs=top_logprobs,
    )


def _top_logprobs(body: Mapping[str, object]) -> int | None:
    """Of a chat, which asks for logprobs with one parameter and says how many with another."""
    top = integer(body, "top_logprobs", 0, MOST_TOP_LOGPROBS, default=0)
    if flag(body, "logprobs"):
        return top
    if top:
        raise InvalidArgument(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
    return None


def refuse_unknown(
    body: Mapping[str, object],
    known: frozenset[str],
    no_ops: Mapping[str, Callable[[object], bool]] = MappingProxyType({}),
    prefix: str = "",
) -> None:
    """Raise UnknownParameters for those that are not known, and Unsupported for a value that
    changes something, of those that `no_ops` takes otherwise; null is as absent. Errors
    name a field behind the prefix: that of an object in the body."""
    given = {name: value for name, value in body.items() if value is not None and name not in known}
    for name, value in given.items():
        if name in no_ops and not no_ops[name](value):
            param = prefix + name
            raise Unsupported(
                f"{param}={shown(value)} is not supported; leave it out or give its default",
                param=param,
            )
    if unknown := [name for name in given if name not in no_ops]:
        raise UnknownParameters(unknown, prefix)


def _max_tokens(body: Mapping[str, object], default: int | None) -> int | None:
    """The smaller one of both parameters."""
    limits = [
        limit
        for name in ("max_tokens", "max_completion_tokens")
        if body.get(name) != -1
        and (limit := integer(body, name, 1, 2**31 - 1, default=None)) is not None
    ]
    return min(limits, default=default)


def _sampling(body: Mapping[str, object]) -> SamplingWish:
    top_k = integer(body, "top_k", -1, 2**31 - 1, default=None)
    top_p = number(body, "top_p", 0, 1, default=None)
    seed = integer(body, "seed", -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1, default=None)
    wish = SamplingWish(
        temperature=number(body, "temperature", 0, 2, default=None),
        top_p=1.0 if top_p == 0 else top_p,
        top_k=0 if top_k == -1 else top_k,
        seed=None if seed is None or seed == -1 else seed % 2**SEED_BITS,
        min_p=number(body, "min_p", 0, 1, default=None),
        presence_penalty=_penalty(body, "presence_penalty"),
        frequency_penalty=_penalty(body, "frequency_penalty"),
        repetition_penalty=_repetition_penalty(body),
        logit_bias=_logit_bias(body.get("logit_bias")),
    )
    wish.over(Sampling())  # refuses what no model could do, before one is loaded for it
    return wish


def _penalty(body: Mapping[str, object], name: str) -> float | None:
    return number(body, name, -MOST_PENALTY, MOST_PENALTY, default=None)


def _repetition_penalty(body: Mapping[str, object]) -> float | None:
    """Read the penalty, under the name that llama.cpp gives it too."""
    for name in ("repetition_penalty", "repeat_penalty"):
        given = number(body, name, 0, 100, default=None)
        if given == 0:
            refuse(name, 0, "above 0; 1 changes nothing")
        if given is not None:
            return given
    return None


def _logit_bias(value: object) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        refuse("logit_bias", value, f"an object with at most {MAX_BIASES} token ids")
    found = []
    for name in value:
        if not name.isascii() or not name.isdecimal() or len(name) > 10:
            refuse("logit_bias", name, "an object whose keys are token ids")
        found.append((int(name), number(value, name, -MOST_BIAS, MOST_BIAS, default=0.0)))
    return tuple(found)


def _draft_policy(value: object) -> str:
    return "" if value is None else text(value, "draft_policy")


def _deadline_s(body: Mapping[str, object]) -> float | None:
    if body.get("deadline_s") is None:
        return None
    return number(body, "deadline_s", 0, MAX_DEADLINE_S, default=MAX_DEADLINE_S)


def read_stops(value: object, at: str = "stop") -> tuple[str, ...]:
    """Read stop strings, of the parameter `at`. Raises InvalidArgument."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse(at, value, f"a string or a list of at most {MAX_STOPS} strings")
    found = []
    for index, stop in enumerate(stops):
        name = at if isinstance(value, str) else f"{at}[{index}]"
        found.append(text(stop, name))
        if len(found[-1]) > MAX_STOP_CHARS:
            refuse(name, stop, f"a string of at most {MAX_STOP_CHARS} characters")
    return tuple(stop for stop in dict.fromkeys(found) if stop)


def _include_usage(value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        refuse("stream_options", value, "an object")
    for name, option in value.items():
        is_no_op = name == "include_obfuscation" or option in (None, False)
        if name != "include_usage" and not is_no_op:
            param = f"stream_options.{name}"
            raise Unsupported(f"{shown(param)} is not supported; leave it out", param=param)
    return flag(value, "include_usage", prefix="stream_options.")


def _token_id(value: object, at: str) -> int:
    if type(value) is not int or value < 0:
        refuse(at, value, "a token id")
    return value
