"""The prompt of a request in a model's tokens, and what follows from it before any is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kakeya.backends.request import (
    ChatRequest,
    CompletionRequest,
    GenerationParams,
    Request,
    SamplingWish,
)
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.answer import Answer
from kakeya.gateway.openai.messages import call_of
from kakeya.generation.facts import ModelFacts
from kakeya.generation.manifest import Manifest, Thinking, thinking_args
from kakeya.generation.model import ServedModel
from kakeya.generation.request import Sampling
from kakeya.text.chat import Message
from kakeya.text.folder import read_config, stated_context
from kakeya.text.prompt import chat_ids, check_prompt, most_prompt_tokens, raw_ids
from kakeya.text.text import TextModel, Texts

_OF_THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Variables of templates with which a request says whether the model thinks."""
_WHOLE_FRAME_S = 0.25
"""Between two messages of an answer that is sent whole; a dying engine loses as much work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompt:
    """A prompt in ids, its cuts, and the grammar of its answer, "" = free text."""

    token_ids: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    grammar: str = ""


def prompts_of(asked: Request) -> tuple[str | tuple[int, ...], ...]:
    """Of a conversation one, which its template writes."""
    return asked.prompts if isinstance(asked, CompletionRequest) else ("",)


def _stated_context(folder: Path) -> int:
    """The context of a model that was not loaded yet; 0 = its files do not tell. Blocks."""
    try:
        config = read_config(folder / "config.json")
    except Unsupported:
        return 0
    nested = config.get("text_config")
    return stated_context([*([nested] if isinstance(nested, dict) else []), config])


async def prompt_ids(
    asked: Request, prompt: str | tuple[int, ...], text: TextModel, facts: ModelFacts
) -> tuple[int, ...]:
    """The prompt in ids. Raises as `chat_ids` and `raw_ids`."""
    if isinstance(asked, ChatRequest):
        return await chat_ids(asked.chat, text, facts)
    return await raw_ids(prompt, text, facts)


async def write_prompt(
    asked: Request, prompt: str | tuple[int, ...], text: TextModel, facts: ModelFacts
) -> WrittenPrompt:
    """The prompt in ids, with the places where others are likely to part from it."""
    token_ids = await prompt_ids(asked, prompt, text, facts)
    if not isinstance(asked, ChatRequest):
        stable = () if isinstance(prompt, str) else asked.params.cache.cuts(len(token_ids))
        return WrittenPrompt(token_ids=token_ids, cuts=stable)
    cuts = await text.cuts_of(token_ids, asked.chat, at_most=most_prompt_tokens(facts))
    grammar = await text.grammar(token_ids, asked.chat, asked.shape)
    return WrittenPrompt(token_ids=token_ids, cuts=cuts, grammar=grammar or "")


def turn_of(answer: Answer) -> Message:
    """An answer as its client sends it back."""
    turn: dict[str, object] = {"role": "assistant", "content": answer.text}
    if answer.thoughts:
        turn["reasoning_content"] = answer.thoughts
    if answer.calls:
        turn["tool_calls"] = [
            call_of(call.call_id, call.name, call.arguments) for call in answer.calls
        ]
    return turn


async def facts_ahead(model: ServedModel, texts: Texts) -> ModelFacts | None:
    """What the files of a model tell of its prompts, before it loads; None = not enough."""
    folder = model.folder
    if folder is None:
        return None
    context_tokens = await asyncio.to_thread(_stated_context, folder)
    if not context_tokens:
        return None
    try:
        text = await texts.get(str(folder), model.manifest.template)
    except Unsupported:
        return None  # the load tells more
    return ModelFacts(
        model_id=model.model_id,
        model_path=str(folder),
        vocab_size=text.tokenizer.get_vocab_size(),
        context_tokens=context_tokens,
        eos_token_ids=(),
    )


def sampling_of(wish: SamplingWish, defaults: Sampling, facts: ModelFacts, seed: int) -> Sampling:
    """How tokens are selected: as a request says, else as is usual for the model, with this seed.

    Raises InvalidArgument for what the model's vocabulary does not have.
    """
    if (wish.top_k or 0) > facts.vocab_size:
        raise InvalidArgument(
            f"top_k is {wish.top_k}; {facts.model_id} has {facts.vocab_size} tokens",
            param="top_k",
        )
    for token_id, _ in wish.logit_bias or ():
        if token_id >= facts.vocab_size:
            raise InvalidArgument(
                f"logit_bias names token {token_id}; {facts.model_id} has {facts.vocab_size} "
                "tokens",
                param="logit_bias",
            )
    top_k = min(defaults.top_k, facts.vocab_size)
    return wish.over(replace(defaults, top_k=top_k, seed=seed))


def frame_s(params: GenerationParams) -> float:
    """An answer that is sent whole needs its tokens seldom, unless a stop string may end it."""
    return 0.0 if params.stream or params.stop else _WHOLE_FRAME_S


def room_of(params: GenerationParams, prompt_tokens: int, facts: ModelFacts) -> int:
    """How many tokens may be generated: as many as asked, and at most the rest of the context.

    If none are asked for, as many as memory can ever hold.
    """
    check_prompt(prompt_tokens, facts)
    room = facts.context_tokens - prompt_tokens
    if params.max_tokens is not None:
        return min(params.max_tokens, room)
    longest = facts.longest_tokens or facts.context_tokens
    return max(1, min(room, longest - prompt_tokens))


def under_manifest(asked: Request, manifest: Manifest) -> tuple[Request, Mapping[str, object]]:
    """A request with what the manifest of its model says where it says nothing, and what that is,
    by the names of the manifest."""
    params, used = asked.params, dict[str, object]()
    sampling = params.sampling
    if manifest.temperature is not None and sampling.temperature is None:
        used["temperature"] = manifest.temperature
        sampling = replace(sampling, temperature=manifest.temperature)
    if manifest.top_p is not None and sampling.top_p is None:
        used["top_p"] = manifest.top_p
        sampling = replace(sampling, top_p=manifest.top_p)
    params = replace(params, sampling=sampling)
    if manifest.max_tokens is not None and params.max_tokens is None:
        used["max_tokens"] = manifest.max_tokens
        params = replace(params, max_tokens=manifest.max_tokens)
    asked, of_thinking = with_thinking(replace(asked, params=params), manifest.thinking)
    return asked, {**used, **of_thinking}


def with_thinking(asked: Request, thinking: Thinking) -> tuple[Request, Mapping[str, object]]:
    """A request that says whether its model thinks, where it does not say it; and what was
    added."""
    args = thinking_args(thinking)
    if not args or not isinstance(asked, ChatRequest) or _OF_THINKING & asked.chat.kwargs.keys():
        return asked, {}
    kwargs = {**asked.chat.kwargs, **args}
    return replace(asked, chat=replace(asked.chat, kwargs=kwargs)), {"thinking": thinking}
