"""The OpenAI dialect, inbound: bytes of a request body to frozen requests, or an error that names
the parameter. Nothing is ignored in silence.

    honoured      model, messages | prompt, max_tokens, max_completion_tokens, temperature, top_p,
                  seed, stop, stream, stream_options.include_usage; of chats tools with
                  tool_choice "none": the model is shown them, and answers with a message
    defaults      of sampling: the model's own, from its generation_config.json
    extensions    top_k; min_p; draft_policy ("auto", "off", "ngram", "peer", MODEL@HOST:PORT);
                  deadline_s: how long the caller waits for the first token, loading included;
                  conversation_id, prompt_cache_key, prompt_cache_retention: see `cache_params`;
                  priority, service_tier, user, safety_identifier: see `share_params`
    accepted      a parameter that is absent, null, or has a value that changes nothing (`_NO_OPS`);
                  values that mean "off": seed, top_k and max_tokens -1, top_p 0, an empty stop
    refused       everything else: 400, code unsupported_parameter

Messages are read by `messages`. A prompt of /v1/completions is a text, token ids, or a list of one
of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kakeya.core.errors import InvalidArgument, NotFound, Unsupported
from kakeya.gateway.http.body import flag, integer, number, refuse, shown, text
from kakeya.gateway.openai.cache_params import CACHE_PARAMS, read_cache_use
from kakeya.gateway.openai.messages import parse_messages, parse_tools
from kakeya.gateway.openai.share_params import SHARE_PARAMS, read_priority, read_user
from kakeya.generation.request import GenerationPriority, Sampling
from kakeya.prefix.seam import CacheUse
from kakeya.text.chat import Chat, Message, Tool

MAX_STOPS = 32
MAX_STOP_CHARS = 1000
SEED_BITS = 64
MAX_DEADLINE_S = 86400.0
COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions when `max_tokens` is absent; a chat goes on to the end of the context."""


class ModelNotFound(NotFound):
    """The `model` of a request is none of the served ones."""

    code = "model_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWish:
    """The fields of a `Sampling` that a caller gave; None = the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None

    def over(self, usual: Sampling) -> Sampling:
        """The usual sampling, as far as nothing else was given. Raises InvalidArgument."""
        return Sampling(
            temperature=usual.temperature if self.temperature is None else self.temperature,
            top_p=usual.top_p if self.top_p is None else self.top_p,
            top_k=usual.top_k if self.top_k is None else self.top_k,
            seed=usual.seed if self.seed is None else self.seed,
            min_p=usual.min_p if self.min_p is None else self.min_p,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Parameters that both routes share. `max_tokens` None = to the end of the context;
    `deadline_s` None = the caller gave no deadline."""

    model: str
    max_tokens: int | None
    sampling: SamplingWish
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    draft_policy: str
    deadline_s: float | None = None
    cache: CacheUse = field(default_factory=CacheUse)
    priority: GenerationPriority = GenerationPriority.NORMAL
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body of POST /v1/chat/completions."""

    params: GenerationParams
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    """Tools that the template shows the model; the model cannot call them."""

    @property
    def chat(self) -> Chat:
        """What a prompt is written from."""
        return Chat(messages=self.messages, tools=self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A body of POST /v1/completions; the prompt is text or token ids."""

    params: GenerationParams
    prompt: str | tuple[int, ...]


def _is(*values: object) -> Callable[[object], bool]:
    return lambda given: any(type(given) is type(v) and given == v for v in values)


def _is_number(value: float) -> Callable[[object], bool]:
    return lambda given: type(given) in (int, float) and given == value


def _is_object(given: object) -> bool:
    return isinstance(given, dict)


_NO_OPS: Mapping[str, Callable[[object], bool]] = {
    "n": _is(1),
    "best_of": _is(1),
    "presence_penalty": _is_number(0),
    "frequency_penalty": _is_number(0),
    "repetition_penalty": _is_number(1),
    "logit_bias": _is({}),
    "logprobs": _is(False),
    "top_logprobs": _is(0),
    "echo": _is(False),
    "suffix": _is(""),
    "store": _is(False),
    # A label of the request: never changes the output.
    "metadata": _is_object,
    "tools": _is([]),
    "functions": _is([]),
    "tool_choice": _is("none", "auto"),
    "parallel_tool_calls": _is(True, False),
    "response_format": _is({"type": "text"}),
    "modalities": _is(["text"]),
}
_SHARED = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream"}
    | {"min_p", "stream_options", "draft_policy", "deadline_s"}
    | CACHE_PARAMS
    | SHARE_PARAMS
)


