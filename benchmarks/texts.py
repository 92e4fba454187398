"""Token sequences to draft on, made without a tokenizer: words and signs, numbered as they come."""

from __future__ import annotations

import random
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def number_words(text: str) -> list[int]:
    """Give every distinct word, run of spaces or sign a number."""
    known: dict[str, int] = {}
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    return [known.setdefault(word, len(known)) for word in words]


def python_code(count: int = 24_000) -> list[int]:
    """The sources of this package."""
    files = sorted((ROOT / "kakeya").rglob("*.py"))
    code = "".join(path.read_text() for path in files if "v1" not in path.parts)
    tokens = number_words(code)
    return (tokens * (count // len(tokens) + 1))[:count]


def tool_log(lines: int = 600) -> list[int]:
    """A JSON log of tool calls, as agents write it."""
    rng = random.Random(1)
    stamp = 1_700_000_000
    made = []
    for _ in range(lines):
        stamp += rng.randint(1, 9)
        tool = rng.choice(("read", "write", "grep", "ls"))
        path = f"/srv/{rng.choice('abc')}/{rng.randint(0, 99)}"
        made.append(
            f'{{"ts": {stamp}, "tool": "{tool}", "status": "{rng.choice(("ok", "ok", "err"))}",'
            f' "ms": {rng.randint(1, 999)}, "args": {{"path": "{path}"}}}}\n'
        )
    return number_words("".join(made))


def edited_echo(tokens: list[int], edits: int = 60) -> list[int]:
    """A file, then the same file with some tokens replaced."""
    rng = random.Random(2)
    copy = list(tokens)
    for _ in range(edits):
        copy[rng.randrange(len(copy))] = max(tokens) + 1 + rng.randrange(50)
    return [*tokens, *copy]


def cycle(period: int, count: int = 600) -> list[int]:
    """The shortest text that repeats."""
    return [at % period for at in range(count)]


def no_repetition(count: int) -> list[int]:
    """A text in which nothing occurs twice."""
    return list(range(count))
