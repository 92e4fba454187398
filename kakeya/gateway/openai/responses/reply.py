"""Answers of POST /v1/responses: whole bodies and events, numbered from 0.

Beside OpenAI's fields, `kakeya.warnings` of a response tells what of the request was left out, and
`usage.kakeya` what the answer took, as in a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kakeya.backends.request import ChatRequest
from kakeya.core.errors import KakeyaError
from kakeya.gateway.answer import Answer
from kakeya.gateway.openai.reply import account, comment, with_head
from kakeya.gateway.openai.responses.output import (
    FIRST_EVENTS,
    ItemStatus,
    OutputItems,
    numbered_event,
)
from kakeya.gateway.openai.responses.tools import FunctionName
from kakeya.gateway.reply import EVENT_STREAM, AnswerHead
from kakeya.text.tools.answer import Part

Keep = Callable[[Mapping[str, object]], None]
"""Keeps a response for later requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A chat that was asked for as a response.

    `echo` are the fields of the request that its response repeats; `names` as of `OutputItems`;
    `keep` None = the response is not kept. `body` is the whole request, with the items before it,
    with which any node goes on with its answer.
    """

    chat: ChatRequest
    echo: Mapping[str, object]
    names: Mapping[str, FunctionName]
    body: Mapping[str, object]
    keep: Keep | None = None


class ResponseReply:
    """An answer of POST /v1/responses."""

    id_prefix = "resp_"
    content_type = EVENT_STREAM

    def __init__(self, request: ResponseRequest) -> None:
        self.asked = request.chat
        self._request = request
        # Also that of a stream which fails before its prompt is read.
        self.head = AnswerHead(
            answer_id=self.id_prefix, created_at=0, model=self.asked.params.model, prompt_tokens=0
        )
        self._streamed: OutputItems | None = None  # None before the first part

    @property
    def is_background(self) -> bool:
        """Whether it is made without the connection that asks for it."""
        return self._request.echo["background"] is True

    @property
    def body(self) -> Mapping[str, object]:
        """The request as another node needs it."""
        return self._request.body

    def begun(self, response_id: str, created_at: int) -> Mapping[str, object]:
        """The response before anything is done for it; `created_at` in wall seconds."""
        self.head = replace(self.head, answer_id=response_id, created_at=created_at)
        return self._body("queued", ())

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """The response without items."""
        self._items()
        body = self._body("in_progress", ())
        return b"".join(
            numbered_event(number, kind, response=body) for number, kind in enumerate(FIRST_EVENTS)
        )

    def part(self, answer: Answer, part: Part) -> bytes:
        """The events of a part."""
        return self._items().take(part)

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The end of the last item, and the response."""
        items = self._items()
        (answer,) = answers
        last = items.finish(_status(answer))
        body = self._finished(answer, items)
        return last + numbered_event(items.next_number, f"response.{body['status']}", response=body)

    def failure(self, error: KakeyaError) -> bytes:
        """The response with the error; of a stream without parts also its beginning."""
        opening = self.opening(()) if self._streamed is None else b""
        items = self._items()
        told = {"code": error.code, "message": error.message}
        body = {**self._body("failed", items.items), "error": told}
        return opening + numbered_event(items.next_number, "response.failed", response=body)

    def keepalive(self, waits_for: str) -> bytes:
        """A comment."""
        return comment(waits_for)

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, object]:
        """The response."""
        (answer,) = answers
        items = OutputItems(self.head.answer_id, self._request.names)
        for part in answer.parts:
            items.take(part)
        items.finish(_status(answer))
        return self._finished(answer, items)

    def _items(self) -> OutputItems:
        if self._streamed is None:
            self._streamed = OutputItems(self.head.answer_id, self._request.names)
        return self._streamed

    def _finished(self, answer: Answer, items: OutputItems) -> dict[str, object]:
        status = _status(answer)
        body = self._body(status, items.items)
        body["usage"] = self._usage(answer)
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._request.keep is not None:
            self._request.keep(body)
        return body

    def _body(self, status: str, items: Sequence[Mapping[str, object]]) -> dict[str, object]:
        body: dict[str, object] = {
            "id": self.head.answer_id,
            "object": "response",
            "created_at": self.head.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._request.echo,
            "model": self.head.model,
            "output": list(items),
            "usage": None,
        }
        if left_out := self.asked.params.left_out:
            body["kakeya"] = {"warnings": list(left_out)}
        return body

    def _usage(self, answer: Answer) -> dict[str, object]:
        prompt_tokens, completion_tokens = self.head.prompt_tokens, answer.completion_tokens
        usage: dict[str, object] = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if answer.usage is not None:
            usage["kakeya"] = account(answer.usage)
        return with_head(usage, self.head)


def _status(answer: Answer) -> ItemStatus:
    return "incomplete" if answer.finish_reason in ("length", None) else "completed"
