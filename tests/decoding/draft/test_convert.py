from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.core.units import pack_ids
from kakeya.decoding.draft.convert import (
    MAX_PREFIX_TOKENS,
    draft_from_wire,
    draft_to_wire,
    prefix_from_wire,
    request_to_wire,
)
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.v1 import distributed_pb2 as pb

ids = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(prefix=st.lists(ids, min_size=1, max_size=50), extended=st.booleans())
def test_a_prefix_survives_the_wire(prefix, extended):
    sent = request_to_wire(prefix, 4, 1, "m", extended=extended).SerializeToString()
    assert prefix_from_wire(pb.ProposeBlockRequest.FromString(sent)) == prefix


def test_the_plain_form_uses_no_extension():
    request = request_to_wire([1, 2], 4, 3, "m", extended=False)
    assert (request.block_size, request.num_steps, request.model_id) == (4, 3, "m")
    assert list(request.committed_token_ids) == [1, 2]
    assert not request.allow_short
    assert not request.committed_token_ids_le32


NOISE = SamplingNoise(seed=2**64 - 1, temperature=0.5)


@pytest.mark.parametrize(("extended", "noise"), [(False, NOISE), (False, None), (True, None)])
def test_greedy_decodes_and_plain_peers_are_sent_no_noise(extended, noise):
    request = request_to_wire([1, 2], 4, 3, "m", extended=extended, noise=noise)
    assert not request.HasField("seed")
    assert not request.HasField("temperature")


@pytest.mark.parametrize("seed", [2**64 - 1, -1, 2**65 - 1])
def test_a_seed_is_sent_as_the_word_that_the_noise_is_made_of(seed):
    noise = SamplingNoise(seed=seed, temperature=0.5)
    request = request_to_wire([1, 2], 4, 3, "m", extended=True, noise=noise)
    assert (request.seed, request.temperature) == (2**64 - 1, 0.5)


def test_no_noise_is_sent_where_the_position_is_not_told():
    prefix = list(range(MAX_PREFIX_TOKENS + 1))
    assert request_to_wire(prefix[1:], 4, 1, "", extended=True, noise=NOISE).HasField("seed")
    assert not request_to_wire(prefix, 4, 1, "", extended=True, noise=NOISE).HasField("seed")


def test_of_a_prefix_that_no_server_takes_the_end_is_sent():
    prefix = list(range(MAX_PREFIX_TOKENS + 5))
    assert prefix_from_wire(request_to_wire(prefix, 4, 1, "", extended=True)) == prefix[5:]


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("bad", [-1, 2**32, 2**70])
def test_refuses_ids_that_the_wire_cannot_carry(bad, extended):
    with pytest.raises(InvalidArgument, match="token ids"):
        request_to_wire([1, bad], 4, 1, "", extended=extended)


@pytest.mark.parametrize(
    "request_",
    [
        pb.ProposeBlockRequest(),
        pb.ProposeBlockRequest(committed_token_ids_le32=b"12345"),
        pb.ProposeBlockRequest(committed_token_ids_le32=bytes(4 * (MAX_PREFIX_TOKENS + 1))),
        pb.ProposeBlockRequest(committed_token_ids=[1] * (MAX_PREFIX_TOKENS + 1)),
    ],
)
def test_refuses_an_empty_torn_or_endless_prefix(request_):
    with pytest.raises(InvalidArgument):
        prefix_from_wire(request_)


@settings(deadline=None)
@given(
    tokens=st.lists(ids, max_size=20),
    block=st.integers(1, 16),
    allow_short=st.booleans(),
)
def test_a_draft_survives_the_wire_cut_to_the_block(tokens, block, allow_short):
    draft = Draft(source="s", tokens=tuple(tokens), confidence=(0.5,) * len(tokens))
    request = pb.ProposeBlockRequest(block_size=block, allow_short=allow_short)
    response = draft_to_wire(draft, request)
    assert allow_short or len(response.token_ids) == block
    read = draft_from_wire(response, block, "s", None)
    assert read.tokens == tuple(tokens[:block])
    assert read.confidence == (0.5,) * len(read.tokens)


@pytest.mark.parametrize(
    "response",
    [
        pb.ProposeBlockResponse(token_ids=[1, 2, 3]),
        pb.ProposeBlockResponse(token_ids=[1, 2, 3, 4, 5]),
        pb.ProposeBlockResponse(token_ids=[1, 2], num_valid=3),
        pb.ProposeBlockResponse(token_ids=[1] * 9, num_valid=2),
        pb.ProposeBlockResponse(token_ids=[1, 2, 3, 100]),
        pb.ProposeBlockResponse(token_ids=[1, 2], num_valid=2, confidence=[0.5]),
        pb.ProposeBlockResponse(token_ids=[1], num_valid=1, confidence=[1.5]),
        pb.ProposeBlockResponse(token_ids=[1], num_valid=1, confidence=[float("nan")]),
    ],
)
def test_refuses_what_no_correct_peer_answers(response):
    with pytest.raises(PeerProtocol):
        draft_from_wire(response, 4, "peer", 50)


def test_padding_is_cut_off_and_a_plain_answer_is_meant_whole():
    padded = pb.ProposeBlockResponse(token_ids=[7, 0, 0, 0], num_valid=1)
    assert draft_from_wire(padded, 4, "p", 50).tokens == (7,)
    plain = pb.ProposeBlockResponse(token_ids=[7, 0, 0, 0])
    assert draft_from_wire(plain, 4, "p", 50).tokens == (7, 0, 0, 0)


def test_padding_beyond_the_vocabulary_harms_nobody():
    padded = pb.ProposeBlockResponse(token_ids=[7, 999], num_valid=1)
    assert draft_from_wire(padded, 2, "p", 50).tokens == (7,)


def test_the_packed_prefix_is_preferred():
    both = pb.ProposeBlockRequest(
        committed_token_ids=[9], committed_token_ids_le32=pack_ids([1, 2])
    )
    assert prefix_from_wire(both) == [1, 2]
