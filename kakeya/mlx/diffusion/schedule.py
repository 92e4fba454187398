"""Which masks of a block are filled in which pass. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def fills(size: int, steps: int) -> tuple[int, ...]:
    """How many of `size` masks each pass fills: about equally many, and never none.

    More steps than masks are as many as there are masks. Both are at least 1.
    """
    counts, left = [], size
    for passes in range(min(size, steps), 0, -1):
        counts.append(-(-left // passes))
        left -= counts[-1]
    return tuple(counts)


def surest(log_probs: Sequence[float], masked: Sequence[int], count: int, lean: float) -> list[int]:
    """The `count` positions of `masked` to fill, in order.

    Only the beginning of a block that is right is of use, so each position counts `lean` nats less
    than the one before it. `log_probs` has one of each position of the block.
    """
    ranked = sorted(masked, key=lambda place: (lean * place - log_probs[place], place))
    return sorted(ranked[:count])
