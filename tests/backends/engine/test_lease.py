"""The bytes that KV takes while it grows."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kakeya.backends.engine.lease import with_copy, without_copy


@given(st.integers(0, 10_000))
def test_the_most_kv_that_grows_within_some_bytes_is_found(size: int) -> None:
    most = without_copy(size)
    assert with_copy(most) <= size < with_copy(most + 1)
