"""The OpenAI dialect, outbound: whole bodies, and server-sent events from prebuilt templates.

All of a text chunk but its text is fixed for one answer, so it is two constant byte strings around
one escaped text. One event may carry the text of several tokens of one step.

Beside OpenAI's fields, `usage` carries ours under `kakeya`:

    prefill_ms, total_ms     time of the engine
    forwards                 of the verifier, after prefill
    drafted, verified, accepted
                             draft tokens that were made, that the verifier looked at, that it kept
    sources                  the same for each draft source, by name
    mixed_numerics           true where nodes of unlike arithmetic computed parts of the answer
    moved                    kinds of lines that were taken out of the way of the prefix cache
    task                     of a request that names a task: the model that it got, and why

All but `moved` and `task` is absent when a stop string ended the answer, since the engine then
gives no account, and for several answers to one request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json.encoder import encode_basestring
from typing import Any, Generic, TypeVar

from kakeya.backends.request import ChatRequest, CompletionRequest
from kakeya.core.errors import KakeyaError
from kakeya.gateway.answer import Answer, ShownLogprob
from kakeya.gateway.http.edge import envelope
from kakeya.gateway.reply import EVENT_STREAM, AnswerHead
from kakeya.generation.frames import SourceUsage, Usage
from kakeya.text.tools.answer import Part, Said, Thought, ToolCall

_DONE = b"data: [DONE]\n\n"
_SLOT = "\ue000"
_Asked = TypeVar("_Asked", ChatRequest, CompletionRequest)


def compact(value: object) -> bytes:
    """Write JSON without spaces, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """Write one server-sent event."""
    return b"data: " + compact(value) + b"\n\n"


def comment(waits_for: str) -> bytes:
    """Write a comment for a stream without events; "" = no load is waited for.

    No empty line ends it: openai's client would take that for an event, where one had an id before.
    """
    said = " ".join(waits_for.split())
    return f": waiting: {said}\n".encode() if said else b": waiting\n"


class _ChunkReply(Generic[_Asked]):
    """What chats and completions have in common."""

    head: AnswerHead
    content_type = EVENT_STREAM
    _object: str
    _chunk_object: str

    def __init__(self, asked: _Asked, *, include_usage: bool) -> None:
        self.asked: _Asked = asked
        self._include_usage = include_usage
        self._has_logprobs = asked.params.top_logprobs is not None
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Why each answer ended, the account if it was asked for, and the end of the stream."""
        last = b"".join(
            self._chunk(
                one.row,
                self._delta(None),
                logprobs=self._logprobs(one),
                finish_reason=one.finish_reason or "length",
            )
            for one in answers
        )
        if self._include_usage:
            last += event({**self._head(self._chunk_object), "choices": [], **self._usage(answers)})
        return last + _DONE

    def failure(self, error: KakeyaError) -> bytes:
        """An event that clients raise as an error."""
        return b"data: " + envelope(error) + b"\n\n"

    def keepalive(self, waits_for: str) -> bytes:
        """A comment."""
        return comment(waits_for)

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, object]:
        """The body."""
        return {
            **self._head(self._object),
            "choices": [
                {
                    "index": one.row,
                    **self._message(one),
                    "logprobs": self._logprobs(one),
                    "finish_reason": one.finish_reason,
                }
                for one in answers
            ],
            **self._usage(answers),
        }

    def _usage(self, answers: Sequence[Answer]) -> dict[str, object]:
        first = answers[:: self.asked.params.rows]  # the others begin with what it computed
        cached = sum(one.cached_tokens for one in first)
        usage = usage_body(answers, self.head.prompt_tokens, cached)
        return {"usage": with_head(usage, self.head)}

    def part(self, answer: Answer, part: Part) -> bytes:
        """A chunk."""
        if not isinstance(part, Said):
            return self._beside(answer, part)
        around = self._around.get(answer.row)
        if around is None:
            if self._has_logprobs:
                delta = self._delta(part.text)
                return self._chunk(answer.row, delta, logprobs=self._logprobs(answer))
            before, after = self._chunk(answer.row, self._delta(_SLOT)).split(compact(_SLOT))
            around = self._around[answer.row] = before, after
        return around[0] + encode_basestring(part.text).encode() + around[1]

    def _beside(self, answer: Answer, part: Thought | ToolCall) -> bytes:
        """A chunk of what is no text."""
        raise NotImplementedError

    def _chunk(
        self,
        row: int,
        choice: dict[str, object],
        *,
        logprobs: dict[str, object] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        finish = {"logprobs": logprobs, "finish_reason": finish_reason}
        whole = {"index": row, **choice, **finish}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._head(self._chunk_object), "choices": [whole], **usage})

    def _head(self, kind: str) -> dict[str, object]:
        head = self.head
        return {
            "id": head.answer_id,
            "object": kind,
            "created": head.created_at,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _delta(self, text: str | None) -> dict[str, object]:
        """What a chunk adds; None = nothing."""
        raise NotImplementedError

    def _message(self, answer: Answer) -> dict[str, object]:
        raise NotImplementedError

    def _logprobs(self, answer: Answer) -> dict[str, object] | None:
        raise NotImplementedError


class ChatReply(_ChunkReply[ChatRequest]):
    """An answer of POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """The role of each answer."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(one.row, {"delta": role}) for one in answers)

    def _beside(self, answer: Answer, part: Thought | ToolCall) -> bytes:
        if isinstance(part, Thought):
            return self._chunk(answer.row, {"delta": {"reasoning_content": part.text}})
        calls = [{"index": part.index, **_call(part)}]
        return self._chunk(answer.row, {"delta": {"tool_calls": calls}})

    def _delta(self, text: str | None) -> dict[str, object]:
        return {"delta": {} if text is None else {"content": text}}

    def _message(self, answer: Answer) -> dict[str, object]:
        text = answer.text
        message: dict[str, object] = {
            "role": "assistant",
            "content": text if text or not answer.calls else None,
            "refusal": None,
        }
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {"message": message}

    def _logprobs(self, answer: Answer) -> dict[str, object] | None:
        tokens = answer.take_logprobs() if self._has_logprobs else []
        if not tokens:
            return None
        return {"content": logprob_bodies(tokens), "refusal": None}


class CompletionReply(_ChunkReply[CompletionRequest]):
    """An answer of POST /v1/completions."""

    id_prefix = "cmpl-"
    _object = _chunk_object = "text_completion"

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """Nothing: a completion opens with its text."""
        return b""

    def _beside(self, answer: Answer, part: Thought | ToolCall) -> bytes:
        """Nothing: a prompt of its caller's own asks for neither."""
        return b""

    def _delta(self, text: str | None) -> dict[str, object]:
        return {"text": text or ""}

    def _message(self, answer: Answer) -> dict[str, object]:
        return {"text": answer.text}

    def _logprobs(self, answer: Answer) -> dict[str, object] | None:
        tokens = answer.take_logprobs() if self._has_logprobs else []
        if not tokens:
            return None
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{top.text: top.logprob for top in one.top} for one in tokens],
        }


