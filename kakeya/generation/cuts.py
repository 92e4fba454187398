"""Cuts: places of a prompt, beside the grid, at which other prompts are likely to part from it.

    system prompt and tools | first message | answer | next message | ...
                            cut             cut      cut

Prefill computes in pieces, and on most devices the bits of KV depend on where these end. A piece
ends at each cut of a request, be it cold or warm. So the KV in front of a cut is the same for all
requests that share that text and its earlier cuts, and the KV behind a cut is the same for those
requests that also share the cut.

The cuts are written into the text itself: the first token behind a cut is *marked*, by its highest
bit, which no vocabulary needs. Marked texts are compared, named, kept and sent like other texts,
and equal marked texts have equal cuts. A text that ends at a cut has no mark for it, since the end
of a text ends a piece anyway. Texts are packed as `core.units.pack_ids` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MARK = 1 << 31
_TOKEN_BYTES = 4


def marked(token_ids: Sequence[int], cuts: Iterable[int]) -> list[int]:
    """Mark the token behind each cut; cuts outside of the text are passed over."""
    text = list(token_ids)
    for cut in cuts:
        if 0 < cut < len(text):
            text[cut] |= MARK
    return text


def unmarked(text: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of a marked text, and its cuts in order."""
    cuts = tuple(place for place, token in enumerate(text) if token & MARK)
    return [token & ~MARK for token in text], cuts


def is_cut(packed: bytes, place: int) -> bool:
    """Whether a marked text, packed, has a cut behind so many tokens and goes on there."""
    last_byte = (place + 1) * _TOKEN_BYTES - 1
    return last_byte < len(packed) and packed[last_byte] >= MARK >> 24


def last_place(packed: bytes, most: int, grain: int) -> int:
    """The last place at which a piece of a marked text ends, at most behind `most` tokens.

    Pieces also end where the text does, and each `grain` tokens.
    """
    if most * _TOKEN_BYTES == len(packed) or is_cut(packed, most):
        return most
    floor = most - most % grain
    return next((at for at in range(most, floor, -1) if is_cut(packed, at)), floor)


def usable(ours: bytes, theirs: bytes, shared: int, grain: int) -> int:
    """How many tokens of the KV of our text serve their text, where the first `shared` are equal:
    up to the last place at which a piece ends in both texts."""
    place = last_place(ours, shared, grain)
    ends_too = shared * _TOKEN_BYTES == len(theirs) or is_cut(theirs, shared)
    if place < shared or ends_too or not shared % grain:
        return place
    return last_place(ours, shared - 1, grain)
