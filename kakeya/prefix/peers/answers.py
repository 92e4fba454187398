"""The checks of a peer's answers: an answer that fails one is a lie, and is not used.

A peer may have less than its card says, or fail; it cannot have more than was asked for, other
sizes than KV has, or other blocks than are due. Pure.
"""

from __future__ import annotations

from kakeya.core.errors import PeerProtocol
from kakeya.prefix.peers.choice import BlockHolder, Hit
from kakeya.prefix.peers.seams import BlockPart, MissingBlocks, usable
from kakeya.v1 import distributed_pb2 as pb


class Lie(PeerProtocol):
    """An answer that contradicts itself or the protocol, as seen here; not an error that a peer
    reports."""


def read_hit(
    holder: BlockHolder, wanted: MissingBlocks, said: pb.LookupPrefixResponse
) -> Hit | None:
    """The useful part of a lookup's answer. Raises Lie for an answer that contradicts itself."""
    count, sizes = said.hit_block_count, tuple(said.block_bytes)
    if not count or not said.lease_id:
        return None
    most = (count + bool(said.tail_tokens)) * (wanted.block_bytes + wanted.state_bytes)
    told = sum(sizes) + said.tail_bytes
    is_told = len(sizes) in (0, count) and (not sizes or told == said.transfer_bytes)
    if count > len(wanted.ids) or not is_told or said.transfer_bytes > most:
        raise Lie(
            f"{holder.address}: found {count} of {len(wanted.ids)} blocks with {len(sizes)} sizes "
            f"and {said.transfer_bytes} bytes together; there may be {most}"
        )
    tail = _tail_of(holder, wanted, said)
    blocks = usable(wanted, sizes, tail) if sizes else count
    if blocks <= wanted.have:
        return None
    if blocks < count:
        tail = None
    return Hit(holder=holder, blocks=blocks, lease_id=said.lease_id, sizes=sizes, tail=tail)


def _tail_of(
    holder: BlockHolder, wanted: MissingBlocks, said: pb.LookupPrefixResponse
) -> BlockPart | None:
    """The tail behind a hit. Raises Lie for one that was not asked for."""
    tokens, size = said.tail_tokens, said.tail_bytes
    if not tokens:
        return None
    after = tail_after(holder, wanted)
    ids = wanted.tails(after)
    if said.hit_block_count != after or tokens > len(ids) or not said.block_bytes:
        raise Lie(
            f"{holder.address}: found a tail of {tokens} tokens behind {said.hit_block_count} "
            f"blocks; it was asked for one of at most {len(ids)} behind {after}"
        )
    # One without the state behind it is whole, and of no use.
    is_usable = size == wanted.tail_size(tokens)
    return BlockPart(id=ids[tokens - 1], tokens=tokens, size=size) if is_usable else None


def tail_after(holder: BlockHolder, wanted: MissingBlocks) -> int:
    """The number of blocks behind which a peer may have a tail: those that its card names, or
    all."""
    return holder.blocks or len(wanted.ids)


def due_part(hit: Hit, wanted: MissingBlocks, index: int) -> BlockPart:
    """The part of a lease that is due; of 0 bytes where its peer did not say how many."""
    if hit.tail is not None and index == hit.blocks:
        return hit.tail
    size = hit.sizes[index] if hit.sizes else 0
    return BlockPart(id=wanted.ids[index], tokens=wanted.fingerprint.block_tokens, size=size)


def checked(
    chunk: pb.FetchBlocksResponse, due: BlockPart, index: int, holder: BlockHolder
) -> pb.FetchBlocksResponse:
    """The first chunk of a block, which must be the one that is due. Raises Lie."""
    if chunk.block_index != index or chunk.block_hash != due.id:
        raise Lie(
            f"{holder.address}: block {chunk.block_index} named {chunk.block_hash[:4].hex()}... "
            f"came where {index}, {due.id[:4].hex()}..., was due"
        )
    if chunk.token_count != due.tokens:
        raise Lie(
            f"{holder.address}: block {index} has {chunk.token_count} tokens; it must have "
            f"{due.tokens}"
        )
    return chunk
