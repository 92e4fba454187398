"""How long an unused prefix is kept, and the weight of its blocks.

`Retention` is a promise of time: in that window after its last use a block goes only for want of
room. It also says whether the block may lie on a disk. `BlockClass` weighs blocks against each
other when room is short; a pinned block never goes, so it needs no weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

from kakeya.core.errors import InvalidArgument


class Retention(IntEnum):
    """How long a prefix is kept, and where; a larger value promises more."""

    IN_MEMORY = 1
    SHORT = 2
    LONG = 3
    EXTENDED = 4

    @property
    def seconds(self) -> int:
        """Length of the window."""
        return _WINDOWS_S[self]

    @property
    def is_on_disk(self) -> bool:
        """Whether the prefix is written to disk, and may go to other nodes."""
        return self is not Retention.IN_MEMORY

    @property
    def label(self) -> str:
        """The word in files and parameters."""
        return self.name.lower()


_WINDOWS_S: Mapping[Retention, int] = {
    Retention.IN_MEMORY: 5 * 60,
    Retention.SHORT: 5 * 60,
    Retention.LONG: 60 * 60,
    Retention.EXTENDED: 24 * 60 * 60,
}


class BlockClass(StrEnum):
    """The author of a block's tokens; SPECULATIVE: warmed ahead, no request asked for it yet;
    BATCH: of requests that no person waits for, it goes before blocks of all other classes."""

    BATCH = "batch"
    SPECULATIVE = "speculative"
    ASSISTANT = "assistant"
    USER = "user"
    TOOL = "tool"
    SYSTEM = "system"

    @property
    def weight(self) -> float:
        """The worth of keeping the block, in speculative blocks."""
        return WEIGHTS[self]


WEIGHTS: Mapping[BlockClass, float] = {
    BlockClass.BATCH: 0.5,
    BlockClass.SPECULATIVE: 1.0,
    BlockClass.ASSISTANT: 2.0,
    BlockClass.USER: 4.0,
    BlockClass.TOOL: 4.0,
    BlockClass.SYSTEM: 8.0,
}
"""Each step is worth one more use: a block's uses count linearly beside its weight."""

_RETENTIONS = {retention.label: retention for retention in Retention}


def retention_named(label: str) -> Retention:
    """Find a retention by its word. Raises InvalidArgument naming the words."""
    try:
        return _RETENTIONS[label]
    except KeyError:
        words = ", ".join(_RETENTIONS)
        raise InvalidArgument(f"retention {label[:40]!r}; it must be one of {words}") from None


def weightier(one: BlockClass, other: BlockClass) -> BlockClass:
    """Choose the class of a block that is two things at once; of equals the first."""
    return other if other.weight > one.weight else one
