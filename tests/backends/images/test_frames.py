"""Frames: what is packed is read, however it is cut; what is no frame is an error or the end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.images.frames import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    WorkerFrame,
    packed,
    read_frame,
    receive_frame,
)
from kakeya.core.errors import PeerProtocol

VALUES = st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=20)
FIELDS = st.dictionaries(st.sampled_from(["request", "prompt", "size"]), VALUES)
FRAMES = st.lists(
    st.tuples(st.sampled_from(["draw", "image"]), FIELDS, st.binary(max_size=99)), max_size=5
)


async def received(stream: bytes, cuts: list[int]) -> list[WorkerFrame]:
    reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        reader.feed_data(stream[begin:end])
    reader.feed_eof()
    found = []
    while frame := await receive_frame(reader):
        found.append(frame)
    return found


@given(FRAMES, st.lists(st.integers(0, 999), max_size=5))
def test_both_ends_read_what_was_packed_however_it_is_cut(frames, cuts) -> None:
    stream = b"".join(packed(kind, fields, body) for kind, fields, body in frames)
    found = asyncio.run(received(stream, cuts))
    assert [(one.kind, one.body) for one in found] == [(kind, body) for kind, _, body in frames]
    assert [
        fields.items() <= one.head.items()
        for one, (_, fields, _) in zip(found, frames, strict=True)
    ] == [True] * len(frames)
    file = io.BytesIO(stream)
    assert list(iter(lambda: read_frame(file), None)) == found


@given(st.binary(max_size=60))
def test_other_bytes_are_an_error_or_the_end(stream: bytes) -> None:
    for read in (lambda: asyncio.run(received(stream, [])), lambda: read_frame(io.BytesIO(stream))):
        with contextlib.suppress(PeerProtocol):
            assert not read()


@pytest.mark.parametrize("length", [-1, MAX_BODY_BYTES + 1, True, "9", 1.0])
def test_a_length_that_no_frame_has_is_not_waited_for(length: object) -> None:
    with pytest.raises(PeerProtocol, match="announces"):
        read_frame(io.BytesIO(packed("image", {"bytes": length})))


def test_a_line_without_an_end_is_refused_at_the_limit() -> None:
    with pytest.raises(PeerProtocol, match=str(MAX_HEAD_BYTES)):
        asyncio.run(received(b"x" * (MAX_HEAD_BYTES + 2), []))
