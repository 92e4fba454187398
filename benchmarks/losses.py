"""Losses at places of answers that are drawn by chance, one after the other, and what became of the
answers: shared by the drills `failover` and `gateway_loss`."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import emit, percentile

SEED = 11


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of one answer; `kind` is what was lost, `pause_s` the longest pause, `told` what
    the client got."""

    kind: str
    is_same: bool
    pause_s: float
    told: object


async def lose_often(
    one_loss: Callable[[int, str, int], Awaitable[Loss]],
    pieces: Mapping[str, int],
    *,
    times: int,
    limit_s: float,
) -> Sequence[Loss]:
    """Have a loss at one piece after the other of each form of answer in turns; `pieces` counts
    those of the undisturbed ones."""
    rng, began = random.Random(SEED), time.monotonic()
    found: list[Loss] = []
    for number in range(times):
        if time.monotonic() - began > limit_s:
            break
        name = list(pieces)[number % len(pieces)]
        at = rng.randrange(1, max(2, pieces[name] * 3 // 4))
        loss = await one_loss(number, name, at)
        found.append(loss)
        print(f"{number + 1}: {name} at {at} of {pieces[name]}, {loss.kind}", flush=True)
        if not loss.is_same:
            print(f"another answer: {loss.told}", flush=True)
    return found


def tell(what: str, found: Sequence[Loss], **others: object) -> None:
    """Print the figures of a drill."""
    for kind in dict.fromkeys(loss.kind for loss in found):
        pauses = [loss.pause_s for loss in found if loss.kind == kind]
        same = sum(loss.is_same for loss in found if loss.kind == kind)
        print(
            f"{kind}: {same} of {len(pauses)} the same; pause p50 {percentile(pauses, 0.5):.2f} s, "
            f"p95 {percentile(pauses, 0.95):.2f} s, longest {max(pauses):.2f} s"
        )
    same = sum(loss.is_same for loss in found)
    emit(
        what,
        ours=same,
        baseline=len(found),
        ratio=same / max(1, len(found)),
        goal="all",
        met=same == len(found),
        **others,
    )


def longest_pause_s(moments: Sequence[float]) -> float:
    """The longest time between two moments that follow one another, in seconds."""
    return max((b - a for a, b in itertools.pairwise(moments)), default=0.0)
