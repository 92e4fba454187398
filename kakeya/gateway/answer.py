"""One answer in the making: frames in, parts and a finish reason out. Sans-I/O.

The stop token is no text. A stop string cuts exactly before itself, wherever the frames were cut,
and the token that completes it is the last one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import assert_never

from kakeya.generation.frames import Done, Frame, Progress, StopReason, TokenLogprob, Tokens, Usage
from kakeya.text.detokenizer import Detokenizer
from kakeya.text.stops import StopMatcher
from kakeya.text.tools.answer import (
    AnswerPart,
    AnswerReader,
    FinishReason,
    Part,
    Said,
    Thought,
    ToolCall,
)
from kakeya.text.tools.calls import Called


@dataclass(frozen=True, slots=True)
class ShownLogprob:
    """A token of an answer as text and bytes, and its logarithm of probability; `top` are the
    likeliest tokens in its place, themselves without `top`."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[ShownLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SaidTokens(Said):
    """Text of an answer with logprobs, with the tokens that settled it.

    A token whose text is held back, since it may begin a mark or a stop string, comes with the text
    that it is found to be. Tokens of thoughts and of calls come with no text.
    """

    logprobs: tuple[ShownLogprob, ...]


class Answer:
    """The parts of one answer so far. `finish_reason` is set at their end.

    `usage` is the engine's account; None when a stop string ended the answer before it, and where
    no engine of this node answers. `cached_tokens` are tokens of the prompt with KV from earlier
    requests. `row` counts the answers of one request from 0.
    """

    def __init__(self, row: int = 0) -> None:
        self.row = row
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.usage: Usage | None = None
        self.calls: list[ToolCall] = []
        self._parts: list[Part] = []

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts, among those of the completion."""
        return 0

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" = none did."""
        return ""

    @property
    def text(self) -> str:
        """The answer, without thoughts and calls."""
        return "".join(part.text for part in self._parts if isinstance(part, Said))

    @property
    def thoughts(self) -> str:
        """The thoughts before and between the text."""
        return "".join(part.text for part in self._parts if isinstance(part, Thought))

    @property
    def has_parts(self) -> bool:
        """Whether there are any parts yet."""
        return bool(self._parts)

    @property
    def parts(self) -> Sequence[Part]:
        """The parts so far, in their order; neighbours of one kind of text are one."""
        whole: list[Part] = []
        for kind, group in groupby(self._parts, type):
            found = list(group)
            text = "".join(part.text for part in found if not isinstance(part, ToolCall))
            if kind is ToolCall:
                whole += found
            elif kind is SaidTokens:
                told = [part.logprobs for part in found if isinstance(part, SaidTokens)]
                whole.append(SaidTokens(text, tuple(chain.from_iterable(told))))
            else:
                whole.append(Thought(text) if kind is Thought else Said(text))
        return whole

    def take_logprobs(self) -> list[ShownLogprob]:
        """The tokens since the last time, with their logprobs if these were asked for."""
        return []


