"""The parameters of a request body about its prefix, for all routes.

conversation_id           every turn of a conversation, and prefixes warmed for it
prompt_segments           [{"content", "stable"}]: what the prompt is made of; the stable ones that
                          it begins with are the key, by their hash
prefix_hash               a hash that the caller computed over its stable text
prompt_cache_key          requests that begin alike, where there is no conversation
stable_tokens             of a prompt of token ids: how many of them other requests begin with too,
                          so that these are found to the token
prompt_cache_retention    "in_memory" | "24h", or "short" | "long" | "extended": for how long
                          the prefix is of use
"""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.gateway.http.body import integer, refuse, text
from kakeya.generation.request import MAX_PROMPT_TOKENS
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys, PromptSegment, hash_stable_prefix
from kakeya.prefix.seam import CacheUse, read_retention

KEY_PARAMS = frozenset({"conversation_id", "prompt_segments", "prefix_hash", "prompt_cache_key"})
STABLE_TOKENS = "stable_tokens"
CACHE_PARAMS = KEY_PARAMS | {"prompt_cache_retention"}


def read_cache_use(body: Mapping[str, object]) -> CacheUse:
    """Read all of them. Raises InvalidArgument naming the parameter."""
    return CacheUse(
        keys=read_keys(body),
        retention=retention(body, "prompt_cache_retention"),
        stable_tokens=integer(body, STABLE_TOKENS, 0, MAX_PROMPT_TOKENS, default=0),
    )


def read_keys(body: Mapping[str, object]) -> CacheKeys:
    """Read those that are keys."""
    return CacheKeys(
        conversation_id=_word(body, "conversation_id"),
        segment_hash=hash_stable_prefix(_segments(body.get("prompt_segments"))) or "",
        prefix_hash=_word(body, "prefix_hash"),
        prompt_cache_key=_word(body, "prompt_cache_key"),
    )


def retention(body: Mapping[str, object], name: str) -> Retention | None:
    """Read for how long a prefix is of use; absent is None."""
    word = _word(body, name)
    return read_retention(word, name) if word else None


def _segments(value: object) -> list[PromptSegment]:
    at = "prompt_segments"
    if value is None:
        return []
    if not isinstance(value, list):
        refuse(at, value, "a list of objects with content and stable")
    segments = []
    for index, one in enumerate(value):
        if not isinstance(one, dict) or not isinstance(stable := one.get("stable"), bool):
            refuse(
                f"{at}[{index}]", one, "an object with content, a text, and stable, true or false"
            )
        content = text(one.get("content"), f"{at}[{index}].content")
        segments.append(PromptSegment(content=content, stable=stable))
    return segments


def _word(body: Mapping[str, object], name: str) -> str:
    value = body.get(name)
    return "" if value is None else text(value, name)
