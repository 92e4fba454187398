"""Sessions that move between nodes: over real ports, and as a law over any order of moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.clock import SystemClock
from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    KakeyaError,
    NotFound,
    PeerUnavailable,
    Refused,
)
from kakeya.prefix.seam import NoPrecache, PrefixClaim, TokenSource, Warmed, WarmOutcome, WarmReport
from kakeya.sessions import mover, peers
from kakeya.sessions.client import Client
from kakeya.sessions.move_service import SessionMoveService
from kakeya.sessions.mover import SessionMover
from kakeya.sessions.peers import RemotePeer, SessionPeer, moved_from_wire, moved_to_wire
from kakeya.sessions.service import RuntimeService
from kakeya.sessions.session import MovedSession, Session
from kakeya.sessions.store import SessionLimits, SessionStore
from kakeya.v1.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server
from kakeya.v1.sessions_pb2_grpc import add_SessionMoveServiceServicer_to_server
from tests.dispatch.peers.world import QuotedToy, facts_of
from tests.sessions.toy import ToyDirectory, ToyRouter, expected
from tests.waiting import until

PROMPT = [5, 6, 7]
MORE = [8, 9]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(peers, "MOVE_S", 60.0)
    monkeypatch.setattr(mover, "SETTLE_S", 60.0)


class Models(ToyDirectory):
    """The models of one node, which are also all that it can reach."""

    def get(self, model_id: str, client: str = "") -> QuotedToy:
        found = super().get(model_id, client)
        assert isinstance(found, QuotedToy)
        return found

    def verifiers(self) -> tuple[QuotedToy, ...]:
        return (self.get(""),)


class Warm(NoPrecache):
    """Says of every prefix that all of it was there."""

    def __init__(self) -> None:
        self.histories: list[Sequence[int]] = []

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        history = await tokens()
        self.histories.append(list(history))
        return WarmReport(outcome=WarmOutcome.WARM, warmed=Warmed(cached=len(history)))


@dataclass
class Peers:
    nodes: list[SessionPeer] = field(default_factory=list)

    def offering(self, model_id: str) -> Sequence[SessionPeer]:
        return self.nodes

    def all(self) -> Sequence[SessionPeer]:
        return self.nodes


class Place:
    """The parts of a node that sessions need."""

    def __init__(self, number: int, weights: str = "weights", capacity: int = 8) -> None:
        self.clock = SystemClock()
        self.model = QuotedToy(facts=facts_of(base_fingerprint=weights))
        self.models = Models((self.model,))
        self.peers, self.precache = Peers(), Warm()
        self.store = SessionStore(
            clock=self.clock, rng=random.Random(number), limits=SessionLimits(capacity=capacity)
        )
        self.mover = SessionMover(
            self.store,
            self.models,
            self.models,
            self.peers,
            self.precache,
            node_id=str(number),
            heard=lambda: asyncio.sleep(0),
            clock=self.clock,
        )
        self.service = RuntimeService(
            models=self.models,
            drafts=ToyRouter(),
            store=self.store,
            clock=self.clock,
            rng=random.Random(9),
            mover=self.mover,
        )


class Reached:
    """A `SessionPeer` in this process, over the messages of the wire."""

    def __init__(self, place: Place) -> None:
        self.name = self.address = "near"
        self._place = place

    async def give(self, session: MovedSession) -> None:
        await asyncio.sleep(0)
        self._place.mover.accept(moved_from_wire(moved_to_wire(session)))

    async def warm(self, session_id: str) -> Warmed:
        return await self._place.mover.warm(session_id)

    async def take(self, session_id: str, *, taker: str = "", remove: bool = False) -> MovedSession:
        await asyncio.sleep(0)
        moved = self._place.mover.hand_out(session_id, taker=taker, remove=remove)
        return moved_from_wire(moved_to_wire(moved))


@dataclass
class Shelf:
    places: list[Place]
    clients: list[Client]
    servers: list[grpc.aio.Server]


@asynccontextmanager
async def shelf(*places: Place) -> AsyncIterator[Shelf]:
    """Nodes that know each other, each with a client."""
    async with AsyncExitStack() as stack:
        servers, channels, clients, addresses = [], [], [], []
        for place in places:
            server = grpc.aio.server()
            add_RuntimeServiceServicer_to_server(place.service, server)
            add_SessionMoveServiceServicer_to_server(SessionMoveService(place.mover), server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            addresses.append(address)
            stack.push_async_callback(server.stop, 0)
            stack.push_async_callback(place.mover.aclose)
            await stack.enter_async_context(place.service)
            channels.append(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
            clients.append(await stack.enter_async_context(Client(address)))
            servers.append(server)
        for at, place in enumerate(places):
            place.peers.nodes = [
                RemotePeer(channel, f"node {number}", addresses[number])
                for number, channel in enumerate(channels)
                if number != at
            ]
        yield Shelf(list(places), clients, servers)


def opened(place: Place) -> Session:
    """A session with a prompt."""
    assert place.model.facts is not None
    session = place.store.create(
        place.model, place.model.facts, stop_token_ids=frozenset(), label=""
    )
    session.append(PROMPT)
    return session


async def turn(session, more: Sequence[int], tokens: int) -> list[int]:
    await session.append(more)
    return [token async for token in session.generate(tokens)]


def whole(*turns: tuple[list[int], int]) -> list[list[int]]:
    """The answers of one node that nothing happens to."""
    history: list[int] = []
    answers = []
    for more, tokens in turns:
        history += more
        answer, _ = expected(history, tokens)
        history += answer
        answers.append(answer)
    return answers


async def test_a_session_goes_on_at_a_drained_node_and_then_at_the_peer_that_has_it() -> None:
    one, two, three = whole((PROMPT, 4), (MORE, 4), (PROMPT, 3))
    async with shelf(Place(1), Place(2)) as nodes:
        old, peer = nodes.places
        session = await nodes.clients[0].create_session(label="agent")
        assert await turn(session, PROMPT, 4) == one
        old.mover.leave()
        await until(lambda: old.mover.leaving == 0)
        assert [len(place.store.sessions()) for place in nodes.places] == [0, 1]
        assert peer.precache.histories == [[*PROMPT, *one]], "its KV is warm at the peer"
        assert peer.store.sessions()[0].label == "agent"
        # The old node passes on what is asked of it until it stops.
        assert await turn(session, MORE, 4) == two
        await old.mover.settled()
        assert [len(place.store.sessions()) for place in nodes.places] == [0, 1]
        # Then it tells where the session is.
        old.mover.close()
        with pytest.raises(PeerUnavailable, match="is at node 1") as moved:
            await session.append(MORE)
        assert moved.value.moved_to == nodes.places[0].peers.nodes[0].address
        await nodes.servers[0].stop(0)
        there = await nodes.clients[1].resume_session(session.session_id)
        assert await turn(there, PROMPT, 3) == three
        assert (await there.info()).history_length == 3 + 4 + 2 + 4 + 3 + 3
        assert await there.close() == 19
        with pytest.raises(NotFound):
            await there.info()


async def test_a_client_that_comes_to_a_third_node_finds_its_session() -> None:
    one, two = whole((PROMPT, 4), (MORE, 4))
    async with shelf(Place(1), Place(2), Place(3)) as nodes:
        session = await nodes.clients[0].create_session()
        assert await turn(session, PROMPT, 4) == one
        there = await nodes.clients[2].resume_session(session.session_id)
        assert await turn(there, MORE, 4) == two
        assert [len(place.store.sessions()) for place in nodes.places] == [0, 0, 1]
        assert nodes.places[0].store.counts.given == nodes.places[2].store.counts.taken == 1


async def test_an_operation_that_runs_ends_before_its_session_moves() -> None:
    (answer,) = whole((PROMPT, 40))
    async with shelf(Place(1), Place(2)) as nodes:
        old = nodes.places[0]
        session = await nodes.clients[0].create_session()
        await session.append(PROMPT)
        stream = session.generate(40)
        got = [await anext(stream)]
        old.mover.leave()
        got += [token async for token in stream]
        assert got == answer
        await until(lambda: old.mover.leaving == 0)
        assert len(nodes.places[1].store.sessions()) == 1


async def test_a_session_moves_to_no_node_with_other_weights_and_none_without_room() -> None:
    async with shelf(Place(1), Place(2, weights="others"), Place(3, capacity=1)) as nodes:
        old, _, last = nodes.places
        sessions = [await nodes.clients[0].create_session() for _ in range(2)]
        for session in sessions:
            await session.append(PROMPT)
        old.mover.leave()
        await until(lambda: old.mover.leaving == 0)
        assert [len(place.store.sessions()) for place in nodes.places] == [1, 0, 1]
        # Nothing is lost of the one that stays, while its node is there.
        for session in sessions:
            assert await turn(session, MORE, 3) == whole((PROMPT + MORE, 3))[0]
        assert last.precache.histories == [PROMPT]


async def test_a_node_that_leaves_takes_no_session_over() -> None:
    async with shelf(Place(1), Place(2)) as nodes:
        session = await nodes.clients[0].create_session()
        for place in nodes.places:
            place.mover.leave()
        await until(lambda: nodes.places[0].mover.leaving == 0)
        await session.append(PROMPT)
        assert len(nodes.places[0].store.sessions()) == 1


async def test_a_session_that_is_opened_at_a_node_that_leaves_is_given_away_at_once() -> None:
    async with shelf(Place(1), Place(2)) as nodes:
        old, peer = nodes.places
        old.mover.leave()
        old.service.drain("it is drained")
        session = await nodes.clients[0].create_session()
        await until(lambda: len(peer.store.sessions()) == 1)
        assert await turn(session, PROMPT, 3) == whole((PROMPT, 3))[0]
        old.mover.close()
        with pytest.raises(Refused, match="it is drained"):
            await nodes.clients[0].create_session()


async def test_a_session_in_use_elsewhere_is_not_taken() -> None:
    async with shelf(Place(1), Place(2)) as nodes:
        session = await nodes.clients[0].create_session()
        with nodes.places[0].store.operation(session.session_id, "Generate"):
            there = await nodes.clients[1].resume_session(session.session_id)
            with pytest.raises(Conflict, match="busy with Generate"):
                await there.append(PROMPT)
        assert await there.append(PROMPT) == len(PROMPT)


async def test_a_client_that_leaves_while_its_session_is_on_its_way_loses_nothing() -> None:
    old, new = Place(1), Place(2)
    session = opened(old)
    has_left, arrives = asyncio.Event(), asyncio.Event()

    class Slow(Reached):
        async def take(
            self, session_id: str, *, taker: str = "", remove: bool = False
        ) -> MovedSession:
            moved = await super().take(session_id, taker=taker, remove=remove)
            if remove:
                has_left.set()
                await arrives.wait()
            return moved

    new.peers.nodes = [Slow(old)]
    call = asyncio.create_task(new.mover.bring(session.session_id))
    await has_left.wait()
    call.cancel()
    await asyncio.wait((call,))
    arrives.set()
    await new.mover.bring(session.session_id)
    assert list(new.store.get(session.session_id).history) == PROMPT
    assert not old.store.sessions()


async def test_a_node_that_is_late_is_asked_again_before_a_session_counts_as_missing() -> None:
    old, new = Place(1), Place(2)
    session = opened(old)

    class Late(Reached):
        late = 1

        async def take(
            self, session_id: str, *, taker: str = "", remove: bool = False
        ) -> MovedSession:
            if self.late:
                self.late -= 1
                raise DeadlineExceeded("the node is busy")
            return await super().take(session_id, taker=taker, remove=remove)

    peer = Late(old)
    new.peers.nodes = [peer]
    peer.late = 1000
    with pytest.raises(DeadlineExceeded):
        await new.mover.bring(session.session_id)
    peer.late = 1
    await new.mover.bring(session.session_id)
    assert list(new.store.get(session.session_id).history) == PROMPT


@pytest.mark.parametrize("failure", [PeerUnavailable, DeadlineExceeded])
async def test_a_lost_answer_loses_no_session(failure: type[KakeyaError]) -> None:
    old, new, other = Place(1), Place(2), Place(3)
    session = opened(old)

    class Lossy(Reached):
        lost = 0

        async def take(
            self, session_id: str, *, taker: str = "", remove: bool = False
        ) -> MovedSession:
            moved = await super().take(session_id, taker=taker, remove=remove)
            if remove and not self.lost:
                self.lost += 1
                raise failure("the answer is lost")
            return moved

    new.peers.nodes = [Lossy(old)]
    await new.mover.bring(session.session_id)
    assert list(new.store.get(session.session_id).history) == PROMPT
    assert not old.store.sessions()
    with pytest.raises(NotFound):  # it was handed to one node
        await Reached(old).take(session.session_id, taker="3", remove=True)
    # And is handed to another one, once it was back.
    old.peers.nodes, other.peers.nodes = [Reached(new)], [Reached(old)]
    await old.mover.bring(session.session_id)
    await other.mover.bring(session.session_id)
    assert [len(place.store.sessions()) for place in (old, new, other)] == [0, 0, 1]


async def test_two_nodes_that_are_asked_for_a_session_at_once_have_it_one_after_the_other() -> None:
    old, first, second = Place(1), Place(2), Place(3)
    session = opened(old)
    first.peers.nodes = [Reached(old), Reached(second)]
    second.peers.nodes = [Reached(old), Reached(first)]
    await asyncio.gather(
        first.mover.bring(session.session_id), second.mover.bring(session.session_id)
    )
    assert sum(len(place.store.sessions()) for place in (old, first, second)) == 1


async def test_the_idle_time_of_a_session_goes_on_at_another_node() -> None:
    old, new = Place(1), Place(2)
    session = opened(old)
    session.used_mono -= 600
    new.peers.nodes = [Reached(old)]
    await new.mover.bring(session.session_id)
    assert new.store.get(session.session_id).idle_s(new.clock.mono()) >= 600


async def test_of_two_nodes_with_a_session_the_one_that_went_on_with_it_is_asked() -> None:
    stale, fresh, new = Place(1), Place(2), Place(3)
    session = opened(stale)
    await Reached(fresh).give(stale.mover.hand_out(session.session_id))
    session.used_mono -= 60
    with fresh.store.operation(session.session_id, "AppendTokens") as there:
        there.append(MORE)
    new.peers.nodes = [Reached(stale), Reached(fresh)]
    await new.mover.bring(session.session_id)
    assert list(new.store.get(session.session_id).history) == PROMPT + MORE


async def test_a_session_that_was_only_looked_at_on_a_node_that_leaves_is_given_back() -> None:
    async with shelf(Place(1), Place(2)) as nodes:
        old, peer = nodes.places
        session = opened(peer)
        old.mover.leave()
        there = await nodes.clients[0].resume_session(session.session_id)
        assert (await there.info()).history_length == len(PROMPT)
        await old.mover.settled()
        assert [len(place.store.sessions()) for place in nodes.places] == [0, 1]


async def test_what_is_no_id_of_a_session_is_asked_of_no_node() -> None:
    place = Place(1)

    class Unasked:
        name = address = "unasked"

        async def take(self, session_id: str) -> MovedSession:
            raise AssertionError(session_id)

    place.peers.nodes = [Unasked()]  # type: ignore[list-item]
    for text in ("", "ses", "ses-1", "x" * 24, "ses-" + "a" * 2000):
        await place.mover.bring(text)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "generate", "leave", "wait"]),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_moves_change_no_history(steps: list[tuple[str, int, int]]) -> None:
    """Whichever node is asked, and whichever leave, but one: the history is that of one node."""

    async def run() -> tuple[list[int], list[int]]:
        places = [Place(number) for number in range(3)]
        for place in places:
            place.peers.nodes = [Reached(other) for other in places if other is not place]
        model = places[0].model
        assert model.facts is not None
        session_id = (
            places[0]
            .store.create(model, model.facts, stop_token_ids=frozenset(), label="")
            .session_id
        )
        known: list[int] = []
        left: set[int] = set()
        for step, number, count in steps:
            place = places[number]
            if step == "leave":
                if len(left | {number}) < len(places):
                    left.add(number)
                    place.mover.leave()
            elif step == "wait":
                await place.mover.settled()
            else:
                await place.mover.bring(session_id)
                with place.store.operation(session_id, step) as session:
                    if step == "append":
                        session.append([count] * count)
                        known += [count] * count
                    elif known:
                        tokens, _ = expected(known, count)
                        known += tokens
                        await asyncio.sleep(0)
                        for token in tokens:
                            session.commit(token)
        for place in places:
            await place.mover.settled()
        holding = [place for place in places if place.store.find(session_id) is not None]
        assert len(holding) == 1, "a session is at one node"
        assert places.index(holding[0]) not in left
        (session,) = holding[0].store.sessions()
        return list(session.history), known

    history, known = asyncio.run(run())
    assert history == known
