"""Drafts on the wire: requests and responses of ProposeBlock, with and without our extensions.

A peer without the extensions answers exactly `block_size` ids, all of them meant. With them, the
first `num_valid` are meant; the rest is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.core.units import pack_ids, unpack_ids
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.decoding.draft.states import HiddenStates
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import drafts_pb2 as drafts_pb

MAX_PREFIX_TOKENS = 128 * 1024
MAX_BLOCK_TOKENS = 1024
MAX_STEPS = 1024
"""Each step may be a forward of a draft model: a peer must not keep one busy for hours."""
PADDING_ID = 0
WORD = (1 << 64) - 1
"""The bits of a seed that travel on the wire."""


def request_to_wire(
    prefix: Sequence[int],
    block_size: int,
    num_steps: int,
    model_id: str,
    *,
    extended: bool,
    noise: SamplingNoise | None = None,
) -> pb.ProposeBlockRequest:
    """Ask for a block after `prefix`; of a longer one than a server takes, after its end.

    `noise` is told to extended peers only; None is a greedy decode.
    """
    recent = prefix[-MAX_PREFIX_TOKENS:] if len(prefix) > MAX_PREFIX_TOKENS else prefix
    request = pb.ProposeBlockRequest(block_size=block_size, num_steps=num_steps, model_id=model_id)
    try:
        if extended:
            request.allow_short = True
            request.committed_token_ids_le32 = pack_ids(recent)
        else:
            request.committed_token_ids.extend(recent)
    except (OverflowError, ValueError, TypeError) as failure:
        raise InvalidArgument(f"a prefix is token ids in 0..2^32-1: {failure}") from failure
    if extended and noise is not None and len(recent) == len(prefix):
        # The noise belongs to the position, which only a whole prefix tells.
        request.seed = noise.seed & WORD
        request.temperature = noise.temperature
    return request


def prefix_from_wire(request: pb.ProposeBlockRequest) -> list[int]:
    """Read a checked prefix. Raises InvalidArgument for an empty, long or torn one."""
    if request.committed_token_ids_le32:
        packed = request.committed_token_ids_le32
        if len(packed) % 4:
            raise InvalidArgument(
                f"committed_token_ids_le32 has {len(packed)} bytes, that is no multiple of 4",
                param="committed_token_ids_le32",
            )
        count = len(packed) // 4
    else:
        packed = b""
        count = len(request.committed_token_ids)
    if not 1 <= count <= MAX_PREFIX_TOKENS:
        raise InvalidArgument(
            f"the prefix has {count} tokens, it must have 1 to {MAX_PREFIX_TOKENS}",
            param="committed_token_ids",
        )
    return unpack_ids(packed) if packed else list(request.committed_token_ids)


def check_sizes(request: pb.ProposeBlockRequest) -> None:
    """Raise InvalidArgument for a block_size or num_steps that cannot be served."""
    if not 1 <= request.block_size <= MAX_BLOCK_TOKENS:
        raise InvalidArgument(
            f"block_size is {request.block_size}, it must be 1 to {MAX_BLOCK_TOKENS}",
            param="block_size",
        )
    if not 1 <= request.num_steps <= MAX_STEPS:
        raise InvalidArgument(
            f"num_steps is {request.num_steps}, it must be 1 to {MAX_STEPS}", param="num_steps"
        )


def draft_to_wire(draft: Draft, request: pb.ProposeBlockRequest) -> pb.ProposeBlockResponse:
    """Answer with exactly block_size ids, or without padding where the caller allows that."""
    tokens = draft.tokens[: request.block_size]
    padding = 0 if request.allow_short else request.block_size - len(tokens)
    return pb.ProposeBlockResponse(
        token_ids=tokens + (PADDING_ID,) * padding,
        # Without a model there is no pass to count; the contract says 1 for one look-up.
        forward_passes=max(1, draft.forward_passes),
        diffusion_steps=draft.diffusion_steps,
        peak_activation_bytes=draft.peak_activation_bytes,
        num_valid=len(tokens),
        confidence=draft.confidence[: len(tokens)],
        draft_us=draft.draft_us,
        match_length=draft.match_length,
    )


def states_to_wire(states: HiddenStates) -> drafts_pb.HiddenStates:
    """Write hidden states."""
    return drafts_pb.HiddenStates(
        drafter=states.drafter, first=states.first, width=states.width, data_f16=states.data
    )


def states_from_wire(message: drafts_pb.HiddenStates, tokens: int) -> HiddenStates:
    """Read those of a text with so many tokens. Raises InvalidArgument."""
    states = HiddenStates(
        drafter=message.drafter, first=message.first, width=message.width, data=message.data_f16
    )
    states.check(tokens)
    return states


def draft_from_wire(
    response: pb.ProposeBlockResponse, block_size: int, source: str, vocab_size: int | None
) -> Draft:
    """Read a draft. Raises PeerProtocol for a wrong length, count, confidence or token id."""
    count = len(response.token_ids)
    extended = response.HasField("num_valid")
    valid = response.num_valid if extended else count
    if count > block_size or valid > count or (count != block_size and not extended):
        raise PeerProtocol(
            f"{source} answered {count} ids, {valid} of them meant, to a block of {block_size}"
        )
    tokens = tuple(response.token_ids[:valid])
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        raise PeerProtocol(
            f"{source} drafted id {max(tokens)}, the vocabulary has {vocab_size} ids"
        )
    confidence = tuple(response.confidence[:valid])
    if confidence and (len(confidence) != valid or not all(0 <= c <= 1 for c in confidence)):
        raise PeerProtocol(
            f"{source} sent {len(confidence)} confidences for {valid} tokens; "
            "it takes one in 0..1 for each, or none"
        )
    return Draft(
        source=source,
        tokens=tokens,
        confidence=confidence,
        match_length=response.match_length,
        forward_passes=response.forward_passes,
        diffusion_steps=response.diffusion_steps,
        peak_activation_bytes=response.peak_activation_bytes,
        draft_us=response.draft_us,
    )
