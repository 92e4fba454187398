"""The parameters of a request body about its prefix, for all routes.

conversation_id           every turn of a conversation, and prefixes warmed for it
prompt_cache_key          requests that begin alike, where there is no conversation
prompt_cache_retention    "in_memory" | "24h", or "short" | "long" | "extended": for how long
                          the prefix is of use
"""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.gateway.http.body import text
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, read_retention

CACHE_PARAMS = frozenset({"conversation_id", "prompt_cache_key", "prompt_cache_retention"})


def read_cache_use(body: Mapping[str, object]) -> CacheUse:
    """Read all three. Raises InvalidArgument naming the parameter."""
    return CacheUse(keys=read_keys(body), retention=retention(body, "prompt_cache_retention"))


def read_keys(body: Mapping[str, object]) -> CacheKeys:
    """Read the two that are keys."""
    return CacheKeys(
        conversation_id=_word(body, "conversation_id"),
        prompt_cache_key=_word(body, "prompt_cache_key"),
    )


def retention(body: Mapping[str, object], name: str) -> Retention | None:
    """Read for how long a prefix is of use; absent is None."""
    word = _word(body, name)
    return read_retention(word, name) if word else None


def _word(body: Mapping[str, object], name: str) -> str:
    value = body.get(name)
    return "" if value is None else text(value, name)
