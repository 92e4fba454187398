"""The KV that a request belongs to: a key from the caller's parameters, and a slot from the key.

    conv:<id>     the conversation: every turn of it, and what is warmed for it
    seg:<hash>    no conversation: the longest run of stable segments that the prompt begins with
    pfx:<hash>    neither: a hash that the caller computed over the stable text
    v5:<key>      nor that: the prompt cache key of OpenAI's API

The first that is given counts. Text that changes with every request (dialogue, time stamps) is part
of no key, so no key has to be invalidated. A key is a hint where to look: content decides which
blocks are reused, so a wrong one costs time and never changes an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

ANY_SLOT = -1
"""The slot of a request that has no key, or of a model that has no slots."""
SYSTEM_PREFIX = "conv:__system_prefix__"
"""The name of declared prompts. It is no conversation: it has no slot, no load and no age, and no
caller's conversation gets this name."""
_SEGMENT_HASH_CHARS = 16
_PLAIN_CHARS, _SHOWN_CHARS, _DIGEST_CHARS = 64, 24, 32
_PLAIN = re.compile(rf"(?!__)[a-z0-9_-][a-z0-9._-]{{0,{_PLAIN_CHARS - 1}}}\Z", re.ASCII)
_UNSAFE = re.compile(r"[^a-z0-9_-]+", re.ASCII)
_HASHED = "~"
"""Stands before the hash in an id that is no plain one, and in no plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSegment:
    """A piece of a prompt, and whether the next prompt has it too."""

    content: str
    stable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeys:
    """The keys that a caller may give for its prompt; "" = not given.

    `segment_hash` is a result of `hash_stable_prefix`.
    """

    conversation_id: str = ""
    segment_hash: str = ""
    prefix_hash: str = ""
    prompt_cache_key: str = ""


def resolve_key(keys: CacheKeys) -> str | None:
    """The key of the first thing that is given; None = nothing is."""
    if keys.conversation_id:
        return f"conv:{sanitise(keys.conversation_id)}"
    if keys.segment_hash:
        return f"seg:{sanitise(keys.segment_hash)}"
    if keys.prefix_hash:
        return f"pfx:{sanitise(keys.prefix_hash)}"
    if legacy := keys.prompt_cache_key.removeprefix("v5:"):
        return f"v5:{sanitise(legacy)}"
    return None


def hash_stable_prefix(segments: object) -> str | None:
    """Hash the stable segments before the first unstable one; None where there are none.

    None too for a value that is no sequence of segments: another key is used then. How the text is
    cut into segments counts, as their contents do.
    """
    if isinstance(segments, str) or not isinstance(segments, Sequence):
        return None
    digest, count = sha256(), 0
    for segment in segments:
        if not isinstance(segment, PromptSegment) or not isinstance(segment.content, str):
            return None
        if not segment.stable:
            break
        content = segment.content.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
        count += 1
    return digest.hexdigest()[:_SEGMENT_HASH_CHARS] if count else None


def derive_slot_id(key: str, parallel: int) -> int:
    """The slot of a key among `parallel` ones, the same in every process; ANY_SLOT for none."""
    if parallel <= 0 or not key:
        return ANY_SLOT
    if parallel == 1:
        return 0
    return int.from_bytes(_digest(key)[:4], "big") % parallel


def sanitise(raw: str) -> str:
    """Write an id so that it may be part of a key, a label or the name of a file.

    Two ids never become one, not where case does not count either: a short plain one stays, any
    other is told by its hash, behind a piece of it for people to read.
    """
    if _PLAIN.match(raw):
        return raw
    shown = _UNSAFE.sub("-", raw[:_SHOWN_CHARS].lower()).strip("-_")
    return f"{shown}{_HASHED}{_digest(raw).hex()[:_DIGEST_CHARS]}"


def _digest(raw: str) -> bytes:
    return sha256(raw.encode("utf-8", "surrogatepass")).digest()
