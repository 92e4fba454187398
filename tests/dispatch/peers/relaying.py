"""A node whose clouds, commands and painters answer its peers, behind a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from kakeya.backends.registry import Backends
from kakeya.backends.relay.config import CommandSettings
from kakeya.backends.relay.relays import Relays
from kakeya.core.clock import SystemClock
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.peers.relay_calls import RelayCalls
from kakeya.dispatch.peers.relay_service import RelayService
from kakeya.v1.relay_pb2_grpc import add_RelayServiceServicer_to_server
from tests.gateway.openai.test_images import ToyPainter
from tests.gateway.toy import Directory


def script(text: str, **settings: Any) -> CommandSettings:
    """A shell script as a command that is shared."""
    return CommandSettings(argv=("sh", "-c", text), **({"shared": True} | settings))


class RelayNode:
    """A node; `calls` are those of the peer `front` to it."""

    def __init__(self, backends: Backends, *painters: ToyPainter) -> None:
        self.relays = Relays(backends, SystemClock())
        self.clients = Clients(SystemClock().mono)
        self.service = RelayService(self.relays, Directory(images=painters), self.clients)
        self.server = grpc.aio.server()
        self.address = ""
        self._channel: grpc.aio.Channel | None = None

    @property
    def calls(self) -> RelayCalls:
        assert self._channel is not None
        return RelayCalls(self._channel, "mini", "front")

    @property
    def running(self) -> int:
        return sum(int(str(one["running"])) for one in self.clients.status())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RelayNode]:
        add_RelayServiceServicer_to_server(self.service, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        async with self.relays:
            await self.server.start()
            self._channel = grpc.aio.insecure_channel(self.address)
            try:
                yield self
            finally:
                await self._channel.close()
                await self.server.stop(None)


@asynccontextmanager
async def relaying(*painters: ToyPainter, **backends: dict[str, Any]) -> AsyncIterator[RelayNode]:
    """A node with tables of backends, by kind."""
    async with RelayNode(backends, *painters).serving() as node:
        yield node
