"""Room for KV: a sequence enters if its KV fits the bound, before any of it is made.

    refused   prompt and max_tokens take more than the bound can ever be: it cannot come to its end
    waits     prompt and AHEAD_TOKENS take more than running sequences leave of the bound, which the
              agent may raise (see `growth`)
    enters    that much is set aside for it; it takes more as it grows
    parked    a more urgent sequence took its place: its KV stays, and counts as long as it does

So a request that may become long, and seldom does, does not keep others out. When running sequences
outgrow the bound together, or the model the memory limit, KV goes in this order: kept KV, then KV
of parked sequences (to pages, see `parking`; without pages the sequence ends with an error that
says when to come back), then the weakest running sequence is parked.

KV is counted as mlx-lm allocates it, in blocks of 256 tokens, with sliding windows as far as they
are filled and recurrent state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable

from kakeya.core.errors import InvalidArgument, KvRefused
from kakeya.core.units import KV_BLOCK_TOKENS, format_bytes
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.generation.request import DecodeJob

AHEAD_TOKENS = 512
"""Tokens of an answer that are set aside at its beginning: most answers are no longer."""
STEP_TOKENS = 2048
"""Tokens by which the bound grows beside those that are needed: a question costs about a step."""
RETRY_S = 1.0
"""After so long an ended sequence may ask again; it waits in the queue anyway."""
KEPT_BYTES = 2 << 30
"""The KV bound where none is set, and the model's context takes no more."""


