"""Ollama's dialect, outbound: one JSON object a line, the last with `done` and the account; or one
object that holds all.

Durations are in nanoseconds, as the engine gives them: 0 where a stop string ended the answer, as
there is no account then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import ClassVar

from kakeya.backends.request import ChatRequest, CompletionRequest
from kakeya.core.errors import KakeyaError
from kakeya.gateway.answer import Answer
from kakeya.gateway.http.edge import envelope
from kakeya.gateway.openai.reply import compact, logprob_bodies
from kakeya.gateway.reply import LINE_STREAM, AnswerHead
from kakeya.text.tools.answer import Part, Thought, ToolCall

_SLOT = "\ue000"
_NS = 1_000_000_000


class _Lines:
    """What chats and prompts have in common."""

    id_prefix = "ollama-"
    content_type = LINE_STREAM
    head: AnswerHead
    _path: ClassVar[str]

    def __init__(self, asked: ChatRequest | CompletionRequest) -> None:
        self.asked = asked
        self._has_logprobs = asked.params.top_logprobs is not None
        self._around: tuple[bytes, bytes] | None = None

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """Nothing: each line says all that it needs."""
        return b""

    def part(self, answer: Answer, part: Part) -> bytes:
        """A line."""
        if isinstance(part, ToolCall):
            return self._line(self._shown("", "", [part]))
        if isinstance(part, Thought):
            return self._line(self._shown("", part.text, ()))
        if self._has_logprobs:
            return self._line(self._shown(part.text, "", ()) | self._logprobs(answer))
        if self._around is None:
            before, after = self._line(self._shown(_SLOT, "", ())).split(compact(_SLOT))
            self._around = before, after
        return self._around[0] + encode_basestring(part.text).encode() + self._around[1]

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The line that ends the answer."""
        last = self._shown("", "", ()) | (self._logprobs(answers[0]) if answers else {})
        return self._line(last, self._ending(answers))

    def failure(self, error: KakeyaError) -> bytes:
        """A line that clients raise as an error."""
        return envelope(error, self._path) + b"\n"

    def keepalive(self, waits_for: str) -> bytes:
        """Nothing: clients read every line as a part."""
        return b""

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, object]:
        """The body."""
        ending = self._ending(answers)
        if not answers:
            return self._body(self._shown("", "", ()), ending)
        (answer,) = answers
        shown = self._shown(answer.text, answer.thoughts, answer.calls)
        return self._body(shown | self._logprobs(answer), ending)

    def _shown(self, text: str, thoughts: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        raise NotImplementedError

    def _line(
        self, shown: Mapping[str, object], ending: Mapping[str, object] | None = None
    ) -> bytes:
        return compact(self._body(shown, {"done": False} if ending is None else ending)) + b"\n"

    def _body(self, shown: Mapping[str, object], ending: Mapping[str, object]) -> dict[str, object]:
        created_at = datetime.fromtimestamp(self.head.created_at, UTC).isoformat()
        return {"model": self.head.model, "created_at": created_at, **shown, **ending}

    def _ending(self, answers: Sequence[Answer]) -> dict[str, object]:
        if not answers:
            return {"done": True, "done_reason": "load"}
        (answer,) = answers
        usage = answer.usage
        total_s, prefill_s = (usage.total_s, usage.prefill_s) if usage is not None else (0.0, 0.0)
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": round(total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": self.head.prompt_tokens,
            "prompt_eval_duration": round(prefill_s * _NS),
            "eval_count": answer.completion_tokens,
            "eval_duration": round((total_s - prefill_s) * _NS),
        }

    def _logprobs(self, answer: Answer) -> dict[str, object]:
        tokens = answer.take_logprobs() if self._has_logprobs else []
        return {"logprobs": logprob_bodies(tokens)} if tokens else {}


class ChatLines(_Lines):
    """An answer of POST /api/chat."""

    _path = "/api/chat"

    def _shown(self, text: str, thoughts: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"message": message}


class GenerateLines(_Lines):
    """An answer of POST /api/generate."""

    _path = "/api/generate"

    def _shown(self, text: str, thoughts: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        response: dict[str, object] = {"response": text}
        return response | ({"thinking": thoughts} if thoughts else {})


def _call(call: ToolCall) -> dict[str, object]:
    arguments = json.loads(call.arguments)
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return {"id": call.call_id, "function": function}
