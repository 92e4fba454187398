"""What an answer waits for, on stderr: in one line of a terminal, else once."""

from __future__ import annotations

import sys

from kakeya.core.units import printable

_ERASE = "\r\033[K"


class WaitLine:
    """Shows what an answer waits for, until it comes."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show it, in the place of the text before."""
        said = f"waiting: {printable(text)}"
        if sys.stderr.isatty():
            print(f"{_ERASE}{said}", end="", file=sys.stderr, flush=True)
        elif not self._is_shown:
            print(said, file=sys.stderr, flush=True)
        self._is_shown = True

    def end(self) -> None:
        """Take it away: the answer comes, or never will."""
        if self._is_shown and sys.stderr.isatty():
            print(_ERASE, end="", file=sys.stderr, flush=True)
        self._is_shown = False
