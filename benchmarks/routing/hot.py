"""Clients that all share one long prefix: does their load stay where it is warm, or spread?

Eight clients ask again and again, with no pause; then one client alone; then eight once, in the
same moment. Nodes of equal speed, so that the share of the busiest one is a count; the prefix is
warm at one node when it begins.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.report import emit, percentile
from benchmarks.routing.drive import Drive, Policy
from benchmarks.routing.ours import Shelf
from benchmarks.routing.rivals import LeastSeconds
from benchmarks.routing.shelf import Timeline, VirtualNode
from benchmarks.routing.traces import Session, Turn

PREFIX = (1, 2000)
TURNS = 12
KV_BYTES = 128 * 1024
"""Of a token of a model of 8 B; over 10 Gbit/s 8400 tokens come in a second."""


def sessions(clients: int, turns: int = TURNS) -> list[Session]:
    """The first session warms the prefix by itself, before the clients begin."""
    numbers = iter(range(2, 1_000_000))

    def turn() -> Session:
        added = (PREFIX, (next(numbers), 200))
        return Session(next(numbers), [Turn(added, (next(numbers), 100))])

    first = turn()
    found = [first]
    for _ in range(clients):
        chain = Session(next(numbers), [Turn(((next(numbers), 1),), (next(numbers), 1))])
        chain.start_s = 60.0
        chain.turns[0].subs = [turn()]
        last = chain.turns[0].subs[0]
        for _ in range(turns - 1):
            last.turns[0].subs = [turn()]
            last = last.turns[0].subs[0]
        found.append(chain)
    return found


def hot_prefix() -> None:
    """Print the lines of the goal."""
    ours = _run(partial(Shelf, addresses=1), 8)
    least = _run(LeastSeconds, 8)
    busiest = max(ours[0].values()) / (sum(ours[0].values()) / 4)
    emit(
        "one prefix of 2000 tokens, 8 clients, 4 equal nodes: p95 seconds to the first token",
        ours=percentile(ours[1], 0.95),
        baseline=percentile(least[1], 0.95),
        ratio=percentile(least[1], 0.95) / percentile(ours[1], 0.95),
        goal="busiest node <= 1.5 of the mean, p95 no later than the least loaded's",
        met=busiest <= 1.5 and percentile(ours[1], 0.95) <= percentile(least[1], 0.95),
        busiest_of_mean=round(busiest, 3),
        mean_s=round(statistics.mean(ours[1]), 3),
        least_loaded_mean_s=round(statistics.mean(least[1]), 3),
    )
    alone = _run(partial(Shelf, addresses=1), 1)
    emit(
        "the same prefix, one client: nodes that served it",
        ours=len(alone[0]),
        baseline=1,
        ratio=len(alone[0]),
        goal="1",
        met=len(alone[0]) == 1,
    )


def burst() -> None:
    """Print the lines of eight requests in one moment, with KV that stays or is carried."""
    stays = _run(partial(Shelf, addresses=1), 8, turns=1)
    for name, rate in (("1 Gbit/s", 1.1e8), ("10 Gbit/s", 1.1e9)):
        carries = partial(Shelf, addresses=1, kv_bytes_per_token=KV_BYTES, bytes_per_s=rate)
        ours = _run(carries, 8, turns=1)
        mean_s, without_s = statistics.mean(ours[1]), statistics.mean(stays[1])
        emit(
            f"8 requests at once, their prefix warm at one of 4 nodes, KV carried over {name}",
            ours=max(ours[0].values()) / 2,
            baseline=max(stays[0].values()) / 2,
            ratio=without_s / mean_s,
            goal="busiest node <= 1.5 of the mean, first tokens no later",
            met=max(ours[0].values()) <= 3 and mean_s <= without_s,
            mean_s=round(mean_s, 3),
            mean_s_without=round(without_s, 3),
            p95_s=round(percentile(ours[1], 0.95), 3),
            p95_s_without=round(percentile(stays[1], 0.95), 3),
        )


def _run(
    make: Callable[[Sequence[VirtualNode], Timeline], Policy], clients: int, turns: int = TURNS
) -> tuple[Counter[int], list[float]]:
    drive = Drive(make, ratios=(1, 1, 1, 1))
    calls = [
        call
        for call in drive.play(sessions(clients, turns))
        if call.issued_s > 59 and call.prompt_tokens > 1
    ]
    return Counter(call.node for call in calls), [call.first_s - call.issued_s for call in calls]
