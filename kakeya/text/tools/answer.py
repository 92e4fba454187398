"""The parts of an answer: what is said, what is thought, and which tools are called. Sans-I/O.

    text <think> thoughts </think> text <tool_call> a call </tool_call> text

Marks part an answer, and blanks on both sides of a mark belong to it. Thoughts stand in front of
all else: their mark behind it is text. A call is read when its end mark has come. Law: the parts do
not depend on how the text was cut into pieces, and no text is lost: a mark whose call cannot be
read, or does not end, is text, and what follows it is read as if it were not there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from kakeya.text.chat import Tool
from kakeya.text.tools.calls import Called, ToolFamily
from kakeya.text.tools.thinking import ThinkingMarks

_MOST_ENDS = 8
"""End marks that may stand inside strings of one call: each costs another look at it."""
_MOST_UNREAD = 16
"""Behind so many calls that cannot be read, marks are text: an answer of nothing but marks must not
keep the event loop."""
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Said:
    """Text of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the thoughts in front of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer. `index` counts the answer's calls from 0; `arguments` is JSON
    text."""

    index: int
    name: str
    arguments: str
    call_id: str


AnswerPart = Said | Thought | Called
"""What a text is made of."""
Part = Said | Thought | ToolCall
"""What an answer is made of."""
FinishReason = Literal["stop", "length", "tool_calls"]


class AnswerReader:
    """Parts the text of one answer as it settles.

    `shown` are the special tokens whose text the reader needs: the detokenizer must show them.
    """

    def __init__(
        self,
        *,
        thinking: ThinkingMarks | None = None,
        is_thinking: bool = False,
        family: ToolFamily | None = None,
        tools: Sequence[Tool] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`is_thinking`: whether the prompt ends inside thoughts."""
        self.shown = shown
        self.thought_tokens = 0
        """Tokens of thoughts, with their marks, among those that were fed with a count."""
        self._thinking = thinking
        self._family = family
        self._tools = tools
        self._openings = [mark.start for mark in (thinking, family) if mark is not None]
        firsts = "".join(re.escape(mark[0]) for mark in self._openings)
        self._suspect = re.compile(f"[{firsts}]|\\s\\Z" if firsts else "(?!)")
        """Finds what may begin a mark."""
        self._may_think = thinking is not None
        """Whether thoughts may still come: nothing was said or called."""
        self._mode: Literal["text", "thoughts", "call"] = "thoughts" if is_thinking else "text"
        self._is_fresh = is_thinking
        """Whether a mark stands right in front of the text, so that blanks are the mark's."""
        self._held = ""
        """Text in front of which nothing is unsettled; the end of it may begin a mark."""
        self._unread = 0
        self._before_call = ""
        """The mark of the call that is read, and the blanks in front of it."""
        self._call: list[str] = []
        self._tail = ""
        """The end of a call's text, in which an end mark may have begun."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside thoughts."""
        return self._mode == "thoughts"

    def feed(self, piece: str, tokens: int = 0) -> list[AnswerPart]:
        """Add text; returns the parts that are settled by it. A text may come in several parts.

        `tokens` counts the tokens whose text this is, for `thought_tokens`: the count is exact
        where they are fed one by one.
        """
        is_plain = self._mode == "text" and not (self._held or self._is_fresh or self._may_think)
        if is_plain and piece and self._suspect.search(piece) is None:
            return [Said(piece)]  # nearly always, and for each token: as `_read_text` would
        was_thinking = self.is_thinking
        parts: list[AnswerPart] = []
        self._read(piece, parts)
        if was_thinking or self.is_thinking:
            self.thought_tokens += tokens
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the answer; returns the parts that were held back."""
        parts: list[AnswerPart] = []
        while self._mode == "call":
            body, self._mode = self._taken(), "text"
            if self._family is not None and not self._family.end and self._end_call(body, parts):
                return parts
            # What follows the mark may hold a whole call, but only where there is an end mark.
            self._give_back(parts)
            if self._family is not None and self._family.end and self._family.end in body:
                self._read(body, parts)
            else:
                self._held = body
        rest, self._held = self._held, ""
        (self._think if self.is_thinking else self._say)(rest, parts)
        return parts

    def _read(self, piece: str, parts: list[AnswerPart]) -> None:
        text: str | None = self._held + piece
        self._held = ""
        while text is not None:
            match self._mode:
                case "text":
                    text = self._read_text(text, parts)
                case "thoughts":
                    text = self._read_thoughts(text, parts)
                case "call":
                    text = self._read_call(text, parts)

    def _read_text(self, text: str, parts: list[AnswerPart]) -> str | None:
        """Read up to the next mark; returns what is behind it, None where there is none yet."""
        start = self._thinking.start if self._thinking is not None else ""
        if self._may_think and text.lstrip().startswith(start):
            self._mode, self._is_fresh = "thoughts", True
            return text.lstrip()[len(start) :]
        mark = self._family.start if self._family is not None else ""
        at = text.find(mark) if mark else -1
        if at < 0:
            at = _unsettled(text, self._openings)
            self._say(text[:at], parts)
            self._held = text[at:]
            return None
        said = text[:at].rstrip()
        self._say(said, parts)
        self._mode, self._before_call = "call", text[len(said) : at] + mark
        return text[at + len(mark) :]

    def _read_thoughts(self, text: str, parts: list[AnswerPart]) -> str | None:
        end = self._thinking.end if self._thinking is not None else ""
        at = text.find(end)
        if at < 0:
            settled = _unsettled(text, (end,))
            self._think(text[:settled], parts)
            self._held = text[settled:]
            return None
        self._think(text[:at].rstrip(), parts)
        self._mode, self._is_fresh = "text", True
        return text[at + len(end) :]

    def _read_call(self, text: str, parts: list[AnswerPart]) -> str | None:
        end = self._family.end if self._family is not None else ""
        self._call.append(text)
        recent = self._tail + text
        self._tail = recent[max(0, len(recent) - len(end) + 1) :] if end else ""
        if not end or end not in recent:
            return None
        body = self._taken()
        at = -len(end)
        for _ in range(_MOST_ENDS):
            at = body.find(end, at + len(end))
            if at < 0:  # the ends so far stand in a string of the call
                self._call, self._tail = [body], body[1 - len(end) :] if len(end) > 1 else ""
                return None
            if self._end_call(body[:at], parts):
                return body[at + len(end) :]
            if not _is_inside_string(body[:at]):
                break
        self._give_back(parts)
        return body

    def _give_back(self, parts: list[AnswerPart]) -> None:
        """Take the mark of a call that cannot be read for text."""
        self._mode = "text"
        self._unread += 1
        if self._unread >= _MOST_UNREAD:
            self._family = None
        self._say(self._before_call, parts)

    def _taken(self) -> str:
        body = "".join(self._call)
        self._call, self._tail = [], ""
        return body

    def _end_call(self, body: str, parts: list[AnswerPart]) -> bool:
        """Read a call; False where it cannot be read, and nothing has happened."""
        if self._family is None:
            return False
        try:
            calls = self._family.parse(body, self._tools)
        except ValueError:
            return False
        parts += calls
        self._only_calls()
        self._mode, self._is_fresh = "text", True
        return True

    def _only_calls(self) -> None:
        """No thoughts follow what is said or called."""
        self._may_think = False
        self._openings = [self._family.start] if self._family is not None else []

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        shown = self._trimmed(text)
        if shown:
            parts.append(Said(shown))
            self._only_calls()

    def _think(self, text: str, parts: list[AnswerPart]) -> None:
        shown = self._trimmed(text)
        if shown:
            parts.append(Thought(shown))

    def _trimmed(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text


def _unsettled(text: str, marks: Collection[str]) -> int:
    """Where the end of a text begins that may be part of a mark, or blanks in front of one."""
    if not marks:
        return len(text)
    most = max(map(len, marks))
    begin = max(0, len(text) - most + 1)
    if not any(mark[0] in text[begin:] for mark in marks):  # nearly always: this is per token
        return len(text.rstrip())
    for at in range(begin, len(text)):
        end = text[at:]
        if any(mark.startswith(end) for mark in marks):
            return len(text[:at].rstrip())
    return len(text.rstrip())


def _is_inside_string(body: str) -> bool:
    """Whether a text that begins with JSON, or holds it, ends inside a JSON string."""
    begin = min((at for at in map(body.find, "{[") if at >= 0), default=len(body))
    return '"' in _JSON_STRING.sub("", body[begin:])
