"""Thoughts in front of an answer: the marks around them, by the vocabulary of a model."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts around the thoughts of a model."""

    start: str
    end: str

    def are_in(self, template: str) -> bool:
        """Whether a chat template knows of thoughts."""
        # Marks of several tokens are put together by a template.
        return any(
            token in template for token in (self.start, self.end, "<|channel>", "think<|sep|>")
        )

    def is_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins inside thoughts: the template opened them."""
        return prompt.rstrip().endswith(self.start)

    def is_closed(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins behind thoughts: the template closed them."""
        return prompt.rstrip().endswith(self.end)

    def is_left_open(self, said: str) -> bool:
        """Whether an answer that goes on does so inside thoughts."""
        return said.rfind(self.start) > said.rfind(self.end)


_TOKENS = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("<longcat_think>", "</longcat_think>"),
    ThinkingMarks("<|think:start|>", "<|think:end|>"),
)
_CHANNEL = ThinkingMarks("<|channel>thought", "<channel|>")
_XTML = ThinkingMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>")
XTML_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
"""The tokens of which kimi_k3 makes its marks."""


def thinking_marks(vocabulary: Container[str]) -> ThinkingMarks | None:
    """The marks around the thoughts of a model, by its tokens; None for one that does not think."""
    for marks in _TOKENS:
        if marks.start in vocabulary and marks.end in vocabulary:
            return marks
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return _CHANNEL
    return _XTML if all(token in vocabulary for token in XTML_TOKENS) else None
