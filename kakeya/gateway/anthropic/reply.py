"""Anthropic's dialect, outbound: whole messages, and named events of a stream.

    message_start, (content_block_start, content_block_delta ..., content_block_stop) ...,
    message_delta, message_stop

A block goes on as long as parts of its kind come; a call is a block of its own. Prompt tokens
that were found in a cache are `cache_read_input_tokens`, and not among `input_tokens`. What is
cached besides costs nothing, so `cache_creation_input_tokens` is 0. `usage.kakeya` is as in
`openai.reply`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring

from kakeya.backends.request import ChatRequest
from kakeya.core.errors import KakeyaError
from kakeya.gateway.answer import Answer
from kakeya.gateway.anthropic.messages import tool_use_id_of
from kakeya.gateway.http.edge import envelope
from kakeya.gateway.openai.reply import account, comment, compact, with_head
from kakeya.gateway.reply import EVENT_STREAM, AnswerHead
from kakeya.text.tools.answer import Part, Said, Thought, ToolCall

PATH = "/v1/messages"
SIGNATURE = "a2FrZXlh"
"""Of all thoughts: nodes take thoughts back without one. Clients want a text that is not empty."""
_SLOT = "\ue000"
_PIECES: Mapping[type[Part], tuple[Mapping[str, str], str]] = {
    Said: ({"type": "text", "text": ""}, "text_delta"),
    Thought: ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta"),
}
"""Of a kind of parts: the block that they are pieces of, as it starts, and their delta."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageReply:
    """An answer of POST /v1/messages."""

    id_prefix = "msg_"
    content_type = EVENT_STREAM
    head: AnswerHead

    def __init__(self, asked: ChatRequest) -> None:
        self.asked = asked
        self._blocks = 0
        self._kind: type[Part] | None = None
        """Of the block that is open."""
        self._around = b"", b""

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """The start of the message, with the count of cached tokens."""
        (answer,) = answers
        return _event({"type": "message_start", "message": self._message(answer)})

    def part(self, answer: Answer, part: Part) -> bytes:
        """A piece of a block, with what ends the block before and starts its own."""
        if isinstance(part, ToolCall):
            opened = self._begin_block(part, _use(part) | {"input": {}})
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            return opened + self._delta(delta) + self._end_block()
        block, kind = _PIECES[type(part)]
        opened = b""
        if self._kind is not type(part):
            opened = self._begin_block(part, block)
            before, after = self._delta({"type": kind, block["type"]: _SLOT}).split(compact(_SLOT))
            self._around = before, after
        before, after = self._around
        return opened + before + encode_basestring(part.text).encode() + after

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Why the answer ended, and the account."""
        (answer,) = answers
        end = {"type": "message_delta", "delta": _ending(answer), "usage": self._usage(answer)}
        stop = _event({"type": "message_stop"})
        return self._end_block() + _event(end) + stop

    def failure(self, error: KakeyaError) -> bytes:
        """An event that clients raise as an error."""
        return b"event: error\ndata: " + envelope(error, PATH) + b"\n\n"

    def keepalive(self, waits_for: str) -> bytes:
        """A ping."""
        return comment(waits_for) + _event({"type": "ping"})

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, object]:
        """The body: the blocks of a stream, in their order."""
        (answer,) = answers
        blocks = [_block(part) for part in answer.parts]
        return self._message(answer) | {"content": blocks, **_ending(answer)}

    def _message(self, answer: Answer) -> dict[str, object]:
        return {
            "id": self.head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer),
        }

    def _usage(self, answer: Answer) -> dict[str, object]:
        cached = answer.cached_tokens
        usage: dict[str, object] = {
            "input_tokens": self.head.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
        }
        if answer.usage is not None:
            usage["kakeya"] = account(answer.usage)
        return with_head(usage, self.head)

    def _begin_block(self, part: Part, block: Mapping[str, object]) -> bytes:
        before = self._end_block()
        self._kind = type(part)
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return before + _event(start)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        signature = self._delta(signed) if self._kind is Thought else b""
        stop = _event({"type": "content_block_stop", "index": self._blocks})
        self._kind = None
        self._blocks += 1
        return signature + stop


def _event(value: Mapping[str, object]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + compact(value) + b"\n\n"


def _block(part: Part) -> dict[str, object]:
    match part:
        case Said():
            return {"type": "text", "text": part.text}
        case Thought():
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        case ToolCall():
            return _use(part) | {"input": json.loads(part.arguments)}


def _use(call: ToolCall) -> dict[str, object]:
    return {"type": "tool_use", "id": tool_use_id_of(call.call_id), "name": call.name}


def _ending(answer: Answer) -> dict[str, object]:
    if answer.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _REASONS[answer.finish_reason or "length"], "stop_sequence": None}
