"""Whether a shared prefix is to be read once: tried on the model itself when it is loaded.

On the CPU attention is products of matrices anyway, and the result only has to be the same. On a
GPU it is one fused kernel, and its pass over the same numbers for each row may cost less than the
kernels that take its place: there it is timed at the least saving, and a larger one gains more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator

import mlx.core as mx

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.mlx.batch.batch import at_once, forward_together, turns_check, uses_slabs
from kakeya.mlx.batch.places import PlaceAssignment
from kakeya.mlx.batch.prompts import pieces_check
from kakeya.mlx.device import tells_lost_device
from kakeya.mlx.findings import Sharing
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.numerics.bits import ROUNDING, share_off
from kakeya.mlx.numerics.grid import is_cpu
from kakeya.mlx.verifier import MlxVerifier

_log = logging.getLogger(__name__)
SHARES_FROM = 512
"""The least saving in tokens: of two rows, their shared prefix."""
_ROWS = 2
_REPEATS = 5
_CLOSE = 0.02
"""Two equal times may differ by so much of them."""


def sharing_check(model: LoadedModel) -> Generator[None, None, Sharing]:
    """Find out how sequences of this model may share forwards, a few forwards for each `next`.

    Ranks of a ring have no slabs: which places are free depends on when a sequence's memory goes.
    """
    reason = ""
    if model.ring is not None:
        return Sharing(turns_reason=(yield from turns_check(model)))
    for assignment in (PlaceAssignment(), None) if uses_slabs() else (None,):
        reason = yield from turns_check(model, assignment)
        if not reason:
            return Sharing(
                in_slabs=assignment is not None,
                prefix_from=(yield from shares_check(model)) if assignment is not None else None,
                pieces_from=(yield from pieces_check(model)),
            )
    return Sharing(turns_reason=reason)


def shares_from(model: LoadedModel) -> int | None:
    """As `shares_check`, at once."""
    return at_once(shares_check(model))


def shares_check(model: LoadedModel) -> Generator[None, None, int | None]:
    """Find the tokens that sharing a prefix must save, a few forwards for each `next`.

    None = it is not worth it, or gives other logits, or fails, with a reason in the log. The
    context is made up, not computed: its content changes no time.
    """
    if model.context_tokens < 2 * SHARES_FROM:
        return None
    try:
        return SHARES_FROM if (yield from _is_worth_it(model)) else None
    except Exception as problem:  # noqa: BLE001 - whatever it is, rows can attend by themselves
        event(
            _log,
            "a shared prefix is read for each row",
            level=logging.WARNING,
            model=model.model_id,
            reason=problem.message if isinstance(problem, KakeyaError) else repr(problem),
        )
        return None


@tells_lost_device
def _is_worth_it(model: LoadedModel) -> Generator[None, None, bool]:
    states = [MlxVerifier(model) for _ in range(_ROWS)]
    for number, state in enumerate(states):
        yield
        state.prefill([number])
        if not state.pretend(SHARES_FROM):
            return False
        state.prefill([number + 1, number + 2])
    assignment = PlaceAssignment()
    assignment.shares_from = SHARES_FROM
    assignment.arrange(states)
    seats = [state.seat for state in states]
    if any(seat is None or seat.shared_tokens < SHARES_FROM for seat in seats):
        return False
    slab = next(seat.slab for seat in seats if seat is not None)
    row = mx.array(list(range(_ROWS)), dtype=mx.int32)
    best: dict[int | None, float] = {None: math.inf, SHARES_FROM: math.inf}
    logits: dict[int | None, mx.array] = {}
    for _ in range(_REPEATS):
        for way in best:
            yield
            slab.shares_from = way
            started = time.perf_counter()
            logits[way] = forward_together(model, states, row)
            mx.eval(logits[way])
            best[way] = min(best[way], time.perf_counter() - started)
            for state in states:
                state.appended()
                state.trim(1)
    is_same = share_off(logits[SHARES_FROM], logits[None]) <= ROUNDING
    is_sooner = best[SHARES_FROM] <= best[None] * (1 + _CLOSE)
    return is_same and (is_sooner or is_cpu())
