"""The accept rule: a draft token stands iff it is what the verifier itself selects there.

With greedy selection this is plain decoding. With keyed noise (sampling.py) the verifier's
selection is a function of (seed, position, logits), so it is plain sampling: the probability that
a given draft token is accepted equals the model's probability of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument


def accept_block(draft: Sequence[int], selected: Sequence[int]) -> int:
    """Count the leading draft tokens that equal the verifier's own.

    `selected[i]` is what the verifier selects after the history and `draft[:i]`; it has one entry
    more than the draft. Raises InvalidArgument when it has not.
    """
    if len(selected) != len(draft) + 1:
        raise InvalidArgument(
            f"{len(selected)} selected tokens for a draft of {len(draft)}: "
            f"a verifier selects {len(draft) + 1}, one per row"
        )
    return agreeing(draft, selected)


def agreeing(guesses: Sequence[int], actual: Sequence[int]) -> int:
    """Count the leading tokens that two texts share, as far as both go."""
    count = 0
    for guess, own in zip(guesses, actual, strict=False):
        if guess != own:
            break
        count += 1
    return count