def usage_body(
    answers: Sequence[Answer], prompt_tokens: int, cached_tokens: int
) -> dict[str, object]:
    """The `usage` object."""
    completion_tokens = sum(one.completion_tokens for one in answers)
    body: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in answers),
            "accepted_prediction_tokens": sum(one.usage.accepted for one in answers if one.usage),
        },
    }
    if len(answers) == 1 and answers[0].usage is not None:
        body["kakeya"] = account(answers[0].usage)
    return body


def with_head(usage: dict[str, object], head: AnswerHead) -> dict[str, object]:
    """The `usage` object, and under `kakeya` the lines that were moved and the task's choice, if
    there are any."""
    told = usage.get("kakeya")
    own = dict(told) if isinstance(told, dict) else {}
    if head.moved:
        own["moved"] = list(head.moved)
    if head.task is not None:
        own["task"] = head.task.describe()
    return {**usage, "kakeya": own} if own else usage


def account(usage: Usage) -> dict[str, object]:
    """What an answer took, in our own words; see above."""
    return {
        "prefill_ms": round(usage.prefill_s * 1000, 3),
        "total_ms": round(usage.total_s * 1000, 3),
        "forwards": usage.forwards,
        "drafted": usage.drafted,
        "verified": usage.verified,
        "accepted": usage.accepted,
        "sources": [_source(source) for source in usage.sources],
        **({"mixed_numerics": True} if usage.mixed_numerics else {}),
    }


def _source(source: SourceUsage) -> dict[str, Any]:
    return asdict(source) | {"mean_wait_ms": round(source.mean_wait_ms, 3)}


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def logprob_bodies(tokens: Sequence[ShownLogprob]) -> list[dict[str, object]]:
    """Tokens with their logprobs, each with the likeliest ones in its place."""
    return [
        _token_body(one) | {"top_logprobs": [_token_body(top) for top in one.top]} for one in tokens
    ]


def _token_body(one: ShownLogprob) -> dict[str, object]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.raw)}
