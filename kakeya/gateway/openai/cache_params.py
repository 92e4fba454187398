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

from kakeya.gateway.http.body import refuse, text
from kakeya.gateway.http.fields import (
    IS_FLAG,
    IS_TEXT,
    Field,
    integer_field,
    table,
    text_field,
    value_field,
)
from kakeya.generation.request import MAX_PROMPT_TOKENS
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys, PromptSegment, hash_stable_prefix
from kakeya.prefix.seam import RETENTIONS, CacheUse, read_retention


def retention_field(name: str) -> Field[Retention | None]:
    """For how long a prefix is of use; absent or "" is None."""
    word = text_field(name)

    def read(body: Mapping[str, object]) -> Retention | None:
        said = word.read(body)
        return read_retention(said, name) if said else None

    return Field(name, read, {"enum": ["", *RETENTIONS]})


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


_CONVERSATION, _PREFIX_HASH = text_field("conversation_id"), text_field("prefix_hash")
_CACHE_KEY = text_field("prompt_cache_key")
_SEGMENT = {
    "type": "object",
    "properties": {"content": IS_TEXT, "stable": IS_FLAG},
    "required": ["content", "stable"],
}
_SEGMENTS = value_field("prompt_segments", _segments, {"type": "array", "items": _SEGMENT})
_RETENTION = retention_field("prompt_cache_retention")
STABLE_TOKENS = integer_field("stable_tokens", 0, MAX_PROMPT_TOKENS)
KEY_PARAMS = table(_CONVERSATION, _SEGMENTS, _PREFIX_HASH, _CACHE_KEY)
CACHE_PARAMS = KEY_PARAMS | table(_RETENTION)


def read_cache_use(body: Mapping[str, object]) -> CacheUse:
    """Read all of them. Raises InvalidArgument naming the parameter."""
    return CacheUse(
        keys=read_keys(body),
        retention=_RETENTION.read(body),
        stable_tokens=STABLE_TOKENS.read(body) or 0,
    )


def read_keys(body: Mapping[str, object]) -> CacheKeys:
    """Read those that are keys."""
    return CacheKeys(
        conversation_id=_CONVERSATION.read(body),
        segment_hash=hash_stable_prefix(_SEGMENTS.read(body)) or "",
        prefix_hash=_PREFIX_HASH.read(body),
        prompt_cache_key=_CACHE_KEY.read(body),
    )
