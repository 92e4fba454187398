"""What a caller makes of a failed call: the error that the node named, if its status agrees."""

from __future__ import annotations

import socket

import grpc
import grpc.aio
import pytest

from kakeya.core import errors
from kakeya.wire.calls import call_bytes
from kakeya.wire.status import error_from_rpc, metadata_of, plain_details, status_of

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


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "UNKNOWN: ipv4:10.0.0.3:50051: Failed to connect to remote host: Connection refused",
            "no connection to 10.0.0.3:50051: nothing listens there",
        ),
        (
            "UNKNOWN: ipv6:%5Bfd00::1%5D:5: tcp handshaker shutdown",
            "no connection to [fd00::1]:5: nothing answers there",
        ),
        (
            "FAILED_PRECONDITION: unix:/a.sock: connect failed: addr: unix:/a.sock error: No such "
            "file or directory",
            "no connection to unix:/a.sock: there is no such socket",
        ),
        ("UNKNOWN: ipv4:10.0.0.3:5: a new reason", "no connection to 10.0.0.3:5: a new reason"),
    ],
)
def test_a_connection_that_fails_is_told_in_plain_words(said: str, told: str) -> None:
    assert plain_details(f"failed to connect to all addresses; last error: {said}") == told
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:a:1: Connection refused"
    )
    assert plain_details(refused, "a:1") == "no connection: nothing listens there"


async def test_what_grpc_says_of_a_port_where_nothing_listens_is_told_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(errors.PeerUnavailable) as failed_call:
            await call_bytes(channel, "mini-2", "/a.B/C", b"", timeout_s=20)
    assert failed_call.value.message == (
        f"mini-2: no connection to {address}: nothing listens there"
    )
