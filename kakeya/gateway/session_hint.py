"""The conversation of a request that names none: by our headers, or by a session that clients send.

    x-kakeya-conversation, -segments, -prefix, -cache-key, -retention, -stable-tokens
                             as in the metadata of gRPC, for clients that cannot add to their bodies
    x-claude-code-session-id, session-id, thread-id, x-session-id, x-session-affinity
                             of agent programs
    metadata.user_id         Claude Code's: JSON with a session_id, or user_..._session_UUID

A session is a hint, and no conversation: a program sends other requests in it beside the main one
(opencode asks for a title, Claude Code runs agents of its own), and each would take the KV slot of
the other. So the key is the session and a hash of what all turns of a conversation begin with: its
system text, without lines that change, and the first message behind. Two conversations of a session
that agree in both share a slot as two turns of one do, and content decides what they reuse.

A chat with tools is taken for a conversation without a session too, by the same hash: behind a call
comes its result. The keys of a body win.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

from starlette.datastructures import Headers

from kakeya.backends.request import ChatRequest, Request
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, read_metadata
from kakeya.text.changing_lines import stable_beginning
from kakeya.text.chat import Chat

SESSION_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-session-id",
    "x-session-affinity",
)
_IN_USER_ID = re.compile(r"_session_([0-9a-f-]{36})\Z", re.IGNORECASE)
_LONGEST = 256
"""Characters of a session id; a longer one is none."""
_HASH_CHARS = 16


def session_of(body: Mapping[str, object], headers: Headers) -> str:
    """The session that a client says its request belongs to; "" = none."""
    for name in SESSION_HEADERS:
        if (given := headers.get(name, "").strip()) and len(given) <= _LONGEST:
            return given
    metadata = body.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    return _session_in(user_id) if isinstance(user_id, str) else ""


def cache_use(asked: Request, headers: Headers, session: str) -> CacheUse:
    """The keys of a request, or those that its headers give, or a hint by its session.

    Raises InvalidArgument for an unknown retention.
    """
    use = asked.params.cache
    ours = read_metadata(headers.items())
    keys = next((one for one in (use.keys, ours.keys) if one != CacheKeys()), None)
    if keys is None:
        keys = CacheKeys()
        if isinstance(asked, ChatRequest) and (session or asked.chat.tools):
            keys = CacheKeys(conversation_id=_hint(session, asked.chat))
    return replace(
        use,
        keys=keys,
        retention=use.retention or ours.retention,
        stable_tokens=use.stable_tokens or ours.stable_tokens,
    )


def _hint(session: str, chat: Chat) -> str:
    digest = sha256(session.encode("utf-8", "surrogatepass"))
    for text in stable_beginning(chat):
        said = text.encode("utf-8", "surrogatepass")
        digest.update(len(said).to_bytes(8, "little") + said)
    # The session for people to read; the hash covers it whole.
    return f"{session[:_HASH_CHARS] or 'tools'}/{digest.hexdigest()[:_HASH_CHARS]}"


def _session_in(user_id: str) -> str:
    """Most `user_id`s are a person's and say nothing of a session."""
    if match := _IN_USER_ID.search(user_id[-_LONGEST:]):
        return match[1]
    if not user_id.startswith("{") or len(user_id) > 4 * _LONGEST:
        return ""
    try:
        found = json.loads(user_id)
    except (ValueError, RecursionError):
        return ""
    session = found.get("session_id") if isinstance(found, dict) else None
    return session if isinstance(session, str) and len(session) <= _LONGEST else ""
