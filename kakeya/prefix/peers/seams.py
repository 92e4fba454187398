"""The seams between a node's blocks and those of its peers: values and protocols only.

A block's name is its place in a chain of hashes, so a run of names says the whole text up to its
end. Sources are found by the `exact` digest of a fingerprint, with which the chain begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kakeya.generation.kv import KvHolder
from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.pages import FingerprintBlocks
from kakeya.prefix.peers.two_sided_fetch import Rendezvous

MAX_IDS = 4096
"""Blocks of one history: 128 Ki tokens in the smallest blocks of 32."""
LOOKUP_S = 0.020
"""How long a lookup may take: longer, and the prompt could have begun meanwhile."""
MOST_LOOKUP_S = 0.25
_LOOKUP_SHARE = 0.1
"""Of the seconds to compute a prompt: where these are many, a busy peer is worth a longer wait."""
MOST_PEERS = 3
"""Peers that one history is looked up at."""
SLACK_S = 0.5
"""How far a fetch may fall behind the prefill that it replaces, and how long a peer may be silent:
more than a block of 36 MiB takes over a gigabit."""
LEAST_SLACK_S = 0.15
_SLACK_SHARE = 0.25
"""Of a block's prefill; a later block comes from the end, while the engine computes."""
TAIL_NAME_BYTES = 8
"""Bytes of a tail's id in a lookup: enough to find out a peer that answers with another tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintUsage:
    """The use of blocks of one fingerprint, and the bytes that are free for more."""

    blocks: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Loan:
    """The bytes of a block, lent until `release` is called, once; do not touch `view` after it."""

    view: memoryview
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """A block of a history, or a tail, which has fewer tokens; `size` in bytes."""

    id: BlockId
    tokens: int
    size: int


class BlockSource(Protocol):
    """The blocks of one fingerprint that this node has, in memory and on disk together."""

    def leading(self, ids: Sequence[BlockId]) -> tuple[int, ...]:
        """Bytes of each block of the longest leading run that is here; () = not even the first."""
        ...

    def tail(self, behind: BlockId, names: Sequence[bytes]) -> BlockPart | None:
        """The longest tail here behind a block whose id begins with one of the names: the first is
        of one token, and so on."""
        ...

    def pin(self, ids: Sequence[BlockId]) -> Callable[[], None]:
        """Keep those of these blocks that are here until the returned function is called, once."""
        ...

    async def read(self, block_id: BlockId) -> Loan | None:
        """Lend a block; None = it went meanwhile."""
        ...

    def resident(self) -> Iterable[BlockId]:
        """Names that peers should know of: parents before children, the most useful first."""
        ...

    def usage(self) -> FingerprintUsage:
        """The use of it now."""
        ...


class BlockSources(Protocol):
    """The sources of a node."""

    def source(self, exact: bytes) -> BlockSource | None:
        """The blocks of the fingerprint with this digest."""
        ...

    def fingerprints(self) -> tuple[KvFingerprint, ...]:
        """Of every source, the most used first."""
        ...


class BlockSink(Protocol):
    """Where fetched blocks of one history go."""

    async def put(self, index: int, payload: bytearray, tail_tokens: int = 0) -> bool:
        """Take a block whose hash was checked; False = no room, and nothing further is wanted.

        With `tail_tokens` it is a tail of so many, behind the whole blocks before `index`.
        """
        ...


class PeerSource(Protocol):
    """Other nodes that may have blocks."""

    async def fetch(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
        told: KvHolder,
    ) -> Collection[BlockId]:
        """Bring whole blocks from the first that is not here on into pages, sooner than they would
        be computed, from the node that is `told` to have them or from others; which came. Never
        raises."""
        ...

    async def rendezvous(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
        told: KvHolder,
        joined: Callable[[list[BlockId]], None],
    ) -> Rendezvous | None:
        """Have blocks come from the end while they are computed from the beginning, where that is
        sooner than either alone. Never raises."""
        ...


def _no_tails(blocks: int) -> tuple[BlockId, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBlocks:
    """The blocks of a history that this node lacks, and the cost of computing them.

    `ids` are all whole blocks of the history, of which the first `have` are here. A block has
    `block_bytes`; of a model with recurrent state (`state_bytes` > 0) those at checkpoints have
    that many more, and a run is of use only up to one of these. A fetch falls behind the prefill
    that it replaces by `most_slack_s`, no more. `tails` names the tails that may lie behind the
    first so many blocks: of one token, of two, and so on.
    """

    fingerprint: KvFingerprint
    ids: tuple[BlockId, ...]
    have: int
    block_bytes: int
    state_bytes: int = 0
    prefill_tokens_per_s: float
    most_slack_s: float = SLACK_S
    tails: Callable[[int], tuple[BlockId, ...]] = field(default=_no_tails, repr=False)

    @property
    def missing(self) -> int:
        """How many blocks are not here."""
        return len(self.ids) - self.have

    @property
    def block_s(self) -> float:
        """Seconds to compute a block here; 0 where it was not measured, so that no fetch pays."""
        rate = self.prefill_tokens_per_s
        return self.fingerprint.block_tokens / rate if rate > 0 else 0.0

    @property
    def lookup_s(self) -> float:
        """Seconds that peers may take to answer a lookup."""
        return min(max(LOOKUP_S, _LOOKUP_SHARE * self.missing * self.block_s), MOST_LOOKUP_S)

    @property
    def slack_s(self) -> float:
        """How far a fetch over a link without a measurement may fall behind: a part of a block's
        prefill, and at least a time that a person does not notice."""
        longest = max(LEAST_SLACK_S, _SLACK_SHARE * self.block_s)
        return min(self.block_s, longest, self.most_slack_s)

    def is_size(self, size: int) -> bool:
        """Whether a block may have so many bytes."""
        return size in (self.block_bytes, self.block_bytes + self.state_bytes)

    def tail_size(self, tokens: int) -> int:
        """Bytes of a tail of so many tokens that decoding can go on behind."""
        return self.block_bytes * tokens // self.fingerprint.block_tokens + self.state_bytes

    def is_checkpoint(self, size: int) -> bool:
        """Whether decoding can go on behind a block of so many bytes."""
        return size == self.block_bytes + self.state_bytes


def usable(wanted: MissingBlocks, sizes: Sequence[int], tail: BlockPart | None = None) -> int:
    """How many leading blocks of a hit are of use: up to the last checkpoint, all of a legal size.

    `sizes` begin at block 0; at most as many count as are wanted. A tail behind all of them is a
    checkpoint.
    """
    if tail is not None and all(wanted.is_size(size) for size in sizes):
        return len(sizes)
    sizes = sizes[: len(wanted.ids)]
    good = next((i for i, size in enumerate(sizes) if not wanted.is_size(size)), len(sizes))
    return next((i for i in range(good, 0, -1) if wanted.is_checkpoint(sizes[i - 1])), 0)
