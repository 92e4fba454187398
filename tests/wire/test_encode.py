"""What a caller reads of a value that its field does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.v1 import runtime_pb2 as pb
from kakeya.wire.encode import fitted, in_metadata


@pytest.mark.parametrize(
    ("make", "param", "words"),
    [
        (
            lambda: fitted(pb.GenerateRequest, session_id="s", max_tokens=-1),
            "max_tokens",
            "max_tokens is -1, it must be a whole number in 0..4294967295",
        ),
        (
            lambda: fitted(pb.GenerateRequest, max_tokens=1, seed=1.5),  # type: ignore[arg-type]
            "seed",
            "seed is 1.5, it must be a whole number in 0..18446744073709551615",
        ),
        (
            lambda: fitted(pb.GenerateRequest, temperature="hot"),  # type: ignore[arg-type]
            "temperature",
            "temperature is 'hot', it must be a number",
        ),
        (
            lambda: fitted(pb.GenerateRequest, draft_policy="\ud800"),
            "draft_policy",
            r"draft_policy is '\ud800', it must be text that UTF-8 can hold",
        ),
        (
            lambda: fitted(pb.AppendTokensRequest, token_ids=[1, 2**32]),
            "token_ids",
            "token_ids[1] is 4294967296, it must be a whole number in 0..4294967295",
        ),
        (
            lambda: fitted(pb.AppendTokensRequest, token_ids=7),  # type: ignore[arg-type]
            "token_ids",
            "token_ids is 7, it must be a list, each of it a whole number in 0..4294967295",
        ),
    ],
)
def test_it_names_the_field_its_value_and_what_would_be_right(
    make: Callable[[], object], param: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as told:
        make()
    assert told.value.param == param
    assert told.value.message == words


def test_what_can_be_looked_at_only_once_is_refused_too() -> None:
    with pytest.raises(InvalidArgument, match="AppendTokensRequest: Value out of range: -5"):
        fitted(pb.AppendTokensRequest, token_ids=iter([1, -5]))


def test_what_fits_is_the_message() -> None:
    made = fitted(pb.GenerateRequest, session_id="s", max_tokens=3, seed=None)
    assert made == pb.GenerateRequest(session_id="s", max_tokens=3)
    assert not made.HasField("seed")


@pytest.mark.parametrize("text", ["", "desk 3: agent/7", "x" * 1024])
def test_metadata_carries_what_is_printable(text: str) -> None:
    assert in_metadata("client_name", text) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Zoë", "is 'Zoë', it must be of printable ASCII characters"),
        ("a\nb", r"is 'a\nb', it must be of printable ASCII characters"),
        ("x" * 1025, "has 1025 characters, it must have at most 1024"),
    ],
)
def test_metadata_that_grpc_would_refuse_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as told:
        in_metadata("client_name", text)
    assert (told.value.param, told.value.message) == ("client_name", f"client_name {words}")
