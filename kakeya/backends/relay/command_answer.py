"""What a command is given of a request, and what its output is as an answer. Sans-I/O.

The output is text in UTF-8. Line ends behind all of it are no part of the answer, and a stop string
of the request ends it. Calls of tools are read where the request shows tools: as JSON in marks, as
`text.tools.plain` asks for them. A program counts no tokens and follows no sampling parameters.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kakeya.backends.relay.backend import Finished
from kakeya.backends.request import ChatRequest, Request
from kakeya.core.errors import Unsupported
from kakeya.core.units import MIB
from kakeya.text.plain import plain_prompt
from kakeya.text.stops import StopMatcher
from kakeya.text.tools.answer import AnswerPart, AnswerReader, FinishReason, Part, ToolCall
from kakeya.text.tools.calls import Called
from kakeya.text.tools.families import JSON_FAMILY

MOST_BYTES = 16 * MIB
"""Of an output; it is cut there."""


def prompt_of(asked: Request) -> str:
    """What the program reads."""
    if isinstance(asked, ChatRequest):
        return plain_prompt(asked.chat)
    (prompt,) = asked.prompts
    assert isinstance(prompt, str), "token ids were refused"
    return prompt


def unfollowed(asked: Request, who: str) -> list[str]:
    """The names of the parameters that a program cannot follow. Raises Unsupported where its
    answer would not have the form that is asked for."""
    params = asked.params
    refused = {"logprobs": params.top_logprobs is not None}
    names = [name for name, given in asdict(params.sampling).items() if given is not None]
    names += ["max_tokens"] * (params.max_tokens is not None)
    names += ["draft_policy"] * bool(params.draft_policy)
    if isinstance(asked, ChatRequest):
        refused[asked.answer_schema_at.partition(".")[0]] = asked.answer_schema is not None
        refused["tool_choice"] = asked.tool_choice.mode == "required"
        names += ["chat_template_kwargs"] * bool(asked.chat.kwargs)
    else:
        refused["prompt"] = not all(isinstance(one, str) for one in asked.prompts)
    if param := next((name for name, is_given in refused.items() if is_given), ""):
        what = "a prompt in token ids" if param == "prompt" else param
        raise Unsupported(
            f"{what} is not supported of {who}, which reads and prints text; leave it out",
            param=param,
        )
    return names


class CommandAnswer:
    """The answer to a request so far. `is_over` once nothing more is wanted of the program."""

    def __init__(self, asked: Request) -> None:
        tools = asked.chat.tools if isinstance(asked, ChatRequest) else ()
        choice = asked.tool_choice if isinstance(asked, ChatRequest) else None
        may_call = choice is not None and choice.mode != "none" and bool(tools)
        self._has_one_call = choice is not None and not choice.is_parallel
        self._reader = AnswerReader(family=JSON_FAMILY if may_call else None, tools=tools)
        self._stops = StopMatcher(asked.params.stop) if asked.params.stop else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line_ends = ""
        self._bytes = 0
        self._calls = 0
        self._reason: FinishReason = "stop"
        self.is_over = False

    def feed(self, output: bytes) -> Iterator[Part]:
        """Take output; yields the parts that it adds."""
        self._bytes += len(output)
        if self._bytes > MOST_BYTES:
            self._reason, self.is_over = "length", True
            output = output[: MOST_BYTES - self._bytes]
        yield from self._text(self._decoder.decode(output))

    def finish(self) -> Iterator[Part | Finished]:
        """The rest, and the end."""
        yield from self._text(self._decoder.decode(b"", final=True))
        if self._stops is not None:
            yield from self._parts(self._reader.feed(self._stops.finish()))
        yield from self._parts(self._reader.finish())
        reason = "tool_calls" if self._calls and self._reason == "stop" else self._reason
        matched = "" if self._stops is None else self._stops.matched
        yield Finished(reason=reason, stop_string=matched)

    def _text(self, text: str) -> Iterator[Part]:
        text = self._line_ends + text
        shown = text.rstrip("\r\n")
        self._line_ends = text[len(shown) :]
        if self._stops is not None:
            shown = self._stops.feed(shown)
            self.is_over |= self._stops.is_stopped
        yield from self._parts(self._reader.feed(shown))

    def _parts(self, found: Sequence[AnswerPart]) -> Iterator[Part]:
        for one in found:
            if not isinstance(one, Called):
                yield one
            elif not (self._has_one_call and self._calls):
                yield ToolCall(self._calls, one.name, one.arguments, one.call_id)
                self._calls += 1
                self.is_over |= self._has_one_call
