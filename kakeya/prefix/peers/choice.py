"""The choice of the peers that are asked for a prefix, and of the answer that is taken: pure.

    worth asking   the missing blocks take longer to compute than the question
    asked          the few with which all would be here soonest, by the blocks on their cards, the
                   speed of their links and the streams that are open on these
    taken          the longest run, of the links that beat the prefill here; faster ones first

A link beats the prefill when a block comes over it in less time than it is computed in. A link
without a measurement counts as fast: its first block measures it, at the price of the slack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kakeya.fleet.paths.link_rates import LinkRate, fetch_seconds
from kakeya.prefix.peers.seams import LOOKUP_S, MOST_PEERS, BlockPart, MissingBlocks
from kakeya.prefix.peers.two_sided import is_sooner

_PATIENCE = 2.0
"""How many times as long as the blocks before it a block may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHolder:
    """A node that may have blocks. `blocks` is how many leading ones its card names, 0 = it does
    not say."""

    node_id: str
    address: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The lease of a peer. `sizes` are bytes by block, of an extended peer; () = not told.

    `blocks` is how many leading ones are of use here; a `tail` lies behind these.
    """

    holder: BlockHolder
    blocks: int
    lease_id: str
    sizes: tuple[int, ...] = ()
    tail: BlockPart | None = None

    @property
    def end(self) -> int:
        """How many leading parts of the lease are of use, the tail counted."""
        return self.blocks + (self.tail is not None)

    @property
    def tail_tokens(self) -> int:
        """Of the tail; 0 = there is none."""
        return self.tail.tokens if self.tail is not None else 0

    @property
    def is_extended(self) -> bool:
        """Whether it sends a part of its blocks, and from the last one, if it is asked."""
        return bool(self.sizes)


def is_worth_asking(wanted: MissingBlocks) -> bool:
    """Whether so much is missing that a lookup costs little beside it."""
    return wanted.missing * wanted.block_s > 2 * LOOKUP_S


def is_worth_taking(wanted: MissingBlocks, bytes_per_s: float) -> bool:
    """Whether a block comes sooner than it is computed; 0 bytes/s = not measured."""
    if not bytes_per_s:
        return wanted.block_s > 0
    return fetch_seconds(wanted.block_bytes, bytes_per_s) < wanted.block_s


def is_worth_meeting(wanted: MissingBlocks, blocks: int, bytes_per_s: float) -> bool:
    """Whether blocks from a peer's end should come while those from the beginning are computed."""
    if not bytes_per_s:
        return False
    fetch_s = wanted.block_bytes / bytes_per_s
    return is_sooner(blocks - wanted.have, block_s=wanted.block_s, fetch_s=fetch_s)


def to_ask(
    wanted: MissingBlocks, holders: Iterable[BlockHolder], rates: dict[str, LinkRate]
) -> tuple[BlockHolder, ...]:
    """The peers to look the history up at, the most promising first."""
    found = [
        holder
        for holder in holders
        if (holder.blocks > wanted.have or not holder.blocks)
        and is_worth_taking(wanted, _rate(rates, holder))
    ]
    return best_first(wanted, found, rates)[:MOST_PEERS]


def best_first(
    wanted: MissingBlocks, holders: Iterable[BlockHolder], rates: Mapping[str, LinkRate]
) -> tuple[BlockHolder, ...]:
    """Order holders by the time at which all wanted blocks would be here, if each were the only
    one.

    Streams that are open on a link share it, so of equals the one with the fewest comes first. A
    link without a measurement counts as fast as the slowest known one: it wins by the blocks of its
    node, not by being unknown.
    """
    known = [rate.bytes_per_s for rate in rates.values() if rate.bytes_per_s]
    slowest_s = wanted.block_bytes / min(known) if known else 0.0

    def order(holder: BlockHolder) -> tuple[float, int, float, str]:
        link = rates.get(holder.node_id, LinkRate())
        fetch_s = wanted.block_bytes / link.bytes_per_s if link.bytes_per_s else slowest_s
        ready_s = _ready_s(wanted, holder.blocks, fetch_s * (1 + link.streams))
        return ready_s, link.streams, -link.bytes_per_s, holder.node_id

    return tuple(sorted(holders, key=order))


def _ready_s(wanted: MissingBlocks, blocks: int, fetch_s: float) -> float:
    """Seconds to fetch a node's share of the first `blocks`, and to compute the others."""
    held = max(0, min(blocks, len(wanted.ids)) - wanted.have)
    return held * fetch_s + (wanted.missing - held) * wanted.block_s


def in_order(
    wanted: MissingBlocks, hits: Sequence[Hit], rates: dict[str, LinkRate]
) -> tuple[Hit, ...]:
    """The hits that pay, the one to take first in front; the others are for when it fails."""
    found = [
        hit
        for hit in hits
        if hit.blocks > wanted.have and is_worth_taking(wanted, _rate(rates, hit.holder))
    ]
    found.sort(
        key=lambda hit: (
            -hit.blocks,
            -hit.tail_tokens,
            -_rate(rates, hit.holder),
            hit.holder.node_id,
        )
    )
    return tuple(found)


def due_s(wanted: MissingBlocks, taken: int, bytes_per_s: float = 0.0) -> float:
    """Until when the next block has to be here, in seconds from the end of the lookup.

    After `taken` blocks the fetch may be behind a prefill here by the slack, no more: whenever it
    is given up, the whole takes no longer than the prefill of all blocks, and the slack. A link
    that is known to need longer for a block has that, as far as it is of use.
    """
    slack_s = wanted.slack_s
    if bytes_per_s:
        needs_s = _PATIENCE * wanted.block_bytes / bytes_per_s
        slack_s = max(slack_s, min(needs_s, wanted.block_s, wanted.most_slack_s))
    return slack_s + taken * wanted.block_s


def _rate(rates: dict[str, LinkRate], holder: BlockHolder) -> float:
    known = rates.get(holder.node_id)
    return known.bytes_per_s if known is not None else 0.0
