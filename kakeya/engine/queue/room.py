"""Who may compute: sequences enter as far as their KV fits the bound, before any of it is made.

    refused   the whole of it, prompt and max_tokens, is more than the bound: it can never end
    waits     prompt and AHEAD_TOKENS are more than those that run leave
    enters    with that much set aside; what it needs beyond, it takes as it grows
    parked    set aside for a more urgent one: what it holds stays, and counts as long as it does

So a request that only may become long does not keep others out. When those that run outgrow the
bound together, or the model the memory limit, kept KV goes first, then what is parked (to pages
where there are some, see `parking`; else it ends with an error that says when to come back), and
then the weakest of those that run is parked: the oldest of the most urgent always comes to its end.

KV is counted as mlx-lm allocates it, in blocks of 256 tokens, with sliding windows as far as they
are filled and recurrent state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable

from kakeya.core.errors import InvalidArgument, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS, format_bytes
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.generation.request import DecodeJob

AHEAD_TOKENS = 512
"""Of an answer, set aside at its beginning: most are no longer."""
RETRY_S = 1.0
"""When an ended sequence may find room again; it waits its turn in line anyway."""
KEPT_BYTES = 2 << 30
"""Of KV, where nobody sets a bound and the model's context takes no more."""


class KvRoom:
    """The running sequences' share of the KV budget; belongs to the model thread."""

    def __init__(self, slots: KvSlots, facts: LoadedFacts) -> None:
        self._slots = slots
        self._facts = facts
        self._blocks = range(-(-facts.context_tokens // KV_BLOCK_TOKENS) + 1)
        self._shares: dict[Hashable, int] = {}
        self._parked: dict[Hashable, int] = {}
        self._taken_bytes = 0

    @property
    def budget_bytes(self) -> int:
        """What all KV may take."""
        return self._slots.budget_bytes

    @property
    def left_bytes(self) -> int:
        """What those that run and are parked leave of it; less than 0 where they outgrew it."""
        return self._slots.budget_bytes - self._taken_bytes

    @property
    def lent_bytes(self) -> int:
        """What is set aside for those that run."""
        return sum(self._shares.values())

    @property
    def parked_bytes(self) -> int:
        """What those hold that are parked."""
        return sum(self._parked.values())

    @property
    def context_tokens(self) -> int:
        """How long one sequence can become: the model's context, or what its KV leaves of it."""
        return self._tokens_in(self._slots.budget_bytes)

    def check_bound(self, kv_bytes: int) -> None:
        """Raise InvalidArgument for a bound in which no sequence fits at all."""
        least = self.kv_bytes(1)
        if kv_bytes < least:
            raise InvalidArgument(
                f"a KV bound of {kv_bytes} bytes holds no sequence; "
                f"the first {KV_BLOCK_TOKENS} tokens take {least}"
            )

    def check_fits(self, job: DecodeJob) -> None:
        """Raise MemoryRefused when there never will be room for `job`."""
        prompt, budget = len(job.token_ids), self._slots.budget_bytes
        whole = self.whole_bytes(job)
        if whole > budget:
            raise MemoryRefused(
                f"the KV of a prompt of {prompt} and {job.max_tokens} more tokens takes "
                f"{format_bytes(whole)}, and {format_bytes(budget)} are allowed: prompt and answer "
                f"together may have {self.context_tokens} tokens"
            )

    def admits(self, job: DecodeJob) -> bool:
        """Whether there is room for `job` now. Raises MemoryRefused when there never will be."""
        self.check_fits(job)
        return self.lacks(None, job) <= 0

    def lacks(self, owner: Hashable, job: DecodeJob, length: int = 0) -> int:
        """Bytes that are missing for `job`, which has come to `length`; 0 or less = none.

        What it holds itself while it is parked is not in its way.
        """
        taken = self._taken_bytes - self._parked.get(owner, 0)
        return taken + self.need_bytes(job, length) - self._slots.budget_bytes

    def enter(self, owner: Hashable, job: DecodeJob, length: int = 0) -> None:
        """Set room aside; kept KV goes where it is in the way."""
        self._parked.pop(owner, None)
        self._shares[owner] = self.need_bytes(job, length)
        self._lend()

    def grown(self, owner: Hashable, length: int) -> bool:
        """Note a sequence's length after a step; whether all of them still fit."""
        needed = self.kv_bytes(length + 1)
        if needed > self._shares.get(owner, needed):
            self._shares[owner] = needed
            self._lend()
        return self.holds

    @property
    def holds(self) -> bool:
        """Whether all of them are within the bound."""
        return self._taken_bytes <= self._slots.budget_bytes

    def headroom_tokens(self, owner: Hashable, length: int) -> int:
        """How many more tokens fit into what is set aside for a sequence of this length."""
        return self._tokens_in(self._shares.get(owner, 0)) - length - 1

    def park(self, owner: Hashable, length: int) -> None:
        """From now on it only holds what it has computed."""
        self._shares.pop(owner, None)
        self._parked[owner] = self.kv_bytes(length)
        self._lend()

    def leave(self, owner: Hashable) -> None:
        """Give back what was set aside or held; fine for who never entered."""
        share = self._shares.pop(owner, None)
        parked = self._parked.pop(owner, None)
        if share is not None or parked is not None:
            self._lend()

    def held_bytes(self, owner: Hashable) -> int:
        """What is set aside for one, or held by it; 0 for who is not here."""
        return self._shares.get(owner, 0) or self._parked.get(owner, 0)

    def kv_bytes(self, tokens: int) -> int:
        """What the KV of a sequence of this length takes."""
        return self._facts.kv_bytes(tokens)

    def whole_bytes(self, job: DecodeJob) -> int:
        """What the KV of `job` takes at its longest."""
        return self.kv_bytes(len(job.token_ids) + job.max_tokens)

    def need_bytes(self, job: DecodeJob, length: int = 0) -> int:
        """What is set aside for `job`, which has come to `length`, when it enters."""
        prompt = len(job.token_ids)
        ahead = max(prompt, length) + AHEAD_TOKENS
        return self.kv_bytes(min(ahead, prompt + job.max_tokens))

    def _tokens_in(self, size: int) -> int:
        """How many tokens of one sequence fit into so many bytes."""
        fitting = bisect_right(
            self._blocks, size, key=lambda blocks: self.kv_bytes(blocks * KV_BLOCK_TOKENS)
        )
        return min(self._facts.context_tokens, (fitting - 1) * KV_BLOCK_TOKENS)

    def _lend(self) -> None:
        self._taken_bytes = self.lent_bytes + self.parked_bytes
        self._slots.lend(self._taken_bytes)


def usual_kv_bytes(facts: LoadedFacts) -> int:
    """The KV bound of an engine whose owner sets none: at least one whole context."""
    return max(KEPT_BYTES, facts.kv_bytes(facts.context_tokens))
