"""A request for text, whatever its dialect: a conversation or a prompt, and how to answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from kakeya.core.errors import NotFound
from kakeya.generation.request import GenerationPriority, Sampling
from kakeya.prefix.seam import CacheUse
from kakeya.text.chat import Chat
from kakeya.text.grammar import AnswerShape


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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None

    def over(self, usual: Sampling) -> Sampling:
        """The usual sampling, as far as nothing else was given. Raises InvalidArgument."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(usual, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What a request says of its answer. `max_tokens` None = to the end of the context;
    `deadline_s` None = the caller gave no deadline; `rows` are answers to each prompt;
    `top_logprobs` as in a `DecodeRequest`; `left_out` says, in sentences, what the request asks
    for and does not get; `stay_warm_s` and `cooldown_s` are seconds after it, of its model and of
    its client; without `is_resumable` no other node may hold a copy of the answer."""

    model: str
    max_tokens: int | None
    sampling: SamplingWish
    stop: tuple[str, ...]
    stream: bool
    draft_policy: str = ""
    deadline_s: float | None = None
    cache: CacheUse = field(default_factory=CacheUse)
    priority: GenerationPriority = GenerationPriority.NORMAL
    user: str = ""
    rows: int = 1
    top_logprobs: int | None = None
    left_out: tuple[str, ...] = ()
    stay_warm_s: float = 0.0
    cooldown_s: float = 0.0
    is_resumable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may, cannot or must call one of the tools that it is shown.

    `names` are those that it may call, () = all. Without `is_parallel` an answer has one call.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to be answered. `answer_schema` is the JSON Schema that the answer keeps, None
    = free text; `answer_schema_at` is its place in the request, as errors name it."""

    params: GenerationParams
    chat: Chat
    tool_choice: ToolChoice = ToolChoice()
    answer_schema: Mapping[str, object] | None = None
    answer_schema_at: str = "response_format.json_schema.schema"

    @property
    def shape(self) -> AnswerShape:
        """What the answer must be."""
        choice = self.tool_choice
        calls: Literal["none", "allowed", "required"] = "none"
        if self.chat.tools and choice.mode != "none":
            calls = "allowed" if choice.mode == "auto" else "required"
        return AnswerShape(
            schema=self.answer_schema,
            schema_at=self.answer_schema_at,
            calls=calls,
            names=choice.names,
            is_parallel=choice.is_parallel,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Prompts to go on from, each a text or token ids; the answers are rows of their own."""

    params: GenerationParams
    prompts: tuple[str | tuple[int, ...], ...]


Request = ChatRequest | CompletionRequest