def parse_chat(body: Mapping[str, object]) -> ChatRequest:
    """Read a chat request. Raises InvalidArgument or Unsupported naming the parameter."""
    tools = _shown_tools(body)
    _refuse_unknown(body, _SHARED | {"messages", "max_completion_tokens", "tools"})
    return ChatRequest(
        params=_params(body, default_max_tokens=None),
        messages=parse_messages(body.get("messages")),
        tools=tools,
    )


def parse_completion(body: Mapping[str, object]) -> CompletionRequest:
    """Read a completion request. Raises InvalidArgument or Unsupported naming the parameter."""
    _refuse_unknown(body, _SHARED | {"prompt"})
    return CompletionRequest(
        params=_params(body, default_max_tokens=COMPLETION_MAX_TOKENS),
        prompt=parse_prompt(body.get("prompt")),
    )


def parse_model(value: object) -> str:
    """Read the id of a model. Raises InvalidArgument."""
    if not isinstance(value, str) or not value:
        refuse("model", value, "the id of a served model (GET /v1/models lists them)")
    return value


def parse_prompt(value: object) -> str | tuple[int, ...]:
    """Read a text, token ids, or a list of one of these. Raises as `parse_completion`."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise Unsupported(
                f"prompt holds {len(value)} prompts; send one request for each", param="prompt"
            )
        (value,) = value
    if isinstance(value, str) and value:
        return text(value, "prompt")
    if not isinstance(value, list) or not value:
        refuse("prompt", value, "a text that is not empty, or a list of token ids")
    return tuple(_token_id(entry, index) for index, entry in enumerate(value))


def _params(body: Mapping[str, object], *, default_max_tokens: int | None) -> GenerationParams:
    stream = flag(body, "stream")
    return GenerationParams(
        model=parse_model(body.get("model")),
        max_tokens=_max_tokens(body, default_max_tokens),
        sampling=_sampling(body),
        stop=_stops(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream=stream),
        draft_policy=_draft_policy(body.get("draft_policy")),
        deadline_s=_deadline_s(body),
        cache=read_cache_use(body),
        priority=read_priority(body),
        user=read_user(body),
    )


def _shown_tools(body: Mapping[str, object]) -> tuple[Tool, ...]:
    """Tools that the model may know of and not call: no answer is read as a call."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools and choice != "none":
        given = "is missing" if choice is None else f"is {shown(choice)}"
        raise Unsupported(
            f'tool_choice {given}, and calls of tools are not supported; give "none", and the '
            "model is shown the tools and answers with a message",
            param="tool_choice",
        )
    return parse_tools(tools)


def _refuse_unknown(body: Mapping[str, object], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known:
            continue
        allowed = _NO_OPS.get(name)
        if allowed is None and value is not None:
            raise Unsupported(f"{shown(name)} is not supported; leave it out", param=name)
        if allowed is not None and value is not None and not allowed(value):
            raise Unsupported(
                f"{name}={shown(value)} is not supported; leave it out or give its default",
                param=name,
            )


def _max_tokens(body: Mapping[str, object], default: int | None) -> int | None:
    limits = {
        integer(body, name, 1, 2**31 - 1, default=None)
        for name in ("max_tokens", "max_completion_tokens")
        if body.get(name) != -1
    } - {None}
    if len(limits) > 1:
        raise InvalidArgument(
            "max_tokens and max_completion_tokens differ; give one of them",
            param="max_completion_tokens",
        )
    return limits.pop() if limits else default


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
    )
    wish.over(Sampling())  # refuses what no model could do, before one is loaded for it
    return wish


def _draft_policy(value: object) -> str:
    return "" if value is None else text(value, "draft_policy")


def _deadline_s(body: Mapping[str, object]) -> float | None:
    if body.get("deadline_s") is None:
        return None
    return number(body, "deadline_s", 0, MAX_DEADLINE_S, default=MAX_DEADLINE_S)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse("stop", value, f"a string or a list of at most {MAX_STOPS} strings")
    found = []
    for index, stop in enumerate(stops):
        name = "stop" if isinstance(value, str) else f"stop[{index}]"
        found.append(text(stop, name))
        if len(found[-1]) > MAX_STOP_CHARS:
            refuse(name, stop, f"a string of at most {MAX_STOP_CHARS} characters")
    return tuple(stop for stop in dict.fromkeys(found) if stop)


def _include_usage(value: object, *, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        refuse("stream_options", value, "an object")
    if not stream:
        raise InvalidArgument("stream_options needs stream=true", param="stream_options")
    for name, option in value.items():
        is_no_op = name == "include_obfuscation" and option in (None, False)
        if name != "include_usage" and not is_no_op:
            param = f"stream_options.{name}"
            raise Unsupported(f"{shown(param)} is not supported; leave it out", param=param)
    return flag(value, "include_usage", prefix="stream_options.")


def _token_id(value: object, index: int) -> int:
    if type(value) is not int or value < 0:
        refuse(f"prompt[{index}]", value, "a token id")
    return value
