"""gRPC channels: one shared channel per address and name, with options that detect dead peers.

Between machines of a fleet with identities a channel is mutual TLS, and the certificate of the
peer must carry the expected name. Unix sockets and loopback are plain.

No channel goes through a proxy, whatever the environment says: a proxy leads to the internet, and
peers, engines and clients are on this network or on this machine. Every channel of the package is
made here, by `open_channel` or `open_sync_channel`.

`keepalive_timeout_ms` alone does not bound detection in grpcio; `http2.ping_timeout_ms` does.
Reconnect backoff is capped, so a peer that returns after minutes is used again within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.hosts import is_loopback_host
from kakeya.core.log import event
from kakeya.core.units import MIB
from kakeya.wire.security import ChannelSecurity, TlsMaterial
from kakeya.wire.tls import channel_credentials

_log = logging.getLogger(__name__)

Option = tuple[str, int | str]
_DIRECT: tuple[Option, ...] = (
    ("grpc.enable_http_proxy", 0),
    # The first option does not cover GRPC_ADDRESS_HTTP_PROXY: that proxy is for no address.
    ("grpc.address_http_proxy_enabled_addresses", ""),
)
_Way = tuple[str, str]
"""An address, and the name that the certificate there must carry; "" = plain."""
NETWORK_MESSAGE_BYTES = 4 * MIB
"""The limit between nodes and from clients, after decompression; gossip has a lower one."""
ENGINE_MESSAGE_BYTES = 64 * MIB
"""The limit on an engine's unix socket, which carries whole histories: 4 bytes a token."""
IDLE_S = 300.0
"""A server closes the connection of another machine after this time without a call."""
_IDLE_MARGIN_S = 10.0
"""Tolerance, since the two ends start to count at different moments."""
_LAST_CALLS_S = 10.0
"""How long calls may run on a channel after a new channel replaced it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Pings that detect a silent peer, at the latest after `interval_s + timeout_s`."""

    interval_s: float = 10.0
    timeout_s: float = 5.0

    def client_options(self) -> tuple[Option, ...]:
        """Make the options of a channel."""
        return (
            ("grpc.keepalive_time_ms", int(self.interval_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.http2.ping_timeout_ms", int(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # A channel that replaces a broken one must not inherit its connection.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.min_reconnect_backoff_ms", 2000),
            ("grpc.max_reconnect_backoff_ms", 4000),
        )

    def server_options(self) -> tuple[Option, ...]:
        """Make the options of a server that accepts these pings and sends its own."""
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
    """Make options that bound messages both ways; a larger one ends with RESOURCE_EXHAUSTED."""
    return (
        ("grpc.max_receive_message_length", limit_bytes),
        ("grpc.max_send_message_length", limit_bytes),
    )


def engine_options() -> tuple[Option, ...]:
    """Make the options that both ends of the socket between an agent and an engine need."""
    return (
        # Pings that measure a network would wake an idle node, and a socket has no delay to learn:
        # the window of a stream, which they would widen, is wide from the start.
        ("grpc.http2.bdp_probe", 0),
        # Half an hour without a call would close the connection, by a timer that is looked at.
        ("grpc.client_idle_timeout_ms", 2**31 - 1),
        ("grpc.http2.lookahead_bytes", 4 * MIB),
        *message_options(ENGINE_MESSAGE_BYTES),
    )


def open_channel(
    address: str,
    options: tuple[Option, ...] = (),
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """Open an asyncio channel, plain without credentials. Connects lazily, and never by a proxy."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=(*options, *_DIRECT))
    return grpc.aio.secure_channel(address, credentials, options=(*options, *_DIRECT))


def open_sync_channel(
    address: str,
    options: tuple[Option, ...] = (),
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.Channel:
    """Open a blocking channel, for threads without an event loop, as `open_channel` does."""
    if credentials is None:
        return grpc.insecure_channel(address, options=(*options, *_DIRECT))
    return grpc.secure_channel(address, credentials, options=(*options, *_DIRECT))


def is_local(address: str) -> bool:
    """Whether an address is on this machine: a unix socket, a loopback literal, localhost."""
    if address.startswith("unix:"):
        return True
    return is_loopback_host(address.rpartition(":")[0].strip("[]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A channel, the keys that it was made with (None = plain), and the task that watches it."""

    channel: grpc.aio.Channel
    material: TlsMaterial | None
    watcher: asyncio.Task[None] | None


class Channels:
    """One asyncio channel per address and expected name, made on first use, kept until `aclose`.

    With `security` the channels to other machines are mutual TLS. The next `get` opens a new
    channel when the certificate was renewed, or when `security` expects another name there.
    `on_lost` is called with the address of a broken open connection, also without a running call;
    it must not raise. The end of a connection that was idle for so long that its server may have
    closed it does not count. `is_plain` tells which addresses need no TLS.
    """

    def __init__(
        self,
        keepalive: Keepalive | None = None,
        *,
        security: ChannelSecurity | None = None,
        on_lost: Callable[[str], None] | None = None,
        is_plain: Callable[[str], bool] = is_local,
        clock: Clock | None = None,
    ) -> None:
        self._options = (keepalive or Keepalive()).client_options() + message_options()
        self._security = security
        self._is_plain = is_plain
        self._clock = clock or SystemClock()
        self._open: dict[_Way, _Open] = {}
        self._names: dict[str, str] = {}
        """Address -> the name that `security` chose last."""
        self._used_mono: dict[_Way, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_lost = on_lost

    def get(self, address: str, node_id: str = "") -> grpc.aio.Channel:
        """Return the channel to `HOST:PORT` or `unix:PATH`; connects lazily.

        `node_id` is the node that must answer there, even if other nodes claim the address; "" =
        the node that `security` expects. A plain channel ignores it.
        """
        material, name = None, ""
        if self._security is not None and not self._is_plain(address):
            material = self._security.material()
            name = node_id or self._chosen(address, self._security)
        way = (address, name)
        self._used_mono[way] = self._clock.mono()
        held = self._open.get(way)
        if held is not None and held.material == material:
            return held.channel
        if held is not None:
            self._retire(held)
        channel = self._connect(address, material, name)
        watcher = None
        if self.on_lost is not None:
            watcher = asyncio.create_task(self._watch(way, channel), name=f"watch {address}")
        self._open[way] = _Open(channel=channel, material=material, watcher=watcher)
        return channel

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses with a channel that is open or connects."""
        return frozenset(address for address, _ in self._open)

    def _chosen(self, address: str, security: ChannelSecurity) -> str:
        name = security.server_name(address)
        before = self._names.get(address, name)
        self._names[address] = name
        if before != name:
            self._used_mono.pop((address, before), None)
            if (held := self._open.pop((address, before), None)) is not None:
                self._retire(held)
        return name

    async def discard(self, address: str, node_id: str = "") -> None:
        """Close the channels to one address, or only the channel to one node there."""
        names = {name for where, name in self._open if where == address}
        if node_id and names != {""}:
            names &= {node_id}
        else:
            self._names.pop(address, None)
        for name in names:
            self._used_mono.pop((address, name), None)
            # Another discard may have closed it while this one waited.
            if (held := self._open.pop((address, name), None)) is not None:
                await _close(held, None)

    async def aclose(self) -> None:
        """Close every channel."""
        for address, _ in list(self._open):
            await self.discard(address)
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _connect(self, address: str, material: TlsMaterial | None, name: str) -> grpc.aio.Channel:
        if material is None:
            return open_channel(address, self._options)
        options = (*self._options, _expect(name))
        return open_channel(address, options, channel_credentials(material))

    def _retire(self, held: _Open) -> None:
        closing = asyncio.create_task(_close(held, _LAST_CALLS_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _watch(self, way: _Way, channel: grpc.aio.Channel) -> None:
        address, _ = way
        state = channel.get_state()
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            before, state = state, await _next_state(channel, state)
            was_ready = before is grpc.ChannelConnectivity.READY
            if state is grpc.ChannelConnectivity.SHUTDOWN or not was_ready:
                continue
            unused_s = self._clock.mono() - self._used_mono.get(way, 0.0)
            if self.on_lost is not None and unused_s < IDLE_S - _IDLE_MARGIN_S:
                event(_log, "connection lost", level=logging.DEBUG, address=address)
                self.on_lost(address)


async def _next_state(
    channel: grpc.aio.Channel, state: grpc.ChannelConnectivity
) -> grpc.ChannelConnectivity:
    try:
        await channel.wait_for_state_change(state)
    except grpc.aio.UsageError:  # how a closed channel answers
        return grpc.ChannelConnectivity.SHUTDOWN
    return channel.get_state()


async def _close(held: _Open, grace_s: float | None) -> None:
    if held.watcher is not None:
        held.watcher.cancel()
    await held.channel.close(grace_s)


def _expect(server_name: str) -> Option:
    return ("grpc.ssl_target_name_override", server_name)


def sync_channel(
    address: str,
    keepalive: Keepalive | None = None,
    *,
    tls: TlsMaterial | None = None,
    server_name: str = "",
) -> grpc.Channel:
    """Open a blocking channel, for threads without an event loop; with `tls` it is mutual TLS."""
    options = (keepalive or Keepalive()).client_options() + message_options()
    if tls is None:
        return open_sync_channel(address, options)
    return open_sync_channel(address, (*options, _expect(server_name)), channel_credentials(tls))
