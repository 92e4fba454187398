"""Estimates of the waits for places, for the engine to tell. All functions are pure.

A generation keeps its place for the rest of its prompt and for the tokens that it will make. The
number of these is not known, only its bound and the lengths of past answers: each generation takes
the length at a quantile of its own, so that the first of several ends as early as the first of
several did in the past. The median would say that they all end at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kakeya.engine.queue.policy import CLASSES, EQUAL_TOKENS, Account, ClaimT, done_alone_s
from kakeya.generation.answer_length import answer_tokens_left

MOST_BUSY = 0.9
"""The largest share of the time that more urgent generations are expected to take on."""
_ARRIVALS_S = 30.0
"""Arrivals of about so long count."""
_SPREAD = 0.6180339887498949
"""Multiples of the golden ratio fill 0 to 1 evenly, however many there are."""


class PlaceWork(NamedTuple):
    """What a generation does in its place: seconds for the rest of its prompt, then tokens."""

    prompt_s: float
    tokens: float


def tokens_left(made: int, most: int, past: Sequence[int], number: int) -> int:
    """Estimate the tokens that an answer still gets, of which it has `made` and may have `most`.

    `past` are lengths of answers, and `number` that of the generation, which gives its quantile.
    """
    return answer_tokens_left(made, most, past, number * _SPREAD % 1.0)


def first_tokens_s(
    running: Sequence[PlaceWork], waiting: Sequence[PlaceWork], step_s: float
) -> list[float]:
    """Estimate when each waiting generation has its first token, in seconds from now.

    `waiting` are in the order of service; each gets the place of the one that ends first. A step,
    of `step_s`, gives a token to each generation in its place; prompts are computed one after the
    other, and no step meanwhile. Where none runs, there is one place.
    """
    ends = [max(0.0, work.tokens) for work in running] or [0.0]  # counted in steps from now
    heapq.heapify(ends)
    prompts_s = sum(max(0.0, work.prompt_s) for work in running)
    found = []
    for work in waiting:
        prompts_s += max(0.0, work.prompt_s)
        found.append(prompts_s + (ends[0] + 1) * step_s)
        heapq.heapreplace(ends, ends[0] + max(0.0, work.tokens))
    return found


class Arrivals:
    """How busy generations of each class keep the engine, by those that came of late.

    A generation that waits is overtaken by more urgent ones that have not arrived yet: where these
    take a share of the time, its wait is longer by 1 / (1 - share).
    """

    def __init__(self) -> None:
        self._busy = [0.0] * CLASSES
        self._at_s = 0.0

    def add(self, priority: int, work_s: float, now_s: float) -> None:
        """Note a generation that takes so many seconds of the engine."""
        self._decay(now_s)
        self._busy[priority] += work_s / _ARRIVALS_S

    def more_urgent(self, priority: int, now_s: float) -> float:
        """The share of the time that more urgent generations take; above 1 they pile up."""
        self._decay(now_s)
        return sum(self._busy[:priority])

    def _decay(self, now_s: float) -> None:
        kept = math.exp(-max(0.0, now_s - self._at_s) / _ARRIVALS_S)
        self._busy = [busy * kept for busy in self._busy]
        self._at_s = now_s


def service_order(claims: Sequence[ClaimT], tokens: Callable[[ClaimT], int]) -> list[ClaimT]:
    """The claims in the order in which they are expected to get places: by class, share and work.

    `tokens` are the weighted tokens that a claim will use. Places by age are left out.
    """
    order: list[ClaimT] = []
    for priority in sorted({claim.priority for claim in claims}):
        of_class = [claim for claim in claims if claim.priority == priority]
        order += _shared_out(sorted(of_class, key=done_alone_s, reverse=True), tokens)
    return order


def _shared_out(claims: Sequence[ClaimT], tokens: Callable[[ClaimT], int]) -> list[ClaimT]:
    """The claims of a class, given with the last one first, as clients and their users take
    turns."""
    lines: dict[Account, list[ClaimT]] = {}
    for claim in claims:
        lines.setdefault(claim.account, []).append(claim)
    used = {one: one.used for account in lines for one in (account, account.owner or account)}
    order: list[ClaimT] = []
    while lines:
        account = min(_equals(lines, used), key=lambda one: done_alone_s(lines[one][-1]))
        claim = lines[account].pop()
        order.append(claim)
        for one in {account, account.owner or account}:
            used[one] += tokens(claim)
        if not lines[account]:
            del lines[account]
    return order


def _equals(accounts: Iterable[Account], used: Mapping[Account, int]) -> Iterator[Account]:
    """The accounts that may be next: of clients with an equal share, users with one."""
    of_client: dict[Account, list[Account]] = {}
    for account in accounts:
        of_client.setdefault(account.owner or account, []).append(account)
    equal = min(used[client] for client in of_client) + EQUAL_TOKENS
    for client, users in of_client.items():
        if used[client] <= equal:
            equal_user = min(used[user] for user in users) + EQUAL_TOKENS
            yield from (user for user in users if used[user] <= equal_user)
