"""Cuts special tokens that occur in the texts of callers, so that they encode as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kakeya.text.template import Message, Tool


class Marker:
    """Puts a private-use text behind the first character of every special token."""

    def __init__(self, specials: Sequence[str]) -> None:
        cuttable = [re.escape(special) for special in specials if len(special) > 1]
        self._inside = re.compile(f"(?=(?:{'|'.join(cuttable)}))(.)", re.S) if cuttable else None

    def choose(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """A private-use text that no message and no tool contains."""
        written = json.dumps(list(tools), ensure_ascii=False) if tools else ""
        number = 0
        while any(f"\ue000{number}\ue001" in value for m in messages for value in m.values()) or (
            f"\ue000{number}\ue001" in written
        ):
            number += 1
        return f"\ue000{number}\ue001"

    def mark(self, message: Message, marker: str) -> Message:
        """Put the marker behind the first character of every special token, overlaps included."""
        return {
            key: value if key == "role" else self._cut(value, marker)
            for key, value in message.items()
        }

    def mark_tool(self, tool: Tool, marker: str) -> Tool:
        """The same in every text of a tool, names included."""
        return {self._cut(key, marker): self._mark(value, marker) for key, value in tool.items()}

    def _mark(self, value: object, marker: str) -> object:
        if isinstance(value, str):
            return self._cut(value, marker)
        if isinstance(value, dict):
            return self.mark_tool(value, marker)
        if isinstance(value, list):
            return [self._mark(item, marker) for item in value]
        return value

    def _cut(self, text: str, marker: str) -> str:
        if self._inside is None:
            return text
        return self._inside.sub(lambda hit: hit[1] + marker, text)
