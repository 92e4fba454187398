"""Calls every method of every service of a node and prints which status each one gave, as JSON.

child_stranger.py ADDRESS plain
child_stranger.py ADDRESS tls CA_PEM SERVER_NAME                   no certificate of its own
child_stranger.py ADDRESS tls CA_PEM SERVER_NAME CERT_PEM KEY_PEM
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from kakeya.v1 import distributed_pb2, fleet_pb2, runtime_pb2

DEADLINE_S = 60.0


def methods() -> Iterator[tuple[str, bool]]:
    """Every method's path and whether its answer is a stream."""
    for module in (distributed_pb2, fleet_pb2, runtime_pb2, health_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method.server_streaming


def open_channel(address: str, kind: str, *files: str) -> grpc.Channel:
    if kind == "plain":
        return grpc.insecure_channel(address)
    authority, server_name, *own = files
    certificate, key = (Path(name).read_bytes() for name in own) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes(), key, certificate)
    options = (("grpc.ssl_target_name_override", server_name),)
    return grpc.secure_channel(address, credentials, options=options)


def call(channel: grpc.Channel, path: str, *, streams: bool) -> str:
    try:
        if streams:
            next(iter(channel.unary_stream(path)(b"", timeout=DEADLINE_S)))
        else:
            channel.unary_unary(path)(b"", timeout=DEADLINE_S)
    except grpc.RpcError as failure:
        return str(failure.code().name)  # type: ignore[attr-defined]
    return "OK"


def main(address: str, kind: str, *files: str) -> None:
    with open_channel(address, kind, *files) as channel:
        codes = {path: call(channel, path, streams=streams) for path, streams in methods()}
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
