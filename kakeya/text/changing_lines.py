"""Lines of a system text that change with every request, taken out of the way of the prefix cache.

A prompt is computed anew from the first token that differs. So one line at the front of a system
text that is another each time costs the whole prompt, each time. Such lines are looked for among
the first lines of the leading system messages only:

    billing_header   `x-anthropic-billing-header: ...`, for the biller of a cloud: left out
    date             a date or time to the second, alone or with a label of a few words
    request_id       a UUID, alone or with a label of a few words; another id behind a label that
                     says so ("Request ID: req_011CS...")

Dates and ids are put in front of the user's first message: templates write tools before or behind
the system text, and there the lines are behind both. A line that says more stays where it is, since
it may be an instruction. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import StrEnum

from kakeya.text.chat import Chat, Message

FRONT_LINES = 16
"""Lines with text, beside those taken, that are looked at in each message: further lines are not
the front."""
_LONGEST = 400
"""Characters of a line that is looked at."""
_MOST_WORDS = 8
"""Of the label of a date: more words are a sentence that may be an instruction."""
_LEADING = ("system", "developer")


class ChangingLine(StrEnum):
    """The kinds of lines, by their names in settings and receipts."""

    BILLING_HEADER = "billing_header"
    DATE = "date"
    REQUEST_ID = "request_id"


ALL_KINDS = frozenset(ChangingLine)
_BILLING = re.compile(r"x-anthropic-billing-header\s*:", re.IGNORECASE)
_CLOCK = r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
_DAY = r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})"
_INSTANT = re.compile(
    rf"\b(?:{_DAY}(?:[T,]\s?|\s))?{_CLOCK}(?:\s?(?:Z|[+-]\d{{2}}:?\d{{2}}))?(?![\w:])|\b1\d{{9}}(?:\d{{3}})?\b"
)
"""A time to the second, with the day in figures if it stands before it; or seconds or milliseconds
since 1970."""
_OF_TIME = re.compile(
    r"\b(?:date|datetime|time|timestamp|now|today|clock|mon|tue|wed|thu|fri|sat|sun)", re.IGNORECASE
)
_WORD = re.compile(r"[^\W\d_]+")
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_LABEL = r"[A-Za-z][A-Za-z _-]{0,40}"
_ID_LINE = re.compile(
    rf"[-*#>\s]*(?:(?:{_LABEL}[:=]\s*)?[\"'`(]?{_UUID}"
    rf"|(?:{_LABEL}[ _-])?(?:request|trace|correlation|message|session)[ _-]?id[:=]\s*[\"'`(]?"
    r"[\w-]{12,80})[\"'`).]?",
    re.IGNORECASE,
)


def move_changing_lines(
    chat: Chat, kinds: Collection[ChangingLine] = ALL_KINDS, *, is_prefix: bool = False
) -> tuple[Chat, tuple[ChangingLine, ...]]:
    """Take lines of these kinds out of the way; the kinds that were found, in order, each once.

    A prefix of later requests leaves all of them out, since those bring their own. A conversation
    whose system messages are not followed by the user's keeps its dates and ids. The very same chat
    comes back where nothing is found.
    """
    leading = _leading(chat.messages)
    follows_user = chat.messages[leading:] and chat.messages[leading]["role"] == "user"
    if not follows_user and not is_prefix:
        kinds = set(kinds) & {ChangingLine.BILLING_HEADER}
    found: list[tuple[ChangingLine, str]] = []
    stable: list[Message] = []
    for message in chat.messages[:leading]:
        text, taken = _parted(str(message["content"]), kinds)
        found += taken
        if text or not taken or leading == 1:
            stable.append({**message, "content": text} if taken else message)
    if not found:
        return chat, ()
    rest = list(chat.messages[leading:])
    moved = [line for kind, line in found if kind is not ChangingLine.BILLING_HEADER]
    if moved and follows_user:
        said = "\n".join(moved)
        rest[0] = {**rest[0], "content": f"{said}\n\n{rest[0]['content']}"}
    told = tuple(kind for kind in ChangingLine if kind in {one for one, _ in found})
    return replace(chat, messages=(*stable, *rest)), told


def stable_beginning(chat: Chat) -> Iterable[str]:
    """The texts that all turns of a conversation begin with, and other conversations hardly do: its
    system messages without changing lines, and the first message behind them."""
    leading = _leading(chat.messages)
    for message in chat.messages[: leading + 1]:
        content = str(message["content"])
        yield _parted(content, ALL_KINDS)[0] if message["role"] in _LEADING else content


def _leading(messages: tuple[Message, ...]) -> int:
    roles = (at for at, message in enumerate(messages) if message["role"] not in _LEADING)
    return next(roles, len(messages))


def _parted(
    text: str, kinds: Collection[ChangingLine]
) -> tuple[str, list[tuple[ChangingLine, str]]]:
    """A text without its changing lines, and these; the same text where there are none."""
    lines = text.split("\n")
    kept: list[str] = []
    taken: list[tuple[ChangingLine, str]] = []
    passed, is_behind_taken = 0, False
    for at, line in enumerate(lines):
        if passed == FRONT_LINES:
            kept += lines[at:]
            break
        said = line.strip()
        kind = _kind_of(said)
        if kind is not None and kind in kinds:
            taken.append((kind, said))
            is_behind_taken = True
        elif said or not is_behind_taken or (kept and kept[-1].strip()):
            kept.append(line)
            passed += bool(said)
            is_behind_taken = False
        # else an empty line that parted a taken line from the text behind it
    return ("\n".join(kept), taken) if taken else (text, taken)


def _kind_of(line: str) -> ChangingLine | None:
    if not line or len(line) > _LONGEST:
        return None
    if _BILLING.match(line):
        return ChangingLine.BILLING_HEADER
    if _ID_LINE.fullmatch(line):
        return ChangingLine.REQUEST_ID
    label, times = _INSTANT.subn(" ", line)
    if times and ". " not in label:
        words = _WORD.findall(label)
        if not words or (len(words) <= _MOST_WORDS and _OF_TIME.search(label)):
            return ChangingLine.DATE
    return None
