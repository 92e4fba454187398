"""The form of an answer: each dialect reads a request and writes what comes of it.

A dialect is a function from a body, and the share of its caller, to a `Reply`. The gateway
decodes and hands the parts of the answers over as they settle; a reply only writes them. So a
dialect knows no engine, and the gateway knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kakeya.backends.request import Request
from kakeya.core.errors import KakeyaError
from kakeya.dispatch.tasks import TaskChoice
from kakeya.gateway.answer import Answer
from kakeya.text.tools.answer import Part

EVENT_STREAM = b"text/event-stream; charset=utf-8"
LINE_STREAM = b"application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before its first token.

    `prompt_tokens` are those of all prompts. `created_at` is in seconds of the wall clock.
    `fingerprint` names the weights and the numerics that compute it. `moved` are the kinds of lines
    that were taken out of the way of the prefix cache. `task` is the choice of `model`, None = the
    request names it.
    """

    answer_id: str
    created_at: int
    model: str
    prompt_tokens: int
    fingerprint: str = ""
    moved: tuple[str, ...] = ()
    task: TaskChoice | None = None


class Reply(Protocol):
    """A request, and the form of its answer. `head` is set before anything is written."""

    head: AnswerHead

    @property
    def asked(self) -> Request:
        """The request."""
        ...

    @property
    def id_prefix(self) -> str:
        """What the id of an answer begins with, the separator included."""
        ...

    @property
    def content_type(self) -> bytes:
        """Of a streamed answer."""
        ...

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """The beginning of a stream; sent with the first part, or before it."""
        ...

    def part(self, answer: Answer, part: Part) -> bytes:
        """A part of one of the answers; b"" = nothing is sent for it."""
        ...

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The end of a stream, of answers that are complete."""
        ...

    def failure(self, error: KakeyaError) -> bytes:
        """The end of a stream that fails."""
        ...

    def keepalive(self, waits_for: str) -> bytes:
        """Bytes for a silent stream, which its client skips; `waits_for` names the load that the
        answer waits for, "" = none."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, object]:
        """The body of complete answers that are not streamed."""
        ...


Dialect = Callable[[Mapping[str, object], str], Reply]
"""Reads a request of a caller, named as by `share_of`. Raises InvalidArgument or Unsupported naming
the parameter."""
