"""The parameters of requests that generate, each declared once: what reads it, and its schema.

What a value means is in `requests`; the parameters of prefixes and of fair shares have files of
their own, for all routes.
"""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.gateway.http.body import flag, integer, number, refuse, text
from kakeya.gateway.http.fields import (
    IS_FLAG,
    IS_TEXT,
    Field,
    choice_field,
    flag_field,
    integer_field,
    number_field,
    opaque,
    table,
    text_field,
    value_field,
)
from kakeya.gateway.openai.cache_params import CACHE_PARAMS
from kakeya.gateway.openai.share_params import SHARE_PARAMS
from kakeya.generation.request import MOST_BIAS, MOST_PENALTY, MOST_TOP_LOGPROBS

MAX_STOPS = 32
MAX_STOP_CHARS = 1000
SEED_BITS = 64
MAX_BIASES = 4096
MAX_ROWS = 64
"""Answers of one request: prompts times n."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MOST_INT = 2**31 - 1


def _parse_model(value: object) -> str:
    if not isinstance(value, str) or not value:
        refuse("model", value, "the id of a served model (GET /v1/models lists them)")
    return value


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...] | None:
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


def _limit(name: str) -> Field[int | None]:
    """A number of tokens; -1 sets none."""
    least: dict[str, object] = {"type": "integer", "minimum": 1, "maximum": MOST_INT}
    return Field(
        name,
        lambda body: (
            None if body.get(name) == -1 else integer(body, name, 1, MOST_INT, default=None)
        ),
        {"anyOf": [{"const": -1}, least]},
    )


def _repetition(name: str) -> Field[float | None]:
    """A penalty above 0; 1 changes nothing."""

    def read(body: Mapping[str, object]) -> float | None:
        given = number(body, name, 0, 100, default=None)
        return refuse(name, 0, "above 0; 1 changes nothing") if given == 0 else given

    return Field(name, read, {"type": "number", "exclusiveMinimum": 0, "maximum": 100})


MODEL = value_field("model", _parse_model, {**IS_TEXT, "minLength": 1}, is_required=True)
STREAM = flag_field("stream")
MAX_TOKENS, MAX_COMPLETION_TOKENS = _limit("max_tokens"), _limit("max_completion_tokens")
TEMPERATURE = number_field("temperature", 0, 2)
TOP_P = number_field("top_p", 0, 1)
TOP_K = integer_field("top_k", -1, MOST_INT)
MIN_P = number_field("min_p", 0, 1)
SEED = integer_field("seed", -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
PRESENCE_PENALTY = number_field("presence_penalty", -MOST_PENALTY, MOST_PENALTY)
FREQUENCY_PENALTY = number_field("frequency_penalty", -MOST_PENALTY, MOST_PENALTY)
REPETITION_PENALTIES = (_repetition("repetition_penalty"), _repetition("repeat_penalty"))
"""Ours, and the name that llama.cpp gives it."""
LOGIT_BIAS = value_field(
    "logit_bias",
    _parse_logit_bias,
    {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {
            "anyOf": [
                {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
                {"type": "null"},
            ]
        },
    },
)
_ONE_STOP = {**IS_TEXT, "maxLength": MAX_STOP_CHARS}
STOP = value_field(
    "stop",
    read_stops,
    {"anyOf": [_ONE_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _ONE_STOP}]},
)
DRAFT_POLICY = text_field("draft_policy")
DEADLINE_S = number_field("deadline_s", 0, 86400.0)
RESUMABLE = Field(
    "resumable", lambda body: body.get("resumable") is None or flag(body, "resumable"), IS_FLAG
)
ROWS = integer_field("n", 1, MAX_ROWS)
HAS_LOGPROBS = flag_field("logprobs")
TOP_LOGPROBS = integer_field("top_logprobs", 0, MOST_TOP_LOGPROBS)
REASONING_EFFORT = choice_field("reasoning_effort", EFFORTS)
GENERATION_PARAMS = (
    table(MODEL, STREAM, TEMPERATURE, TOP_P, TOP_K, MIN_P, SEED, STOP, LOGIT_BIAS)
    | table(PRESENCE_PENALTY, FREQUENCY_PENALTY, *REPETITION_PENALTIES)
    | table(DRAFT_POLICY, DEADLINE_S, RESUMABLE)
    | CACHE_PARAMS
    | SHARE_PARAMS
)
"""Parameters of all routes that generate; `read_params` reads them."""
TEMPLATE_PARAMS = opaque("enable_thinking", "thinking", "chat_template_kwargs")
