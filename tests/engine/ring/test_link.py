"""Control connections of a group, over real sockets: what is told arrives, losses are noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kakeya.core.errors import ConfigError, PeerProtocol, PeerUnavailable
from kakeya.engine.ring.follower import RingFollower
from kakeya.engine.ring.leader import RingLeader
from kakeya.engine.ring.link import RingLink
from kakeya.engine.ring.progress import LOAD_STUCK_S
from tests.fakes import FakeClock
from tests.waiting import wait_until

HOST = "127.0.0.1"
TOKEN = "c0ffee"


class Group:
    """A leader, its followers, and what each end said about its loss."""

    def __init__(self, ranks: int) -> None:
        self.clock = FakeClock()
        self.lost: list[str] = []
        self.left: list[str] = []
        self.leader = RingLeader(HOST, ranks, TOKEN, self.lost.append, self.clock.mono)
        gathering = threading.Thread(target=self.leader.gather)
        gathering.start()
        self.followers = [
            RingFollower.connect(HOST, self.leader.port, rank, TOKEN, self.left.append)
            for rank in range(1, ranks)
        ]
        gathering.join()

    def close(self) -> None:
        self.leader.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture
def group() -> Iterator[Callable[[int], Group]]:
    made = []

    def make(ranks: int) -> Group:
        made.append(Group(ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_commands_reach_each_follower_in_order(group: Callable[[int], Group]) -> None:
    made = group(3)
    made.leader.tell(("open", 1), ("prefill", 1, [5, 6]))
    made.leader.tell(("launch", 1, None))
    for follower in made.followers:
        commands = follower.commands()
        told = [next(commands) for _ in range(3)]
        assert told == [["open", 1], ["prefill", 1, [5, 6]], ["launch", 1, None]]


def test_a_follower_that_ends_ends_the_group(group: Callable[[int], Group]) -> None:
    made = group(3)
    made.followers[1].close()
    wait_until("the loss", lambda: made.lost)
    assert made.lost == ["rank 2 is lost: it ended"]


def test_a_leader_that_ends_ends_its_followers(group: Callable[[int], Group]) -> None:
    made = group(2)
    made.leader.close()
    wait_until("the loss", lambda: made.left)
    assert made.left == ["rank 0 is lost: it ended"]


def test_a_follower_that_cannot_load_says_why(group: Callable[[int], Group]) -> None:
    made = group(3)
    made.followers[0].ready({"weights": "a"})
    made.followers[1].failed("no such folder")
    with pytest.raises(ConfigError, match="rank 2: no such folder"):
        made.leader.facts()
    assert not made.lost


def test_all_facts_are_waited_for(group: Callable[[int], Group]) -> None:
    made = group(3)
    for number, follower in reversed(list(enumerate(made.followers, start=1))):
        follower.ready({"rank": number})
    assert made.leader.facts() == [{"rank": 1}, {"rank": 2}]


def test_a_rank_that_beats_and_gets_nowhere_is_noticed(group: Callable[[int], Group]) -> None:
    made = group(2)
    made.leader.tell(("prefill", 1, [5]))
    made.clock.advance(100)
    wait_until("the finding", lambda: made.lost)
    assert "work is left at rank 1" in made.lost[0]


def test_a_finished_command_is_told_with_a_beat(group: Callable[[int], Group]) -> None:
    made = group(2)
    made.leader.tell(("check",), limit_s=LOAD_STUCK_S)
    commands = made.followers[0].commands()
    next(commands)
    thread = threading.Thread(target=lambda: next(commands, None), daemon=True)
    thread.start()  # asks for the next one
    wait_until("the beat", lambda: not made.leader.pending())
    made.clock.advance(2 * LOAD_STUCK_S)
    assert not made.lost


def test_work_of_rank_0_that_fails_is_finished_too(group: Callable[[int], Group]) -> None:
    made = group(2)
    with suppress(PeerProtocol), made.leader.working():
        assert made.leader.pending() == [0]
        raise PeerProtocol("refused")
    assert made.leader.pending() == []


def test_a_connection_without_the_token_is_closed() -> None:
    lost: list[str] = []
    clock = FakeClock()
    leader = RingLeader(HOST, 2, TOKEN, lost.append, clock.mono)
    gathering = threading.Thread(target=leader.gather)
    gathering.start()
    for hello in (
        ["hello", 1, "guess"],
        ["hello", 1, "gu\u00e9ss"],
        ["hello", 7, TOKEN],
        ["beat", 1],
    ):
        stranger = RingLink(socket.create_connection((HOST, leader.port)))
        stranger.send(hello)
        with pytest.raises(PeerUnavailable):
            stranger.receive()
        stranger.close()
    follower = RingFollower.connect(HOST, leader.port, 1, TOKEN, lost.append)
    gathering.join()
    leader.tell(("tidy",))
    assert next(follower.commands()) == ["tidy"]
    follower.close()
    leader.close()


def test_a_leader_listens_only_at_an_address_of_its_machine() -> None:
    with pytest.raises(ConfigError, match="first address of the hostfile"):
        RingLeader("192.0.2.7", 2, TOKEN, lambda _: None)


def test_a_silent_peer_is_lost_and_a_broken_message_named() -> None:
    with socket.create_server((HOST, 0)) as server:
        other = socket.create_connection(server.getsockname())
        link = RingLink(server.accept()[0], silent_s=0.05)
    with pytest.raises(PeerUnavailable, match="said nothing"):
        link.receive()
    for broken in (b"{]", b"[" * 200_000):
        other.sendall(len(broken).to_bytes(4, "big") + broken)
        with pytest.raises(PeerProtocol, match="no JSON"):
            link.receive()
    other.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerProtocol, match="bytes"):
        link.receive()
    other.close()
    link.close()
