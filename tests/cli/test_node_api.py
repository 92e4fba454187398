"""What the command line says of what it asked, and of what it got."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.cli.node_api import NodeApi, find_node
from kakeya.core.errors import PeerUnavailable
from kakeya.node.datadir import RUN, DataDir, RunInfo
from tests.node.nodes import run_cli


@pytest.fixture
def other_protocol() -> Iterator[str]:
    """The address of a server that writes what no HTTP client expects, as a gRPC port does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\0\0\x1e\x04\0\0\0\0\0\x1b[2J")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_what_speaks_no_http_is_told_without_its_bytes(other_protocol: str) -> None:
    with pytest.raises(PeerUnavailable, match="speaks no HTTP") as told:
        NodeApi(address=other_protocol).get("/v1/models")
    assert told.value.message.isprintable()


STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    b": waiting\n\n: waiting: loading toy, 41 %\x1b[2J\n\n: waiting: loading toy, 97 %\n\n"
    b'data: {"choices": [{"text": "hello"}]}\n\ndata: [DONE]\n\n'
)


def test_generate_sends_its_priority_and_says_what_it_waits_for_on_stderr() -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while not asked or not asked[-1].endswith(b"}"):
                    asked.append(connection.recv(4096))
                connection.sendall(STREAM)

        thread = threading.Thread(target=answer)
        thread.start()
        node = f"127.0.0.1:{server.getsockname()[1]}"
        options = ("--model", "toy", "--prompt", "a", "--priority", "low")
        done = run_cli("generate", "--node", node, *options)
        thread.join()
    assert done.stdout == "hello\n"
    assert b'"priority": "low"' in b"".join(asked)
    assert done.stderr.splitlines()[0] == "waiting: loading toy, 41 %?[2J"


def test_a_followed_stream_of_a_node_that_ends_is_no_silent_end() -> None:
    told = b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {"nodes": {"a": {"card": {}}}}\n\n'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(told)

        thread = threading.Thread(target=answer)
        thread.start()
        facts = NodeApi(address=f"127.0.0.1:{server.getsockname()[1]}").facts(None)
        assert next(facts) == {"a": {"card": {}}}
        with pytest.raises(PeerUnavailable, match="ended"):
            next(facts)
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", "a\udcff"), "the prompt is not UTF-8"),
        (("--prompt", "a", "--priority", "fast"), "'fast' (choose from 'urgent', 'high'"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature: 'nan' is not a number"),
    ],
)
def test_what_no_node_could_take_is_not_sent(arguments: tuple[str, ...], says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        node = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = run_cli("generate", "--node", node, *arguments)
    assert done.returncode != 0
    assert says in done.stderr


def test_a_folder_without_a_node_says_why_and_what_to_do(tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(PeerUnavailable) as refused:
            find_node("", tmp_path)
        return refused.value.message

    run = RunInfo(pid=7, node_id="n", grpc="127.0.0.1:1", http="127.0.0.1:2", service="user")
    with DataDir(tmp_path) as home:
        assert "starts, or ends" in why()
        home.write_run(run)
        assert find_node("", tmp_path).address == run.http
        left_by_kill = (tmp_path / RUN).read_bytes()
    assert "start one with kakeya-node" in why()
    (tmp_path / RUN).write_bytes(left_by_kill)
    assert "its service starts it again" in why()
    assert "kakeya service status --as user" in why()
