"""Channels between machines: mutual TLS with the expected name, and the news of a lost one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core.errors import ConfigError
from kakeya.wire.channels import IDLE_S, Channels, is_local, open_channel, sync_channel
from kakeya.wire.security import CertRole, TlsMaterial
from kakeya.wire.tls import CERTIFICATE_FILE, FolderSecurity, MaterialFolder, fleet_of
from tests.fakes import FakeClock
from tests.waiting import until
from tests.wire.certificates import Fleet, write
from tests.wire.servers import call, listening, methods, path

(DESCRIBE,) = (method for method in methods() if path(method).endswith("/GetNodeCapability"))
OK = grpc.StatusCode.OK
UNREACHED = grpc.StatusCode.UNAVAILABLE


class Security:
    def __init__(self, material: TlsMaterial, name: str) -> None:
        self.shown = material
        self.name = name

    def material(self) -> TlsMaterial:
        return self.shown

    def server_name(self, address: str) -> str:
        return self.name


def encrypted(security: Security, on_lost: Callable[[str], None] | None = None) -> Channels:
    """Channels that take loopback for another machine."""
    return Channels(security=security, on_lost=on_lost, is_plain=lambda _: False)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/tmp/x", True),
        ("10.0.0.1:1", False),
        ("[fe80::1%en0]:1", False),
        ("0.0.0.0:1", False),
        ("mini.local:1", False),
        ("127.0.0.1.example.org:1", False),
    ],
)
def test_only_this_machine_is_spoken_to_in_plain(address: str, local: bool) -> None:
    assert is_local(address) is local


PROXIES = (
    {"http_proxy": "http://{}"},
    {"https_proxy": "http://{}"},
    {"grpc_proxy": "http://{}"},
    {
        "GRPC_ADDRESS_HTTP_PROXY": "{}",
        "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8",
    },
)


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: next(iter(proxy)))
async def test_no_proxy_of_the_environment_is_ever_called(
    proxy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    fleet = Fleet()
    _, own = fleet.issue()
    channels = encrypted(Security(own, fleet.any_member))
    async with listening(fleet) as node:
        with socket.create_server(("127.0.0.1", 0)) as trap:
            trap.setblocking(False)
            for name, value in proxy.items():
                monkeypatch.setenv(name, value.format(f"127.0.0.1:{trap.getsockname()[1]}"))
            async with open_channel(node.plain) as plain:
                assert await call(plain, DESCRIBE) is OK
            assert await call(channels.get(node.tls), DESCRIBE) is OK
            await channels.aclose()
            with sync_channel(node.plain) as blocking:
                ready = grpc.channel_ready_future(blocking)
                await asyncio.to_thread(ready.result, 10)
            with pytest.raises(BlockingIOError):
                trap.accept()


async def test_a_member_reaches_a_member_by_its_id_and_at_first_contact_by_any_name() -> None:
    fleet = Fleet()
    _, own = fleet.issue()
    async with listening(fleet) as node:
        for name in (node.node_id, fleet.any_member):
            channels = encrypted(Security(own, name))
            assert await call(channels.get(node.tls), DESCRIBE) is OK
            await channels.aclose()


@pytest.mark.parametrize("claim", ["another node's name", "another fleet", "a client's leaf"])
async def test_an_impostor_is_not_spoken_to(claim: str) -> None:
    fleet, elsewhere = Fleet(), Fleet()
    _, own = fleet.issue()
    victim, _ = fleet.issue()
    names = {
        "another node's name": victim,
        "another fleet": fleet.any_member,
        "a client's leaf": fleet.any_member,
    }
    host = elsewhere if claim == "another fleet" else fleet
    role = CertRole.CLIENT if claim == "a client's leaf" else CertRole.MEMBER
    async with listening(host, role=role) as node:
        channels = encrypted(Security(own, names[claim]))
        assert await call(channels.get(node.tls), DESCRIBE) is UNREACHED
        await channels.aclose()
        assert node.stand_ins.calls.total() == 0


async def test_a_channel_is_reused_until_the_certificate_or_the_name_changes() -> None:
    fleet = Fleet()
    security = Security(fleet.issue()[1], fleet.any_member)
    async with listening(fleet) as node:
        channels = encrypted(security)
        first = channels.get(node.tls)
        assert channels.get(node.tls) is first
        assert await call(first, DESCRIBE) is OK
        renewed_id, security.shown = fleet.issue()
        second = channels.get(node.tls)
        assert second is not first
        assert channels.get(node.tls) is second
        assert await call(second, DESCRIBE) is OK
        assert node.stand_ins.callers[-1].node_id == renewed_id
        security.name = node.node_id
        assert channels.get(node.tls) is not second
        await channels.aclose()


async def test_loopback_and_sockets_stay_plain_whatever_the_security(tmp_path: Path) -> None:
    fleet = Fleet()
    channels = Channels(security=Security(fleet.issue()[1], "whoever"))
    async with listening(fleet) as node:
        assert await call(channels.get(node.plain), DESCRIBE) is OK
        await channels.aclose()


def test_a_thread_without_a_loop_speaks_tls_too() -> None:
    fleet = Fleet()
    own_id, own = fleet.issue()

    async def serve(ready: list[str], done: asyncio.Event) -> str:
        async with listening(fleet) as node:
            ready += (node.tls, node.node_id)
            await done.wait()
            return node.stand_ins.callers[0].node_id

    def ask(address: str, name: str) -> None:
        with sync_channel(address, tls=own, server_name=name) as channel:
            channel.unary_unary(path(DESCRIBE))(b"", timeout=10)

    async def both() -> str:
        ready: list[str] = []
        done = asyncio.Event()
        serving = asyncio.create_task(serve(ready, done))
        await until(lambda: len(ready) == 2)
        await asyncio.to_thread(ask, *ready)
        done.set()
        return await serving

    assert asyncio.run(both()) == own_id


async def test_a_connection_that_breaks_is_told_at_once_though_nobody_calls() -> None:
    fleet = Fleet()
    lost: list[str] = []
    channels = encrypted(Security(fleet.issue()[1], fleet.any_member), lost.append)
    async with listening(fleet) as node:
        assert await call(channels.get(node.tls), DESCRIBE) is OK
        assert lost == []
    began = time.monotonic()
    await until(lambda: lost == [node.tls])
    assert time.monotonic() - began < 10  # pings would take 15 s
    await channels.aclose()


async def test_a_connection_that_rested_until_its_server_closed_it_is_no_loss() -> None:
    fleet = Fleet()
    lost: list[str] = []
    clock = FakeClock()
    security = Security(fleet.issue()[1], fleet.any_member)
    channels = Channels(
        security=security, on_lost=lost.append, is_plain=lambda _: False, clock=clock
    )
    async with listening(fleet) as node:
        channel = channels.get(node.tls)
        assert await call(channel, DESCRIBE) is OK
        clock.advance(IDLE_S)
    async with asyncio.timeout(60):
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert lost == []
    await channels.aclose()


async def test_closing_a_channel_oneself_is_no_loss() -> None:
    fleet = Fleet()
    lost: list[str] = []
    channels = encrypted(Security(fleet.issue()[1], fleet.any_member), lost.append)
    async with listening(fleet) as node:
        assert await call(channels.get(node.tls), DESCRIBE) is OK
        await channels.discard(node.tls)
        assert await call(channels.get(node.tls), DESCRIBE) is OK
        await channels.aclose()
    assert lost == []


def test_the_files_of_an_identity_are_read_again_when_they_change(tmp_path: Path) -> None:
    fleet = Fleet()
    _, first = fleet.issue()
    _, second = fleet.issue()
    files = MaterialFolder(tmp_path)
    assert files.current() is None
    assert MaterialFolder(tmp_path / "nowhere").current() is None
    write(tmp_path, first)
    assert files.current() == first
    assert files.current() is files.current(), "an unchanged file is not read again"
    write(tmp_path, second)
    assert files.current() == second
    (tmp_path / CERTIFICATE_FILE).unlink()
    with pytest.raises(ConfigError, match=rf"{CERTIFICATE_FILE}: .*cannot be read"):
        files.current()


def test_the_fleet_is_named_alike_by_programs_and_by_nodes() -> None:
    fleet = Fleet()
    assert fleet_of(fleet.pem) == fleet.founder.fleet
    security = FolderSecurity(Path("nowhere"), "a name")
    assert security.server_name("10.0.0.1:1") == "a name"
    with pytest.raises(ConfigError, match="not a PEM certificate"):
        fleet_of(b"nonsense")


def test_a_folder_without_keys_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no identity .* kakeya join"):
        FolderSecurity(tmp_path).refresh()


async def test_a_folder_is_a_programs_identity(tmp_path: Path) -> None:
    fleet = Fleet()
    write(tmp_path, fleet.issue(CertRole.CLIENT)[1])
    async with listening(fleet) as node:
        for name, answer in (("", OK), (node.node_id, OK), ("a" * 52, UNREACHED)):
            security = FolderSecurity(tmp_path, name)
            await asyncio.to_thread(security.refresh)
            channels = Channels(security=security, is_plain=lambda _: False)
            (health,) = (method for method in methods() if path(method).endswith("Health/Check"))
            assert await call(channels.get(node.tls), health) is answer
            await channels.aclose()
