"""The OpenAI dialect, outbound: whole bodies, and server-sent events from prebuilt templates.

All of a chunk but its text is fixed for one answer, so a chunk is two constant byte strings around
one escaped text. One event may carry the text of several tokens of one step.

Beside OpenAI's fields, `usage` carries ours under `kakeya`:

    prefill_ms, total_ms     time of the engine
    forwards                 of the verifier, after prefill
    drafted, verified, accepted
                             draft tokens that were made, that the verifier looked at, that it kept
    sources                  the same for each draft source, by name

`usage.kakeya` is absent when a stop string ended the answer, since the engine then gives no
account.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Literal

from kakeya.gateway.answer import FinishReason, GeneratedAnswer
from kakeya.generation.frames import SourceUsage, Usage

Dialect = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": waiting\n\n"

_OBJECTS: dict[tuple[Dialect, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}
_SLOT = "\ue000"


def compact(value: object) -> bytes:
    """Write JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """Write one server-sent event."""
    return b"data: " + compact(value) + b"\n\n"


def comment(waits_for: str) -> bytes:
    """Write a comment for a stream without events; "" = no load is waited for."""
    said = " ".join(waits_for.split())
    return f": waiting: {said}\n\n".encode() if said else KEEPALIVE


class ChunkWriter:
    """The events of one streamed answer."""

    def __init__(
        self, dialect: Dialect, *, answer_id: str, created_at: int, model: str, include_usage: bool
    ) -> None:
        self._dialect = dialect
        self._head: dict[str, object] = {
            "id": answer_id,
            "object": _OBJECTS[dialect, True],
            "created": created_at,
            "model": model,
        }
        self._usage_of_chunks: dict[str, object] = {"usage": None} if include_usage else {}
        before, after = self._chunk(self._text_choice(_SLOT)).split(compact(_SLOT))
        self._before, self._after = before, after

    def first(self) -> bytes:
        """The opening event: the role of a chat; a completion opens with its text."""
        if self._dialect == "completion":
            return b""
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text(self, text: str) -> bytes:
        """More text."""
        return self._before + encode_basestring(text).encode() + self._after

    def last(self, reason: FinishReason) -> bytes:
        """Why it ended."""
        choice: dict[str, object] = {"delta": {}} if self._dialect == "chat" else {"text": ""}
        return self._chunk({**choice, "finish_reason": reason})

    def usage(self, usage: dict[str, object]) -> bytes:
        """The account, in a chunk without choices."""
        return event({**self._head, "choices": [], "usage": usage})

    def _text_choice(self, text: str) -> dict[str, object]:
        if self._dialect == "chat":
            return {"delta": {"content": text}, "finish_reason": None}
        return {"text": text, "finish_reason": None}

    def _chunk(self, choice: dict[str, object]) -> bytes:
        whole = {"index": 0, **choice, "logprobs": None}
        return event({**self._head, "choices": [whole], **self._usage_of_chunks})


def whole_answer(
    dialect: Dialect,
    answer: GeneratedAnswer,
    text: str,
    *,
    answer_id: str,
    created_at: int,
    model: str,
    prompt_tokens: int,
) -> dict[str, object]:
    """The body of an answer that is not streamed."""
    choice: dict[str, object] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}}
        if dialect == "chat"
        else {"text": text}
    )
    finish: dict[str, object] = {"logprobs": None, "finish_reason": answer.finish_reason}
    return {
        "id": answer_id,
        "object": _OBJECTS[dialect, False],
        "created": created_at,
        "model": model,
        "choices": [{"index": 0, **choice, **finish}],
        "usage": usage_body(answer, prompt_tokens),
    }


def usage_body(answer: GeneratedAnswer, prompt_tokens: int) -> dict[str, object]:
    """The `usage` object."""
    body: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
    if answer.usage is not None:
        body["kakeya"] = _account(answer.usage)
    return body


def _account(usage: Usage) -> dict[str, object]:
    return {
        "prefill_ms": round(usage.prefill_s * 1000, 3),
        "total_ms": round(usage.total_s * 1000, 3),
        "forwards": usage.forwards,
        "drafted": usage.drafted,
        "verified": usage.verified,
        "accepted": usage.accepted,
        "sources": [_source(source) for source in usage.sources],
    }


def _source(source: SourceUsage) -> dict[str, object]:
    return {
        "source": source.source,
        "drafts": source.drafts,
        "drafted": source.drafted,
        "verified": source.verified,
        "accepted": source.accepted,
        "abstained": source.abstained,
        "failed": source.failed,
        "late": source.late,
        "shadowed": source.shadowed,
        "shadow_hits": source.shadow_hits,
        "mean_wait_ms": round(source.mean_wait_ms, 3),
    }
