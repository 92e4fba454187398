"""The items of one answer, and the events of a stream that tell of them.

    reasoning       thoughts, as reasoning_text
    message         text, as output_text; its tokens with their logprobs, where these were asked for
    function_call   a call; its arguments come in one delta

One item is open at a time. An answer that is sent whole is built by the same steps, so both forms
hold the same items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Literal

from kakeya.gateway.answer import SaidTokens
from kakeya.gateway.openai.reply import compact, logprob_bodies
from kakeya.gateway.openai.responses.tools import FunctionName
from kakeya.text.tools.answer import Part, Said, ToolCall

ItemStatus = Literal["completed", "incomplete"]
_Kind = Literal["message", "reasoning"]
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_CONTENT = {"message": "output_text", "reasoning": "reasoning_text"}
FIRST_EVENTS = ("response.created", "response.in_progress")


def numbered_event(number: int, kind: str, **fields: object) -> bytes:
    """Write one event of a stream."""
    body = compact({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


class OutputItems:
    """The items of one answer so far. `next_number` is that of the next event."""

    def __init__(self, response_id: str, names: Mapping[str, FunctionName]) -> None:
        """`names` are those of functions, by what the model calls them."""
        self.items: list[dict[str, object]] = []
        self.next_number = len(FIRST_EVENTS)
        self._tail = response_id.partition("_")[2]
        self._names = names
        self._open: _Kind | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, object]] = []
        self._delta = b""

    def take(self, part: Part) -> bytes:
        """Add a part; returns its events."""
        if isinstance(part, ToolCall):
            return self._close("completed") + self._call(part)
        kind: _Kind = "message" if isinstance(part, Said) else "reasoning"
        opened = b"" if self._open == kind else self._close("completed") + self._begin(kind)
        self._texts.append(part.text)
        if isinstance(part, SaidTokens):
            told = logprob_bodies(part.logprobs)
            self._logprobs += told
            kind_of_event = "response.output_text.delta"
            return opened + self._content_event(kind_of_event, delta=part.text, logprobs=told)
        return opened + self._text_delta(part.text)

    def finish(self, status: ItemStatus) -> bytes:
        """End the last item; returns its events.

        A complete answer has a text or a call: agents ask again and again for one without.
        """
        has_answer = any(item["type"] != "reasoning" for item in self.items)
        if status == "completed" and not has_answer:
            return self._close("completed") + self._begin("message") + self._close("completed")
        return self._close(status)

    def _begin(self, kind: _Kind) -> bytes:
        self._open, self._texts, self._logprobs = kind, [], []
        own: dict[str, object] = {"role": "assistant"} if kind == "message" else {"summary": []}
        added = self._add({"type": kind, "status": "in_progress", **own, "content": []})
        self._delta = self._delta_head()
        return added + self._content_event("response.content_part.added", part=self._part(""))

    def _close(self, status: ItemStatus) -> bytes:
        kind = self._open
        if kind is None:
            return b""
        text = "".join(self._texts)
        done = f"response.{_CONTENT[kind]}.done"
        events = self._content_event(done, text=text, **self._told(self._logprobs))
        events += self._content_event("response.content_part.done", part=self._part(text))
        self._open = None
        return events + self._done({"content": [self._part(text)], "status": status})

    def _call(self, call: ToolCall) -> bytes:
        origin = self._names.get(call.name, FunctionName("", call.name))
        named = {"call_id": call.call_id, "name": origin.name}
        if origin.namespace:
            named["namespace"] = origin.namespace
        events = self._add(
            {"type": "function_call", "status": "in_progress", **named, "arguments": ""}
        )
        for kind, field in (("delta", "delta"), ("done", "arguments")):
            events += self._item_event(
                f"response.function_call_arguments.{kind}", **{field: call.arguments}
            )
        return events + self._done({"arguments": call.arguments, "status": "completed"})

    def _add(self, item: dict[str, object]) -> bytes:
        index = len(self.items)
        item = {"id": f"{_PREFIXES[str(item['type'])]}{self._tail}{index:03}", **item}
        self.items.append(item)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, fields: Mapping[str, object]) -> bytes:
        item = self.items[-1] = {**self.items[-1], **fields}
        index = len(self.items) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def _part(self, text: str) -> dict[str, object]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _place(self) -> dict[str, object]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, **self._place(), **fields)

    def _content_event(self, kind: str, **fields: object) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self.next_number = self.next_number, self.next_number + 1
        return numbered_event(number, kind, **fields)

    def _told(self, logprobs: Sequence[object]) -> dict[str, object]:
        return {"logprobs": logprobs} if self._open == "message" else {}

    def _delta_head(self) -> bytes:
        """The constant beginning of the deltas of one item, up to the text itself."""
        kind = f"response.{_CONTENT[str(self._open)]}.delta"
        head = compact({"type": kind, **self._place(), "content_index": 0, **self._told(())})
        return b"event: " + kind.encode() + b"\ndata: " + head[:-1] + b',"delta":'

    def _text_delta(self, text: str) -> bytes:
        number, self.next_number = self.next_number, self.next_number + 1
        escaped = encode_basestring(text).encode()
        return self._delta + escaped + b',"sequence_number":%d}\n\n' % number
