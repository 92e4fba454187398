"""What an answer's headers tell of its request, beside the account in its body.

x-kakeya-moved   the kinds of lines that were taken out of the way of the prefix cache, as
                 "billing_header, date"
x-kakeya-warning what the answer does not have of what was asked, in sentences
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

_MOVED = "kakeya.moved"
_LEFT_OUT = "kakeya.left_out"
_MOST_CHARS = 2000
"""Of a warning: clients and proxies bound all headers together."""


def note_moved(scope: Scope, kinds: Sequence[str]) -> None:
    """Note the kinds of lines that were moved."""
    scope[_MOVED] = tuple(str(kind) for kind in kinds)


def moved_of(scope: Scope) -> tuple[str, ...]:
    """The kinds of lines that were moved; () = none."""
    found: tuple[str, ...] = scope.get(_MOVED, ())
    return found


def note_left_out(scope: Scope, sentences: Sequence[str]) -> None:
    """Note what an answer will not have."""
    scope[_LEFT_OUT] = "; ".join(sentences).encode("ascii", "backslashreplace").decode()


def receipt_headers(scope: Scope) -> dict[str, str]:
    """The headers of an answer."""
    moved = moved_of(scope)
    left_out: str = scope.get(_LEFT_OUT, "")[:_MOST_CHARS]
    return ({"x-kakeya-moved": ", ".join(moved)} if moved else {}) | (
        {"x-kakeya-warning": left_out} if left_out else {}
    )
