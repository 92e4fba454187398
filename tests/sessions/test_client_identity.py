"""The client of a node on another machine: its own certificate, and whose it wants to see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError, Denied, PeerUnavailable
from kakeya.generation.model import ServedModel
from kakeya.sessions.client import Client
from kakeya.v1.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server
from kakeya.wire.security import CertRole
from kakeya.wire.server.listeners import Listeners
from kakeya.wire.tls import TlsFailed
from tests.sessions.conftest import Node, running_node
from tests.wire.certificates import EXPIRED, Fleet, write

PROMPT = [1, 2, 3]


@asynccontextmanager
async def secured(node: Node, fleet: Fleet) -> AsyncIterator[tuple[str, str]]:
    """The runtime of a node behind mutual TLS; yields its address and node id."""
    node_id, shown = fleet.issue()
    listeners = Listeners(
        lambda server: add_RuntimeServiceServicer_to_server(node.service, server),
        clock=SystemClock(),
        material=lambda: shown,
        trust=fleet.trust,
    )
    address = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    await listeners.start()
    try:
        yield address, node_id
    finally:
        await listeners.stop(None)


async def generated(client: Client) -> list[int]:
    async with client, await client.create_session() as session:
        await session.append(PROMPT)
        return [token async for token in session.generate(8)]


async def test_a_client_decodes_on_a_node_that_knows_it(tmp_path: Path) -> None:
    fleet = Fleet()
    identity = write(tmp_path / "identity", fleet.issue(CertRole.CLIENT)[1])
    async with running_node() as node, secured(node, fleet) as (address, node_id):
        remote = await generated(Client(address, identity=identity, node_id=node_id))
        assert remote == await generated(Client(node.address))
        assert len(remote) == 8


async def test_who_lacks_the_role_or_meets_another_node_is_told(tmp_path: Path) -> None:
    fleet = Fleet()
    client = write(tmp_path / "client", fleet.issue(CertRole.CLIENT)[1])
    member = write(tmp_path / "member", fleet.issue(CertRole.MEMBER)[1])
    expired = write(tmp_path / "expired", fleet.issue(CertRole.CLIENT, age=EXPIRED)[1])
    stranger = write(tmp_path / "stranger", Fleet().issue(CertRole.CLIENT)[1])
    async with running_node() as node, secured(node, fleet) as (address, node_id):
        with pytest.raises(Denied, match="roles that may call it: admin or client"):
            await generated(Client(address, identity=member, node_id=node_id))
        with pytest.raises(TlsFailed, match="is of another node than the one that is meant"):
            await generated(Client(address, identity=client, node_id="a" * 52))
        with pytest.raises(TlsFailed, match="is of another fleet than the identity here"):
            await generated(Client(address, identity=stranger, node_id=node_id))
        with pytest.raises(TlsFailed, match="it speaks no TLS") as plain:
            await generated(Client(node.address, identity=client, node_id=node_id))
        assert not plain.value.retryable
        with pytest.raises(ConfigError, match="holds no identity"):
            await generated(Client(address, identity=tmp_path / "nothing", node_id=node_id))
        for without in (Client(address), Client(address, identity=expired, node_id=node_id)):
            with pytest.raises(PeerUnavailable, match="for a caller without a certificate") as late:
                await generated(without)
            assert late.value.retryable, "it may be stopping, too"


async def test_who_calls_is_the_certificate_and_without_one_what_the_call_says(
    tmp_path: Path,
) -> None:
    """The owner of an adapter is known by this; a certificate cannot be talked over."""
    fleet = Fleet()
    caller_id, material = fleet.issue(CertRole.CLIENT)
    identity = write(tmp_path / "identity", material)
    async with running_node() as node, secured(node, fleet) as (address, node_id):
        asked: list[str] = []
        find = node.service._models.get

        def get(model_id: str, client: str = "") -> ServedModel:
            asked.append(client)
            return find(model_id)

        node.service._models.get = get
        for client in (
            Client(address, identity=identity, node_id=node_id, client_name="mallory"),
            Client(node.address, client_name="alice"),
            Client(node.address),
        ):
            async with client, await client.create_session():
                pass
        assert asked == [caller_id, "alice", ""]
