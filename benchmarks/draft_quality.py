"""Goal 6: how many tokens a step n-gram drafts yield, teacher-forced.

A step verifies a draft of at most 8 tokens against the text and commits what was right and one
token more. Compared with the usual look-up (most recent 4-gram, longest first), without and with
overlapped copy.

    .venv/bin/python -m benchmarks.draft_quality
"""

from __future__ import annotations

from typing import Protocol

from benchmarks import texts
from benchmarks.lookup import RecentLookup
from benchmarks.report import emit
from kakeya.decoding.ngram.ngram import NGramIndex

SIZE = 8
GOAL_CYCLE = 8.5
TOLERANCE = 0.99
"""Of the overlapped look-up, on texts that are no cycle: as good, up to chance."""


class Lookup(Protocol):
    """What is compared."""

    def extend(self, tokens: list[int]) -> None:
        """Append to the text."""
        ...

    def draft(self, size: int) -> tuple[list[int], int]:
        """What may follow, and how long the match was."""
        ...


def tokens_per_step(lookup: Lookup, text: list[int], known: int) -> float:
    """Tokens committed per step from position `known` on."""
    lookup.extend(text[:known])
    at, steps = known, 0
    while at < len(text):
        drafted, _ = lookup.draft(SIZE)
        right = 0
        while right < len(drafted) and at + right < len(text) - 1:
            if drafted[right] != text[at + right]:
                break
            right += 1
        lookup.extend(text[at : at + right + 1])
        at += right + 1
        steps += 1
    return (len(text) - known) / steps


def main() -> None:
    code, log = texts.python_code(), texts.tool_log()
    echo = texts.edited_echo(code[1_000:3_500])
    cases = {
        "cycle of 3": (texts.cycle(3), 10),
        "cycle of 1": (texts.cycle(1), 10),
        "code": (code, 20_000),
        "tool log": (log, len(log) // 4),
        "edited echo": (echo, len(echo) // 2),
    }
    for name, (text, known) in cases.items():
        ours = tokens_per_step(NGramIndex(), text, known)
        plain = tokens_per_step(RecentLookup(overlapped=False), text, known)
        overlapped = tokens_per_step(RecentLookup(overlapped=True), text, known)
        cyclic = name.startswith("cycle")
        emit(
            f"n-gram drafts, tokens per step, {name}",
            ours=ours,
            baseline=plain,
            ratio=ours / plain,
            goal=f">= {GOAL_CYCLE}" if cyclic else f">= {TOLERANCE} of the overlapped look-up",
            met=ours >= (GOAL_CYCLE if cyclic else TOLERANCE * overlapped),
            overlapped_lookup=round(overlapped, 3),
        )


if __name__ == "__main__":
    main()
