"""gRPC channels: one reused channel per address, with options that notice dead peers.

`keepalive_timeout_ms` alone does not bound detection in grpcio; `http2.ping_timeout_ms` does.
Reconnect backoff is capped, so a peer that returns after minutes is used again within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

from kakeya.core.units import MIB

Option = tuple[str, int | str]
NETWORK_MESSAGE_BYTES = 4 * MIB
"""Between nodes and from clients, after decompression; gossip has its own, lower limit."""
ENGINE_MESSAGE_BYTES = 64 * MIB
"""On the unix socket of an engine, which gets whole histories: 4 bytes a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """How fast a silent peer is noticed: at the latest after `interval_s + timeout_s`."""

    interval_s: float = 10.0
    timeout_s: float = 5.0

    def client_options(self) -> tuple[Option, ...]:
        """Options of a channel."""
        return (
            ("grpc.keepalive_time_ms", int(self.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.http2.ping_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.min_reconnect_backoff_ms", 2000),
            ("grpc.max_reconnect_backoff_ms", 4000),
        )

    def server_options(self) -> tuple[Option, ...]:
        """Options of a server that accepts these pings and sends its own."""
        return (
            ("grpc.keepalive_time_ms", int(self.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.http2.ping_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", int(self.interval_s * 500)),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", int(self.interval_s * 500)),
            ("grpc.http2.max_ping_strikes", 0),
            # Two processes on one port would each get half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 256),
        )


def message_options(limit_bytes: int = NETWORK_MESSAGE_BYTES) -> tuple[Option, ...]:
    """Options that bound messages both ways; larger ones end with RESOURCE_EXHAUSTED."""
    return (
        ("grpc.max_receive_message_length", limit_bytes),
        ("grpc.max_send_message_length", limit_bytes),
    )


class Channels:
    """One asyncio channel per address, made on first use and kept until `aclose`."""

    def __init__(self, keepalive: Keepalive | None = None) -> None:
        self._options = (keepalive or Keepalive()).client_options() + message_options()
        self._open: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to `HOST:PORT` or `unix:PATH`; connects lazily."""
        channel = self._open.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=self._options)
            self._open[address] = channel
        return channel

    async def discard(self, address: str) -> None:
        """Close the channel to one address, if there is one."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close()

    async def aclose(self) -> None:
        """Close every channel."""
        for address in list(self._open):
            await self.discard(address)


def sync_channel(address: str, keepalive: Keepalive | None = None) -> grpc.Channel:
    """Open a blocking channel, for threads that own no event loop."""
    options = (keepalive or Keepalive()).client_options() + message_options()
    return grpc.insecure_channel(address, options=options)
