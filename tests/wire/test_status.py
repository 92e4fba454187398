"""What a caller makes of a failed call: the error that the node named, if its status agrees."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from kakeya.core import errors
from kakeya.wire.status import STATUS_BY_ERROR, error_from_rpc

Code = grpc.StatusCode


def failed(code: grpc.StatusCode, details: str, **metadata: str) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*((key.replace("_", "-"), text) for key, text in metadata.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


@pytest.mark.parametrize("kind", [*STATUS_BY_ERROR, errors.QueueFull, errors.CapacityExhausted])
def test_every_error_that_a_node_names_arrives_as_itself(kind: type[errors.KakeyaError]) -> None:
    code = next(STATUS_BY_ERROR[base] for base in kind.__mro__ if base in STATUS_BY_ERROR)
    error = error_from_rpc(failed(code, "law: what", kakeya_error=kind.code), "peer:1")
    assert type(error) is kind
    assert error.message == "peer:1: law: what"


def test_a_failed_precondition_of_any_node_is_a_broken_law() -> None:
    error = error_from_rpc(failed(Code.FAILED_PRECONDITION, "cache_length: 5, not 4"), "peer:1")
    assert isinstance(error, errors.InvariantBroken)
    assert (error.kind, error.detail) == ("peer:1: cache_length", "5, not 4")


def test_a_name_that_its_status_contradicts_counts_for_nothing() -> None:
    error = error_from_rpc(failed(Code.NOT_FOUND, "gone", kakeya_error="config"), "peer:1")
    assert type(error) is errors.NotFound
    error = error_from_rpc(failed(Code.NOT_FOUND, "gone", kakeya_error="no such word"), "peer:1")
    assert type(error) is errors.NotFound


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("7", 7.0), ("", None), ("-1", None), ("nan", None), ("9" * 400, 3600.0), ("²", None)],
)
def test_a_wait_is_taken_from_whole_seconds_and_bounded(said: str, seconds: float | None) -> None:
    error = error_from_rpc(failed(Code.RESOURCE_EXHAUSTED, "full", retry_after=said), "peer:1")
    assert isinstance(error, errors.Refused)
    assert error.retry_after_s == seconds
