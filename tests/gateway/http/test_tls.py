"""HTTPS and plain HTTP at one port, and a certificate that changes while connections come."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from asyncio import to_thread
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.gateway.app import build_app
from kakeya.gateway.http.server import HttpServer, serve_http
from kakeya.gateway.http.tls import SPEAK_TLS, ServerTls
from tests.gateway.toy import Directory, Router, ToyModel, make_folder, no_jobs
from tests.waiting import eventually

CA = trustme.CA()
FIRST = CA.issue_cert("127.0.0.1", "localhost")
SECOND = CA.issue_cert("127.0.0.1", "second.local")


def write(folder: Path, cert: trustme.LeafCert) -> None:
    (folder / "cert.pem").write_bytes(cert.cert_chain_pems[0].bytes())
    (folder / "key.pem").write_bytes(cert.private_key_pem.bytes())


@pytest.fixture
def pem(tmp_path):
    folder = tmp_path / "pem"
    folder.mkdir()
    write(folder, FIRST)
    return folder


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    CA.configure_trust(context)
    return context


@asynccontextmanager
async def listening(folder: Path, tls: ServerTls, head_s: float = 60.0) -> AsyncIterator[int]:
    async with serving(folder, tls, head_s) as (_, port):
        yield port


@asynccontextmanager
async def serving(
    folder: Path, tls: ServerTls, head_s: float = 60.0
) -> AsyncIterator[tuple[HttpServer, int]]:
    app = build_app(
        Directory(ToyModel(folder)),
        Router(),
        status=dict,
        clock=SystemClock(),
        rng=random.Random(1),
        jobs=no_jobs(),
    )
    sock = socket.create_server(("0.0.0.0", 0))
    port = sock.getsockname()[1]
    async with serve_http(app, sock, tls=tls, head_s=head_s) as server:
        yield server, port


async def open_pem(pem: Path, *, is_plain_open: bool = False) -> ServerTls:
    return await to_thread(
        lambda: ServerTls(pem / "cert.pem", pem / "key.pem", is_plain_open=is_plain_open)
    )


async def test_one_port_speaks_both_to_a_program_of_this_machine(tmp_path, pem):
    folder = await to_thread(make_folder, tmp_path)
    tls = await open_pem(pem)
    async with listening(folder, tls) as port:
        context = await to_thread(trusting)
        async with httpx.AsyncClient(verify=context, timeout=60, trust_env=False) as http:
            for scheme in ("http", "https", "http"):
                reply = await http.post(
                    f"{scheme}://127.0.0.1:{port}/v1/completions",
                    json={"model": "toy", "prompt": "a"},
                )
                assert reply.status_code == 200, scheme
        async with httpx.AsyncClient(timeout=60, trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
                await stranger.get(f"https://127.0.0.1:{port}/healthz")
        # Counted, and told in the log once a minute.
        await eventually("the failed handshake is counted", lambda: failed_handshakes(tls))


def failed_handshakes(tls: ServerTls) -> object:
    (figure,) = tls.figures()
    assert figure.name == "kakeya_https_handshakes_failed"
    return figure.values[()]


def own_network_address() -> str:
    """An address of this machine that is not loopback; a caller that dials it comes from it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine is on no network")
        return str(route.getsockname()[0])


@pytest.mark.parametrize("is_plain_open", [False, True])
async def test_plain_http_by_the_network_is_told_to_speak_tls(tmp_path, pem, is_plain_open):
    own = own_network_address()
    folder = await to_thread(make_folder, tmp_path)
    async with listening(folder, await open_pem(pem, is_plain_open=is_plain_open)) as port:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            reply = await http.get(f"http://{own}:{port}/healthz")
    if is_plain_open:
        assert reply.json() == {"status": "ok"}
    else:
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, SPEAK_TLS)


async def shown(port: int) -> tuple[str, ...]:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=await to_thread(trusting))
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return tuple(value for kind, value in certificate["subjectAltName"] if kind == "DNS")


async def test_a_new_certificate_counts_from_the_next_connection_on(tmp_path, pem):
    folder = await to_thread(make_folder, tmp_path)
    tls = await open_pem(pem)
    async with listening(folder, tls) as port:
        assert await shown(port) == ("localhost",)
        await to_thread(write, pem, SECOND)
        assert await shown(port) == ("localhost",)
        await to_thread(tls.refresh)
        assert await shown(port) == ("second.local",)
        await to_thread((pem / "key.pem").write_bytes, FIRST.private_key_pem.bytes())
        with pytest.raises(ConfigError, match=r"key\.pem"):
            await to_thread(tls.refresh)
        assert await shown(port) == ("second.local",)


async def test_connections_that_say_nothing_or_nonsense_stop_nobody(tmp_path, pem):
    folder = await to_thread(make_folder, tmp_path)
    async with listening(folder, await open_pem(pem), head_s=0.5) as port:
        silent, talks = [], []
        for said in (b"", b"\x16", b"\x16\x03\x01\xff\xff" + b"a" * 400, b"\x00\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            silent.append(reader)
            talks.append(writer)
        _, gone = await asyncio.open_connection("127.0.0.1", port)
        gone.transport.abort()
        # Its first byte is there before the server, in this thread, accepts it.
        with socket.create_connection(("127.0.0.1", port)) as good:
            good.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await to_thread(good.recv, 1000)).startswith(b"HTTP/1.1 200")
        for reader in silent:  # each is closed by the server, in its time
            async with asyncio.timeout(30):
                await reader.read()
        for writer in talks:
            writer.transport.abort()


async def test_an_idle_client_of_tls_holds_up_no_stop(tmp_path, pem):
    """It keeps its connection for later requests, and so reads nothing of the end."""
    folder = await to_thread(make_folder, tmp_path)
    tls = await open_pem(pem)
    async with serving(folder, tls) as (server, port):
        talk = await to_thread(ask_and_keep, port)
        async with asyncio.timeout(20):
            await server.stop(300)
        talk.close()


async def test_a_closed_port_takes_no_connection_and_lets_idle_ones_end(tmp_path, pem):
    folder = await to_thread(make_folder, tmp_path)
    async with serving(folder, await open_pem(pem)) as (server, port):
        talk = await to_thread(ask_and_keep, port)
        server.accept_no_more()

        def is_refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                return True
            return False

        await eventually("the port is closed", is_refused)
        while await to_thread(talk.recv, 1000):
            pass
        talk.close()


def ask_and_keep(port: int) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", port))
    talk = trusting().wrap_socket(raw, server_hostname="localhost")
    talk.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert talk.recv(1000).startswith(b"HTTP/1.1 200")
    return talk


def test_a_spare_is_shown_while_the_certificate_is_not_there(pem: Path) -> None:
    ServerTls(pem / "later.pem", pem / "key.pem", spare=pem / "cert.pem", is_plain_open=False)
    for certificate, key in (("no.pem", "key.pem"), ("cert.pem", "no.pem"), ("key.pem", "key.pem")):
        with pytest.raises(ConfigError, match="PEM"):
            ServerTls(pem / certificate, pem / key, is_plain_open=False)
