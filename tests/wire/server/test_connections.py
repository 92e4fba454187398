"""Which connections a caller has, and closing them from underneath."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import Refused
from kakeya.wire.server.connections import Connections, surplus
from kakeya.wire.server.sockets import Peer, hang_up, open_peers, peer_of
from tests.waiting import until


@pytest.mark.parametrize(
    ("said", "peer"),
    [
        ("ipv4:10.0.0.5:50123", "10.0.0.5:50123"),
        ("ipv6:[::1]:7", "[::1]:7"),
        ("ipv6:%5Bfe80::1%25en0%5D:7", "[fe80::1]:7"),
        ("ipv6:[::ffff:10.0.0.5]:7", "10.0.0.5:7"),
        ("unix:", None),
        ("unix:/tmp/x", None),
        ("ipv4:nonsense", None),
    ],
)
def test_peers_as_grpc_writes_them(said: str, peer: str | None) -> None:
    assert peer_of(said) == peer


@contextmanager
def connected(family: socket.AddressFamily, host: str) -> Iterator[tuple[socket.socket, Peer]]:
    """A listener's side of a connection, and the peer that it sees."""
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection((host, listener.getsockname()[1])) as near:
            far, _ = listener.accept()
            with far:
                peer = far.getpeername()
                name = f"[{peer[0]}]:{peer[1]}" if ":" in host else f"{peer[0]}:{peer[1]}"
                yield near, Peer(name)


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_exactly_the_named_connection_is_closed(family: socket.AddressFamily, host: str) -> None:
    with connected(family, host) as (near, peer), connected(family, host) as (other, other_peer):
        assert {peer, other_peer} <= open_peers()
        near.settimeout(5)
        assert hang_up({peer}) == 1
        assert near.recv(1) == b""
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        assert hang_up({Peer("192.0.2.1:1")}) == 0
        assert hang_up(()) == 0


class Sockets:
    """Stands in for the sockets of the process."""

    def __init__(self) -> None:
        self.open: set[Peer] = set()
        self.closed: list[Peer] = []

    def hang_up(self, peers: Collection[Peer]) -> int:
        self.closed += peers
        self.open -= set(peers)
        return len(peers)

    def book(self, limit: int = 4) -> Connections:
        return Connections(limit, open_peers=lambda: frozenset(self.open), hang_up=self.hang_up)

    def peer(self, number: int) -> Peer:
        peer = Peer(f"10.0.0.1:{number}")
        self.open.add(peer)
        return peer


PEERS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60)), unique=True, max_size=80)


@given(PEERS, st.integers(0, 30), st.data())
def test_no_host_keeps_more_than_its_share_and_none_loses_a_known_connection(
    drawn: list[tuple[int, int]], limit: int, data: st.DataObject
) -> None:
    peers = [Peer(f"10.0.0.{host}:{port}") for host, port in drawn]
    known = set(data.draw(st.lists(st.sampled_from(peers), max_size=10))) if peers else set()
    closed = set(surplus(peers, known, limit))
    assert not closed & known
    for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        had = {peer for peer in peers if peer.startswith(f"{host}:")}
        left = had - closed
        assert len(left) <= max(limit, len(had & known))
        assert len(left) >= min(limit, len(had)), "nothing is closed without need"


async def use(book: Connections, caller: str, peer: Peer) -> None:
    await book.admit(caller, peer)
    with book.call(caller, peer):
        pass


async def test_the_connection_idle_for_longest_makes_room_for_a_new_one() -> None:
    sockets = Sockets()
    book = sockets.book()
    peers = [sockets.peer(number) for number in range(5)]
    for peer in (*peers[:4], peers[0]):
        await use(book, "a", peer)
    with book.call("a", peers[1]):
        await use(book, "a", peers[4])
    await until(lambda: sockets.closed == [peers[2]])
    assert book.of("a") == (peers[3], peers[0], peers[1], peers[4])


async def test_connections_that_closed_by_themselves_do_not_count() -> None:
    sockets = Sockets()
    book = sockets.book()
    with ExitStack() as calls:
        for number in range(4):
            peer = sockets.peer(number)
            await book.admit("a", peer)
            calls.enter_context(book.call("a", peer))
        sockets.open.clear()
        await use(book, "a", sockets.peer(9))
    assert sockets.closed == []
    assert len(book.of("a")) == 1


async def test_with_all_in_use_the_newcomer_is_refused_and_later_closed() -> None:
    sockets = Sockets()
    book = sockets.book()
    with ExitStack() as calls:
        for number in range(4):
            peer = sockets.peer(number)
            await book.admit("a", peer)
            calls.enter_context(book.call("a", peer))
        late = sockets.peer(9)
        with pytest.raises(Refused, match="a has 4 connections in use here and may have 4"):
            await book.admit("a", late)
        await use(book, "b", sockets.peer(10))
        assert sockets.closed == []
        await until(lambda: sockets.closed == [late])


async def test_calls_that_come_at_once_do_not_exceed_the_limit() -> None:
    sockets = Sockets()
    book = sockets.book()
    for number in range(4):
        await use(book, "a", sockets.peer(number))
    late = [sockets.peer(number) for number in range(10, 20)]
    await asyncio.gather(*(book.admit("a", peer) for peer in late * 2))
    assert len(book.of("a")) == 4
    await until(lambda: len(sockets.closed) >= 10)


async def test_a_connection_that_opens_while_the_sockets_are_read_is_not_forgotten() -> None:
    sockets, began, go_on = Sockets(), threading.Event(), threading.Event()

    def read() -> frozenset[Peer]:
        seen = frozenset(sockets.open)
        began.set()
        go_on.wait(30.0)
        return seen

    book = Connections(1, open_peers=read, hang_up=sockets.hang_up)
    await use(book, "a", sockets.peer(1))
    second = asyncio.create_task(book.admit("a", sockets.peer(2)))
    await until(began.is_set)
    await use(book, "b", sockets.peer(3))
    go_on.set()
    await second
    assert book.of("b") == (Peer("10.0.0.1:3"),)


async def test_dropping_a_caller_closes_all_it_has_and_nothing_else() -> None:
    sockets = Sockets()
    book = sockets.book()
    for number, caller in enumerate(("a", "a", "b")):
        await use(book, caller, sockets.peer(number))
    with book.call("a", Peer("10.0.0.1:0")):
        assert book.drop("a") == 2
    await until(lambda: sockets.open == {Peer("10.0.0.1:2")})
    assert book.callers() == ("b",)
    assert book.drop("a") == 0


async def test_callers_that_left_are_forgotten() -> None:
    sockets = Sockets()
    book = sockets.book()
    for number in range(2000):
        await use(book, f"caller {number}", sockets.peer(number))
        sockets.open.clear()
    assert len(book.callers()) <= 256


async def test_a_connection_counts_as_long_as_the_certificate_that_was_shown_on_it_last() -> None:
    """A new one can come by the port of an old one, whose certificate ends earlier."""
    sockets = Sockets()
    book = sockets.book()
    peer = sockets.peer(1)
    await book.admit("a", peer, ends_at=10.0)
    await book.admit("a", peer, ends_at=20.0)
    assert book.drop_ended(15.0) == 0
    assert book.drop_ended(25.0) == 1
    await until(lambda: sockets.closed == [peer])
    assert book.callers() == ()