class KvRoom:
    """KV of running and parked sequences; belongs to the model thread."""

    def __init__(self, slots: KvSlots, facts: LoadedFacts) -> None:
        self._slots = slots
        self._facts = facts
        self._blocks = range(-(-facts.context_tokens // KV_BLOCK_TOKENS) + 1)
        self._shares: dict[Hashable, int] = {}
        self._parked: dict[Hashable, int] = {}
        self._taken_bytes = 0
        self.most_bytes = 0
        """The bound that all KV may ever have; the bound of now where that is more."""
        self.free_bytes = 0
        """The last known bytes by which the bound could be raised at once."""

    @property
    def budget_bytes(self) -> int:
        """The bound of all KV."""
        return self._slots.budget_bytes

    @property
    def growth_bytes(self) -> int:
        """Bytes by which the bound may ever be raised."""
        return max(0, self.most_bytes - self._slots.budget_bytes)

    @property
    def left_bytes(self) -> int:
        """Bytes that running and parked sequences leave; below 0 where they outgrew the bound."""
        return self._slots.budget_bytes - self._taken_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes set aside for running sequences."""
        return sum(self._shares.values())

    @property
    def parked_bytes(self) -> int:
        """Bytes that parked sequences hold."""
        return sum(self._parked.values())

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that the model's context and the bound will ever allow."""
        return self._tokens_in(self._slots.budget_bytes + self.growth_bytes)

    def check_bound(self, kv_bytes: int) -> None:
        """Raise InvalidArgument for a bound in which no sequence fits at all."""
        least = self.kv_bytes(1)
        if kv_bytes < least:
            raise InvalidArgument(
                f"a KV bound of {kv_bytes} bytes holds no sequence; "
                f"the first {KV_BLOCK_TOKENS} tokens take {least}"
            )

    def check_fits(self, job: DecodeJob) -> None:
        """Raise KvRefused when `job` can never fit."""
        if self.whole_bytes(job) > self._slots.budget_bytes + self.growth_bytes:
            raise self.refusal(job)

    def refusal(self, job: DecodeJob, retry_after_s: float | None = None) -> KvRefused:
        """The error of a job that does not fit: ever, or until a later try."""
        bound, growth = self._slots.budget_bytes, self.growth_bytes
        now = self._tokens_in(bound + min(growth, self.free_bytes))
        return KvRefused(
            f"the keys and values of a prompt of {len(job.token_ids)} and {job.max_tokens} more "
            f"tokens take {format_bytes(self.whole_bytes(job))}, and the memory of this node holds "
            f"{format_bytes(bound + growth)} of them: prompt and answer together may have "
            f"{self.longest_tokens} tokens at most, and {now} now",
            retry_after_s=retry_after_s,
        )

    def lacks(self, owner: Hashable, job: DecodeJob, length: int = 0) -> int:
        """Bytes that are missing for `job`, which has come to `length`; 0 or less = none.

        The KV that it holds itself while it is parked does not count.
        """
        taken = self._taken_bytes - self._parked.get(owner, 0)
        return taken + self.need_bytes(job, length) - self._slots.budget_bytes

    def crowds(self, owner: Hashable, job: DecodeJob, length: int = 0) -> int:
        """Bytes of kept KV of others that go when `job` enters."""
        own = self._slots.kept_bytes(job.kv_key)
        others = self._slots.held_bytes - own
        return min(others, max(0, self.lacks(owner, job, length) + others))

    def enter(self, owner: Hashable, job: DecodeJob, length: int = 0) -> None:
        """Set room aside for a sequence; kept KV is dropped as far as it is in the way."""
        self._parked.pop(owner, None)
        self._shares[owner] = self.need_bytes(job, length)
        self._lend()

    def grown(self, owner: Hashable, length: int) -> bool:
        """Note a sequence's length after a step. Returns whether all KV is within the bound."""
        needed = self.kv_bytes(length + 1)
        if needed > self._shares.get(owner, needed):
            self._shares[owner] = needed
            self._lend()
        return self.holds

    @property
    def holds(self) -> bool:
        """Whether all KV is within the bound."""
        return self._taken_bytes <= self._slots.budget_bytes

    def headroom_tokens(self, owner: Hashable, length: int) -> int:
        """Tokens that still fit into the room set aside for a sequence of this length."""
        return self._tokens_in(self._shares.get(owner, 0)) - length - 1

    def park(self, owner: Hashable, length: int) -> None:
        """Count only the KV that a sequence of this length has."""
        self._shares.pop(owner, None)
        self._parked[owner] = self.kv_bytes(length)
        self._lend()

    def leave(self, owner: Hashable) -> None:
        """Give back the room of a sequence, if it has any."""
        share = self._shares.pop(owner, None)
        parked = self._parked.pop(owner, None)
        if share is not None or parked is not None:
            self._lend()

    def held_bytes(self, owner: Hashable) -> int:
        """Bytes set aside for a sequence or held by it; 0 for one that is not here."""
        return self._shares.get(owner, 0) or self._parked.get(owner, 0)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of a sequence of this length."""
        return self._facts.kv_bytes(tokens)

    def step_bytes(self) -> int:
        """Bytes by which the bound is raised beside those that are needed."""
        return self._facts.kv_bytes_per_token * STEP_TOKENS

    def whole_bytes(self, job: DecodeJob) -> int:
        """Bytes of KV of `job` at its longest."""
        return self.kv_bytes(len(job.token_ids) + job.max_tokens)

    def need_bytes(self, job: DecodeJob, length: int = 0) -> int:
        """Bytes that are set aside when `job` enters, which has come to `length`."""
        prompt = len(job.token_ids)
        ahead = max(prompt, length) + AHEAD_TOKENS
        return self.kv_bytes(min(ahead, prompt + job.max_tokens))

    def _tokens_in(self, size: int) -> int:
        """Tokens of one sequence that fit into `size` bytes of KV."""
        fitting = bisect_right(
            self._blocks, size, key=lambda blocks: self.kv_bytes(blocks * KV_BLOCK_TOKENS)
        )
        return min(self._facts.context_tokens, (fitting - 1) * KV_BLOCK_TOKENS)

    def _lend(self) -> None:
        self._taken_bytes = self.lent_bytes + self.parked_bytes
        self._slots.lend(self._taken_bytes)


def usual_kv_bytes(facts: LoadedFacts) -> int:
    """The KV bound of an engine where none is set: at least one whole context."""
    return max(KEPT_BYTES, facts.kv_bytes(facts.context_tokens))
