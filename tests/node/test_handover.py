"""The port of a node that is drained, in one process and between real nodes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kakeya.core.errors import Conflict
from kakeya.gateway.http.server import HttpServer, serve_http
from kakeya.node.datadir import DataDir, is_left
from kakeya.node.handover import DrainedHttp, take_place
from kakeya.wire.server.port_handover import PortHandover, ask_for_port
from kakeya.wire.server.ports import listen
from tests.node.nodes import VERIFIER, replaceable, successor
from tests.waiting import eventually, until

LOOPBACK = "127.0.0.1:0"
CLIENTS = 4
PAUSE_S = 0.2
"""Between two requests of a client, so that the clients leave the processor to the nodes."""


@contextlib.asynccontextmanager
async def serving(port: socket.socket, name: str) -> AsyncIterator[HttpServer]:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse(name))])
    async with serve_http(app, port) as server:
        yield server


def ask(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/", timeout=60) as answer:
        return str(answer.read().decode())


def address_of(port: socket.socket) -> str:
    host, number = port.getsockname()[:2]
    return f"{host}:{number}"


async def test_connections_wait_in_the_port_between_two_nodes(tmp_path: Path) -> None:
    old = await asyncio.to_thread(DataDir, tmp_path)
    port = await asyncio.to_thread(listen, "--http", LOOPBACK)
    address, loaded = address_of(port), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with serving(port, "old") as server:
        handover = DrainedHttp(old, port, lambda: server)
        giving = asyncio.create_task(handover.run())
        await eventually("it says that it leaves", lambda: is_left(tmp_path))
        taking = asyncio.create_task(
            asyncio.to_thread(
                take_place, tmp_path, address, lambda: loop.call_soon_threadsafe(loaded.set)
            )
        )
        await until(lambda: handover.is_taken)
        assert await asyncio.to_thread(ask, address) == "old"
        handover.close()
        held = [asyncio.create_task(asyncio.to_thread(ask, address)) for _ in range(CLIENTS)]
        await loaded.wait()
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
    assert not taking.done(), "the old node is still in the data directory"
    await asyncio.to_thread(old.close)
    home, taken = await taking
    assert not any(one.done() for one in held)
    async with serving(taken, "new"):
        assert await asyncio.gather(*held) == ["new"] * CLIENTS
    await asyncio.to_thread(home.close)


async def test_a_port_is_given_to_one_process(tmp_path: Path) -> None:
    port = await asyncio.to_thread(listen, "--http", LOOPBACK)
    handover, path = PortHandover(port), tmp_path / "port.sock"
    opened = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(handover.run(path, lambda: loop.call_soon_threadsafe(opened.set)))
    await opened.wait()
    ask = functools.partial(asyncio.to_thread, ask_for_port, path, "--http")
    first = await ask(address_of(port))
    assert first is not None
    assert address_of(first) == address_of(port)
    with pytest.raises(Conflict, match="taken over by another process"):
        await ask(address_of(port))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    handover.close()
    for one in (first, port):
        one.close()


async def test_a_port_that_is_closed_already_is_given_to_none(tmp_path: Path) -> None:
    port = await asyncio.to_thread(listen, "--http", LOOPBACK)
    port.close()
    await PortHandover(port).run(tmp_path / "port.sock", lambda: pytest.fail("can be asked"))


async def test_without_a_successor_the_port_is_closed(tmp_path: Path) -> None:
    home = await asyncio.to_thread(DataDir, tmp_path)
    port = await asyncio.to_thread(listen, "--http", LOOPBACK)
    address = address_of(port)
    async with serving(port, "old") as server:
        handover = DrainedHttp(home, port, lambda: server)
        assert await asyncio.to_thread(ask, address) == "old"
        handover.close()
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(ask, address)
    await asyncio.to_thread(home.close)


def test_a_second_node_is_refused_while_the_first_serves(tmp_path: Path) -> None:
    with DataDir(tmp_path), pytest.raises(Conflict, match="is held by the node with pid"):
        take_place(tmp_path, LOOPBACK, lambda: None)


async def test_a_node_is_replaced_and_no_client_of_its_address_is_refused(tmp_path: Path) -> None:
    """Clients that ask one address alone, each with a new connection for each request."""
    body = json.dumps(
        {"model": VERIFIER, "prompt": "import os", "max_tokens": 8, "temperature": 0}
    ).encode()

    def complete(address: str) -> str:
        url = f"http://{address}/v1/completions"
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    async with replaceable(tmp_path) as (peer, old), contextlib.AsyncExitStack() as stack:
        known, over = await asyncio.to_thread(complete, old.http), asyncio.Event()
        answers: list[str] = []

        async def client() -> None:
            while not over.is_set():
                answers.append(await asyncio.to_thread(complete, old.http))
                await asyncio.sleep(PAUSE_S)

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        data = tmp_path / "node" / "data"
        command = [sys.executable, "-m", "kakeya.cli.main", "drain", "--until-replaced"]
        draining = asyncio.create_task(
            asyncio.to_thread(
                subprocess.run, [*command, "--data-dir", str(data)], check=True, timeout=150
            )
        )
        await eventually("it is drained", lambda: is_left(data))
        new = await stack.enter_async_context(successor(tmp_path, peer, old))
        await draining
        assert await old.wait() == 0
        before = len(answers)
        await until(lambda: len(answers) > before + CLIENTS or any(one.done() for one in clients))
        over.set()
        await asyncio.gather(*clients)
        assert set(answers) == {known}
        assert new.http == old.http
