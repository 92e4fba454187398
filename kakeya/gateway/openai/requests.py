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
                  resumable: whether other nodes may hold copies of the answer;
                  enable_thinking, thinking, chat_template_kwargs: variables of the chat template;
                  conversation_id, prompt_cache_key, prompt_cache_retention: see `cache_params`;
                  priority, service_tier, user, safety_identifier: see `share_params`
    accepted      a parameter that is absent, null, or has a value that changes nothing
                  (`CHAT_NO_OPS`); values that mean "off": seed, top_k and max_tokens -1, top_p 0,
                  an empty stop
    refused       everything else: 400, code unsupported_parameter; of completions best_of, unless
                  it is n, and echo

Messages are read by `messages`, tools and schemas by `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.backends.request import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    SamplingWish,
)
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, integer, object_of, refuse, shown, text
from kakeya.gateway.http.fields import (
    Field,
    NoOps,
    is_object,
    is_one_of,
    refuse_unknown,
    table,
    value_field,
)
from kakeya.gateway.openai import generation_params as params
from kakeya.gateway.openai.cache_params import STABLE_TOKENS, read_cache_use
from kakeya.gateway.openai.messages import MESSAGES
from kakeya.gateway.openai.reply import ChatReply, CompletionReply
from kakeya.gateway.openai.share_params import read_priority, read_user
from kakeya.gateway.openai.tools import (
    RESPONSE_FORMAT,
    TOOL_PARAMS,
    TOOLS,
    read_tool_choice,
)
from kakeya.generation.request import MOST_TOP_LOGPROBS, Sampling
from kakeya.text.chat import Chat

COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions when `max_tokens` is absent; a chat goes on to the end of the context."""

CHAT_NO_OPS: NoOps = {
    "suffix": is_one_of(""),
    "store": is_one_of(False),
    # A label of the request: never changes the output.
    "metadata": is_object,
    "functions": is_one_of([]),
    "modalities": is_one_of(["text"]),
    "verbosity": is_one_of("medium"),
    "function_call": is_one_of("none", "auto"),
    # Of completions; front ends send them with chats too.
    "best_of": is_one_of(1),
    "echo": is_one_of(False),
    # The values at which llama.cpp's and vLLM's parameters do nothing.
    "typical_p": is_one_of(1, 1.0),
    "tfs_z": is_one_of(1, 1.0),
    "mirostat": is_one_of(0, 0.0),
    "ignore_eos": is_one_of(False),
    "cache_prompt": is_one_of(True),
    "add_generation_prompt": is_one_of(True),
    "skip_special_tokens": is_one_of(True),
}


def _parse_include_usage(value: object) -> bool:
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


def _parse_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of these."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        return tuple(_prompt(one, f"prompt[{index}]") for index, one in enumerate(value))
    return (_prompt(value, "prompt"),)


def _prompt(value: object, at: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return text(value, at)
    if not isinstance(value, list) or not value:
        refuse(at, value, "a text that is not empty, or a list of token ids")
    return tuple(_token_id(entry, f"{at}[{index}]") for index, entry in enumerate(value))


def _token_id(value: object, at: str) -> int:
    if type(value) is not int or value < 0:
        refuse(at, value, "a token id")
    return value


def _check_echo(value: object) -> None:
    if value is not None and value is not False:
        raise Unsupported(
            f"echo={shown(value)} is not supported: an answer is what follows the prompt, which "
            "its caller has; leave it out",
            param="echo",
        )


def _check_best_of(body: Mapping[str, object]) -> None:
    rows = params.ROWS.read(body) or 1
    value = integer(body, "best_of", 1, params.MAX_ROWS, default=rows)
    if value != rows:
        raise Unsupported(
            f"best_of={value} with n={rows} is not supported: every answer that is generated is "
            f"returned; give n={value} and choose among them",
            param="best_of",
        )


def _top_of_completion(body: Mapping[str, object]) -> int | None:
    is_off = body.get("logprobs") is False
    return None if is_off else integer(body, "logprobs", 0, MOST_TOP_LOGPROBS, default=None)


_TOKENS: Mapping[str, object] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}
_ONE_PROMPT = {"anyOf": [{"type": "string", "minLength": 1}, _TOKENS]}
PROMPTS = value_field(
    "prompt",
    _parse_prompts,
    {"anyOf": [*_ONE_PROMPT["anyOf"], {"type": "array", "minItems": 1, "items": _ONE_PROMPT}]},
    is_required=True,
)
_INCLUDE_USAGE = value_field("stream_options", _parse_include_usage, {"type": "object"})
_COMPLETION_LOGPROBS = Field(
    "logprobs",
    _top_of_completion,
    {"anyOf": [{"const": False}, {"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS}]},
)
_ECHO = value_field("echo", _check_echo, {"const": False})
_BEST_OF = Field(
    "best_of", _check_best_of, {"type": "integer", "minimum": 1, "maximum": params.MAX_ROWS}
)
_SHARED = params.GENERATION_PARAMS | table(params.MAX_TOKENS, params.ROWS, _INCLUDE_USAGE)
CHAT = (
    _SHARED
    | table(MESSAGES, params.MAX_COMPLETION_TOKENS, params.HAS_LOGPROBS, params.TOP_LOGPROBS)
    | table(params.REASONING_EFFORT)
    | TOOL_PARAMS
    | params.TEMPLATE_PARAMS
)
COMPLETION = _SHARED | table(PROMPTS, STABLE_TOKENS, _COMPLETION_LOGPROBS, _ECHO, _BEST_OF)


def parse_chat(body: Mapping[str, object]) -> ChatReply:
    """Read a chat request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, CHAT, CHAT_NO_OPS)
    messages, continues_last = MESSAGES.read(body)
    tools = TOOLS.read(body)
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
        answer_schema=RESPONSE_FORMAT.read(body),
    )
    return ChatReply(asked, include_usage=_INCLUDE_USAGE.read(body))


def parse_completion(body: Mapping[str, object]) -> CompletionReply:
    """Read a completion request. Raises InvalidArgument or Unsupported naming the parameter."""
    refuse_unknown(body, COMPLETION, CHAT_NO_OPS)
    _ECHO.read(body)
    _BEST_OF.read(body)
    asked = CompletionRequest(
        params=read_params(
            body,
            max_tokens=_max_tokens(body, COMPLETION_MAX_TOKENS),
            top_logprobs=_COMPLETION_LOGPROBS.read(body),
        ),
        prompts=PROMPTS.read(body),
    )
    shortest = min(0 if isinstance(one, str) else len(one) for one in asked.prompts)
    if asked.params.cache.stable_tokens > shortest:
        raise InvalidArgument(
            f"stable_tokens is {asked.params.cache.stable_tokens}; it counts the token ids that a "
            "prompt begins with, and each prompt must be a list of at least so many",
            param=STABLE_TOKENS.name,
        )
    rows = asked.params.rows * len(asked.prompts)
    if rows > params.MAX_ROWS:
        raise InvalidArgument(
            f"{len(asked.prompts)} prompts with n={asked.params.rows} are {rows} answers; one "
            f"request may ask for {params.MAX_ROWS}",
            param="prompt",
        )
    return CompletionReply(asked, include_usage=_INCLUDE_USAGE.read(body))


def read_template_args(body: Mapping[str, object]) -> dict[str, object]:
    """Read the variables of the chat template. Raises InvalidArgument naming the parameter.

    What a template calls thinking has two names; both are set.
    """
    args = dict(object_of(body, "chat_template_kwargs"))
    effort = params.REASONING_EFFORT.read(body)
    if effort is not None:
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


def read_params(
    body: Mapping[str, object], *, max_tokens: int | None, top_logprobs: int | None = None
) -> GenerationParams:
    """Read GENERATION_PARAMS and `n`; the others have other names elsewhere. Raises
    InvalidArgument."""
    return GenerationParams(
        model=params.MODEL.read(body),
        max_tokens=max_tokens,
        sampling=_sampling(body),
        stop=params.STOP.read(body),
        stream=params.STREAM.read(body),
        draft_policy=params.DRAFT_POLICY.read(body),
        deadline_s=params.DEADLINE_S.read(body),
        cache=read_cache_use(body),
        priority=read_priority(body),
        user=read_user(body),
        rows=params.ROWS.read(body) or 1,
        top_logprobs=top_logprobs,
        is_resumable=params.RESUMABLE.read(body),
    )


def _top_logprobs(body: Mapping[str, object]) -> int | None:
    """Of a chat, which asks for logprobs with one parameter and says how many with another."""
    top = params.TOP_LOGPROBS.read(body) or 0
    if params.HAS_LOGPROBS.read(body):
        return top
    if top:
        raise InvalidArgument(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
    return None


def _max_tokens(body: Mapping[str, object], default: int | None) -> int | None:
    """The smaller one of both parameters."""
    given = (params.MAX_TOKENS.read(body), params.MAX_COMPLETION_TOKENS.read(body))
    return min((limit for limit in given if limit is not None), default=default)


def _sampling(body: Mapping[str, object]) -> SamplingWish:
    top_k, top_p, seed = params.TOP_K.read(body), params.TOP_P.read(body), params.SEED.read(body)
    repetition = [one.read(body) for one in params.REPETITION_PENALTIES]
    wish = SamplingWish(
        temperature=params.TEMPERATURE.read(body),
        top_p=1.0 if top_p == 0 else top_p,
        top_k=0 if top_k == -1 else top_k,
        seed=None if seed is None or seed == -1 else seed % 2**params.SEED_BITS,
        min_p=params.MIN_P.read(body),
        presence_penalty=params.PRESENCE_PENALTY.read(body),
        frequency_penalty=params.FREQUENCY_PENALTY.read(body),
        repetition_penalty=next((one for one in repetition if one is not None), None),
        logit_bias=params.LOGIT_BIAS.read(body),
    )
    wish.over(Sampling())  # refuses what no model could do, before one is loaded for it
    return wish
