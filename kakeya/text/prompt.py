"""Prompts in token ids, and whether a model's context holds them."""

from __future__ import annotations

from kakeya.core.errors import ContextLengthExceeded, InvalidArgument
from kakeya.generation.facts import ModelFacts
from kakeya.generation.request import MAX_PROMPT_TOKENS
from kakeya.text.bound import TooManyTokens
from kakeya.text.chat import Chat
from kakeya.text.text import TextModel


async def chat_ids(chat: Chat, text: TextModel, facts: ModelFacts) -> tuple[int, ...]:
    """Render and encode a conversation, with the tools that it shows.

    Raises ContextLengthExceeded, as far as its length alone tells it, and the errors of
    `TextModel.encode_chat`.
    """
    try:
        at_most = most_prompt_tokens(facts)
        return tuple(await text.encode_chat(chat, at_most=at_most))
    except TooManyTokens as fault:
        raise too_long(f"at least {fault.least_tokens}", facts) from None


async def raw_ids(
    prompt: str | tuple[int, ...], text: TextModel, facts: ModelFacts
) -> tuple[int, ...]:
    """Encode or check a prompt that is written by its caller.

    Raises ContextLengthExceeded as `chat_ids`, InvalidArgument for an id that the model lacks.
    """
    at_most = most_prompt_tokens(facts)
    if isinstance(prompt, str):
        try:
            return tuple(await text.encode(prompt, at_most=at_most))
        except TooManyTokens as fault:
            raise too_long(f"at least {fault.least_tokens}", facts) from None
    if len(prompt) > at_most:
        raise too_long(str(len(prompt)), facts)
    highest = max(prompt)
    if highest >= facts.vocab_size:
        raise InvalidArgument(
            f"prompt holds the token id {highest}; {facts.model_id} has {facts.vocab_size} tokens",
            param="prompt",
        )
    return prompt


def check_prompt(prompt_tokens: int, facts: ModelFacts) -> None:
    """Raise InvalidArgument for an empty prompt, ContextLengthExceeded for one without room."""
    if prompt_tokens == 0:
        raise InvalidArgument("the prompt has no tokens; it needs at least one", param="prompt")
    if prompt_tokens > most_prompt_tokens(facts):
        raise too_long(str(prompt_tokens), facts)


def most_prompt_tokens(facts: ModelFacts) -> int:
    """The longest prompt that leaves room for one token."""
    return min(facts.context_tokens - 1, MAX_PROMPT_TOKENS)


def too_long(prompt_tokens: str, facts: ModelFacts) -> ContextLengthExceeded:
    """The refusal of a prompt."""
    if most_prompt_tokens(facts) == MAX_PROMPT_TOKENS:
        return ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; a prompt may have {MAX_PROMPT_TOKENS}"
        )
    return ContextLengthExceeded(
        f"the prompt has {prompt_tokens} tokens and the answer needs at least 1; the context "
        f"of {facts.model_id} holds {facts.context_tokens} tokens"
    )