class GeneratedAnswer(Answer):
    """The answer of one generation of an engine, of whose frames it is made."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: StopMatcher | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        reader: AnswerReader | None = None,
        draw_call_id: Callable[[], str] = str,
        has_one_call: bool = False,
        bytes_of: Callable[[int], bytes] | None = None,
        row: int = 0,
    ) -> None:
        """`reader` finds thoughts and calls; None = the text has none. With `has_one_call` the
        first call ends the answer. `bytes_of` a token are shown with its logprob."""
        super().__init__(row)
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._reader = reader
        self._draw_call_id = draw_call_id
        self._has_one_call = has_one_call
        self._bytes_of = bytes_of
        self._logprobs: list[ShownLogprob] = []
        self._unsettled: list[ShownLogprob] = []  # of text that is in no part yet
        self._is_told = False  # whether tokens come with their logprobs

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts, among those of the completion."""
        return 0 if self._reader is None else self._reader.thought_tokens

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" = none did."""
        return "" if self._stops is None else self._stops.matched

    def take(self, frame: Frame) -> Sequence[Part]:
        """Take the next frame; returns the parts that it adds, none of them empty."""
        match frame:
            case Tokens():
                parts = self._add_told(frame) if frame.logprobs else self._add(frame.token_ids)
            case Progress():
                self.cached_tokens = frame.cached_tokens
                return ()
            case Done():
                parts = self._end(frame)
            case _:
                assert_never(frame)
        self._parts += parts
        return parts

    def take_logprobs(self) -> list[ShownLogprob]:
        """The tokens since the last time, with their logprobs if these were asked for."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _add_told(self, frame: Tokens) -> Sequence[Part]:
        """Add tokens that come with their logprobs, of which those of the answer are kept."""
        self._is_told = True
        parts: list[Part] = []
        for token_id, found in zip(frame.token_ids, frame.logprobs, strict=True):
            thought_before = self.reasoning_tokens
            added = self._add((token_id,))
            if token_id not in self._stop_token_ids:
                shown = self._shown(token_id, found)
                self._logprobs.append(shown)
                if self.reasoning_tokens == thought_before:
                    self._unsettled.append(shown)
                else:
                    self._unsettled.clear()
            parts += self._with_tokens(added)
            if self.finish_reason is not None:
                break
        return parts

    def _with_tokens(self, parts: Sequence[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Said):
                told.append(SaidTokens(part.text, self._settled_by(part.text)))
            else:
                told.append(part)
                self._unsettled.clear()
        return told

    def _settled_by(self, text: str) -> tuple[ShownLogprob, ...]:
        """Take the tokens up to the end of a text, which blanks that are not shown may precede."""
        wanted, raw, count = text.encode(), b"", 0
        while count < len(self._unsettled) and wanted not in raw:
            raw += self._unsettled[count].raw
            count += 1
        taken = tuple(self._unsettled[:count])
        del self._unsettled[:count]
        return taken

    def _add(self, token_ids: tuple[int, ...]) -> Sequence[Part]:
        if self._stops is None and self._reader is None:
            self.completion_tokens += len(token_ids)
            is_stopped = token_ids[-1] in self._stop_token_ids
            text = self._detokenizer.feed(token_ids[:-1] if is_stopped else token_ids)
            if not text:
                return ()
            return (Said(text),)
        parts: list[Part] = []
        # One by one: tokens that a step committed behind a stop string or the last call are no part
        # of the answer, and thoughts are counted.
        for token_id in token_ids:
            self.completion_tokens += 1
            is_shown = token_id not in self._stop_token_ids
            text = self._detokenizer.feed((token_id,)) if is_shown else ""
            if self._stops is not None:
                text = self._stops.feed(text + self._stops.sign(token_id))
            parts += self._read(text, 1)
            is_stopped = self._stops is not None and self._stops.is_stopped
            if is_stopped or self.finish_reason is not None:
                parts += self._read_rest()
                self.finish_reason = "tool_calls" if self.calls else "stop"
                break
        return parts

    def _read(self, text: str, tokens: int = 0) -> list[Part]:
        if self._reader is not None:
            return self._kept(self._reader.feed(text, tokens))
        return self._kept((Said(text),)) if text else []

    def _read_rest(self) -> list[Part]:
        return [] if self._reader is None else self._kept(self._reader.finish())

    def _kept(self, found: Sequence[AnswerPart]) -> list[Part]:
        parts: list[Part] = []
        for one in found:
            match one:
                case Said() | Thought():
                    parts.append(one)
                case Called():
                    if self._has_one_call and self.calls:
                        continue
                    call_id = one.call_id or self._draw_call_id()
                    call = ToolCall(len(self.calls), one.name, one.arguments, call_id)
                    self.calls.append(call)
                    parts.append(call)
                    if self._has_one_call:
                        self.finish_reason = "tool_calls"
        return parts

    def _end(self, done: Done) -> Sequence[Part]:
        self.usage = done.usage
        self.cached_tokens = done.usage.cached_tokens
        reason: FinishReason = "stop" if done.reason is StopReason.STOP_TOKEN else "length"
        rest = self._detokenizer.finish()
        if self._stops is not None:
            rest = self._stops.feed(rest)
            if self._stops.is_stopped:
                reason = "stop"
            rest += self._stops.finish()
        parts = [*self._read(rest), *self._read_rest()]
        is_called = reason == "stop" and self.calls
        self.finish_reason = "tool_calls" if is_called else reason
        return self._with_tokens(parts) if self._is_told else parts

    def _shown(self, token_id: int, found: TokenLogprob) -> ShownLogprob:
        top = tuple(self._token(one, logprob) for one, logprob in found.top)
        return ShownLogprob(*self._text_of(token_id), found.logprob, top)

    def _token(self, token_id: int, logprob: float) -> ShownLogprob:
        return ShownLogprob(*self._text_of(token_id), logprob)

    def _text_of(self, token_id: int) -> tuple[str, bytes]:
        raw = self._bytes_of(token_id) if self._bytes_of else b""
        return raw.decode(errors="replace"), raw
