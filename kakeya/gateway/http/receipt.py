"""What an answer's headers tell of its prompt, beside the account in its body.

x-kakeya-moved   the kinds of lines that were taken out of the way of the prefix cache, as
                 "billing_header, date"
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

_MOVED = "kakeya.moved"


def note_moved(scope: Scope, kinds: Sequence[str]) -> None:
    """Note the kinds of lines that were moved."""
    scope[_MOVED] = tuple(str(kind) for kind in kinds)


def moved_of(scope: Scope) -> tuple[str, ...]:
    """The kinds of lines that were moved; () = none."""
    found: tuple[str, ...] = scope.get(_MOVED, ())
    return found


def receipt_headers(scope: Scope) -> dict[str, str]:
    """The headers of an answer."""
    moved = moved_of(scope)
    return {"x-kakeya-moved": ", ".join(moved)} if moved else {}
