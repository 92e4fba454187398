"""The streamed answer of OpenAI's API: bytes in, parts of an answer out. Sans-I/O.

Law: the parts' text and the calls do not depend on how the bytes were cut. A call is handed on when
it is whole. An answer that comes as one JSON body, of a service that does not stream, is read as a
stream of one event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.faults import told
from kakeya.core.errors import PeerError, PeerProtocol
from kakeya.core.units import MIB
from kakeya.text.tools.answer import FinishReason, Part, Said, Thought, ToolCall

_MOST_BYTES = 16 * MIB
"""Of one event, or of the calls of an answer."""
_REASONS: Mapping[str, FinishReason] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
"""All others, as a filter of the service's, end an answer as its own end does."""


@dataclass(slots=True)
class _Call:
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class CloudStream:
    """One answer of a service."""

    def __init__(self, service: str, *, is_stream: bool) -> None:
        """Errors call it `service`; `is_stream`: whether events come, or one body."""
        self._who = service
        self._is_stream = is_stream
        self._pending = b""
        self._calls: dict[int, _Call] = {}
        self._given = 0
        self._told = Finished(reason="stop")
        self._reason: str | None = None
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[Part]:
        """Take bytes. Raises PeerError for an error in the stream, PeerProtocol for what is no
        answer."""
        self._pending += data
        if len(self._pending) > _MOST_BYTES:
            raise PeerProtocol(f"{self._who} sent an event of more than {_MOST_BYTES // MIB} MiB")
        if not self._is_stream:
            return
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            yield from self._line(line)

    def finish(self) -> Iterator[Part | Finished]:
        """The rest, at the end of the bytes. Raises as `feed`, and where the answer has no end."""
        rest, self._pending = self._pending, b""
        yield from self._line(rest if self._is_stream else b"data:" + b" ".join(rest.split()))
        if self._reason is None:
            raise PeerProtocol(f"{self._who} ended its answer in the middle")
        yield from self._whole_calls(before=None)
        reason = _REASONS.get(self._reason, "stop")
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        yield replace(self._told, reason=reason)

    def _line(self, line: bytes) -> Iterator[Part]:
        if self._is_over or not line.startswith(b"data:"):
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self._is_over = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            shown = data[:80].decode(errors="replace")
            raise PeerProtocol(f"{self._who} sent {shown!r}; an answer of OpenAI's API is needed")
        yield from self._event(event, data)

    def _event(self, event: Mapping[str, object], data: bytes) -> Iterator[Part]:
        if event.get("error"):
            raise PeerError(f"{self._who} failed: {told(data)[0]}")
        self._take_usage(event.get("usage"))
        choices = event.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict):
            return
        delta = first.get("delta") or first.get("message") or {"content": first.get("text")}
        if isinstance(delta, dict):
            yield from self._delta(delta)
        if isinstance(reason := first.get("finish_reason"), str):
            self._reason = reason

    def _delta(self, delta: Mapping[str, object]) -> Iterator[Part]:
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield Thought(thought)
        for name in ("content", "refusal"):
            if isinstance(said := delta.get(name), str) and said:
                yield Said(said)
        calls = delta.get("tool_calls")
        for at, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                yield from self._piece(at, call)

    def _piece(self, at: int, piece: Mapping[str, object]) -> Iterator[Part]:
        """A piece of a call; the first of one means that those before are whole."""
        index = piece.get("index")
        index = index if isinstance(index, int) else at
        if index not in self._calls:
            yield from self._whole_calls(before=index)
        call = self._calls.setdefault(index, _Call())
        call.call_id = call.call_id or _text(piece.get("id"))
        function = piece.get("function")
        if isinstance(function, dict):
            call.name += _text(function.get("name"))
            call.arguments += _text(function.get("arguments"))
        if sum(len(one.arguments) for one in self._calls.values()) > _MOST_BYTES:
            raise PeerProtocol(f"{self._who} calls with more than {_MOST_BYTES // MIB} MiB")

    def _whole_calls(self, before: int | None) -> Iterator[Part]:
        """The calls that were not given yet, in their order; None = all."""
        for index, call in sorted(self._calls.items())[self._given :]:
            if before is not None and index >= before:
                return
            self._given += 1
            yield ToolCall(self._given - 1, call.name, self._arguments(call), call.call_id)

    def _arguments(self, call: _Call) -> str:
        """The arguments as a JSON object, as all dialects show them."""
        text = call.arguments.strip() or "{}"
        try:
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            shown = text[:80]
            raise PeerProtocol(f"{self._who} calls {call.name!r} with {shown!r}, no JSON object")
        return text

    def _take_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        self._told = Finished(
            reason="stop",
            prompt_tokens=_count(usage, "prompt_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(source: object, name: str) -> int:
    value = source.get(name) if isinstance(source, dict) else None
    return value if type(value) is int and value > 0 else 0
