"""What a caller makes of a failed call: the error that the node named, if its status agrees."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from kakeya.core import errors
from kakeya.wire.status import error_from_rpc, metadata_of, status_of

Code = grpc.StatusCode


def failed(code: grpc.StatusCode, details: str, **metadata: str) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*((key.replace("_", "-"), text) for key, text in metadata.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.KakeyaError)
    and kind is not errors.KakeyaError
]


def said_by(error: errors.KakeyaError) -> grpc.aio.AioRpcError:
    """The failed call of a node that raised the error."""
    trailing = grpc.aio.Metadata(*metadata_of(error))
    return grpc.aio.AioRpcError(status_of(error), grpc.aio.Metadata(), trailing, error.message)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_that_a_node_raises_arrives_as_itself_with_its_fields(
    kind: type[errors.KakeyaError],
) -> None:
    if issubclass(kind, errors.InvariantBroken):
        raised: errors.KakeyaError = kind("law", "what")
    else:
        raised = kind("law: what")
    raised.retry_after_s = 0.25
    if isinstance(raised, errors.InvalidArgument):
        raised.param = "messages[0].größe"
    error = error_from_rpc(said_by(raised), "peer:1")
    assert type(error) is kind
    assert error.message == "peer:1: law: what"
    names = {"message": error.message} | ({"kind": "peer:1: law"} if "kind" in vars(raised) else {})
    assert vars(error) == vars(raised) | names


def test_an_error_of_no_kind_comes_from_a_peer_that_is_not_correct() -> None:
    error = error_from_rpc(said_by(errors.KakeyaError("what")), "peer:1")
    assert type(error) is errors.PeerProtocol


def test_the_wait_of_an_older_node_is_in_whole_seconds() -> None:
    error = error_from_rpc(failed(Code.RESOURCE_EXHAUSTED, "full", retry_after="7"), "peer:1")
    assert error.retry_after_s == 7.0
    raised = errors.Refused("full", retry_after_s=0.25)
    assert dict(metadata_of(raised))["retry-after"] == "1", "an older node would ask at once again"


def test_names_of_parameters_are_bounded() -> None:
    error = error_from_rpc(said_by(errors.InvalidArgument("what", param="é" * 999)), "peer:1")
    assert isinstance(error, errors.InvalidArgument)
    assert error.param == "é" * 200


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
