"""Looks at silent nodes over real sockets: verdicts, helpers, hints, and what nobody can abuse."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import patch

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.liveness.dialing import DialResult
from kakeya.fleet.liveness.pacing import Shares
from kakeya.fleet.liveness.probing import ProbeConfig, Prober
from kakeya.fleet.view.own_card import DEFENCE_S
from kakeya.fleet.view.suspicion import Doubt, Sign
from kakeya.v1.fleet_pb2 import ProbeRequest, ProbeResponse
from kakeya.wire.channels import Channels
from tests.fakes import FakeClock
from tests.fleet.nodes import NOW, Node, make_registry, make_wire, running_node
from tests.fleet.probers import PATIENT, Probing, probing_node
from tests.fleet.proxy import running_proxy
from tests.waiting import LIMIT_S, until

PROBE = "/kakeya.v1.GossipService/Probe"


@asynccontextmanager
async def probing_fleet(*names: str, **options: object) -> AsyncIterator[list[Probing]]:
    """Nodes that know each other."""
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(probing_node(name, **options)) for name in names]  # type: ignore[arg-type]
        for one in fleet:
            one.learn(*(other.node for other in fleet))
        yield fleet


async def gone_node(node_id: str) -> Node:
    """A node that stopped; its card is as it was."""
    async with running_node(node_id) as node:
        return node


async def ask(asked: Probing, node_id: str) -> ProbeResponse:
    async with grpc.aio.insecure_channel(asked.node.address) as channel:
        request = ProbeRequest(node_id=node_id).SerializeToString()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(PROBE)
        answer: bytes = await call(request, timeout=LIMIT_S)
        return ProbeResponse.FromString(answer)


async def test_a_dead_node_is_accused_by_all_after_one_of_them_failed() -> None:
    async with probing_fleet("a", "b", "c", "d", "e") as fleet:
        dead = await gone_node("dead")
        for one in fleet:
            one.learn(dead)
        fleet[0].fail("dead")
        await until(lambda: all(one.accused() == {"dead"} for one in fleet))
        assert all(one.pokes for one in fleet)  # each starts a round


async def test_a_node_that_another_reaches_is_never_accused() -> None:
    """C cannot dial A, B can: only C's edge is doubted, and it does not flap as A beats on."""
    async with (
        probing_fleet("a", "b", config=PATIENT) as (a, b),
        probing_node("c", config=PATIENT) as c,
    ):
        nowhere = (await gone_node("nowhere")).address
        c.learn(b.node)
        c.learn_of(nowhere, "a")
        assert a.node.registry.node_id == "a"
        c.fail("a")
        await until(lambda: c.doubt_of(nowhere) is Doubt.ASYMMETRIC)
        assert c.accused() == set()
        assert c.node.registry.is_suspect("a")
        assert not b.node.registry.is_suspect("a")


async def test_one_broken_call_to_a_healthy_node_is_forgiven_at_once() -> None:
    async with probing_fleet("a", "b", config=PATIENT) as (a, _):
        a.fail("b")
        assert a.node.registry.is_suspect("b")
        await until(lambda: not a.node.registry.is_suspect("b"))
        assert a.pokes == []


async def test_who_reaches_nobody_accuses_nobody() -> None:
    """The cable of A is pulled: all that it asks are silent too, so the fault is its own."""
    async with probing_node("a") as a:
        others = [await gone_node(name) for name in ("b", "c", "d", "e")]
        a.learn(*others)
        a.fail("b")
        await until(lambda: a.prober.last("b") is not None)
        await until(lambda: a.prober.is_idle)
        assert a.doubt_of(others[0].address) is Doubt.UNJUDGED
        assert a.accused() == set()


@pytest.mark.parametrize("limit_s", [pytest.param(4.0, marks=pytest.mark.slow), LIMIT_S])
async def test_a_hung_node_is_accused_within_the_deadlines(limit_s: float) -> None:
    async with probing_fleet("a", "b", "c") as fleet, running_node("hung") as hung:
        async with running_proxy(hung.address) as proxy:
            for one in fleet:
                one.learn_of(proxy.address, "hung")
            proxy.is_blackhole = True
            fleet[0].fail("hung")
            await until(lambda: fleet[0].accused() == {"hung"}, limit_s=limit_s)
            proxy.is_blackhole = False


async def test_an_accused_node_that_answers_again_is_used_again() -> None:
    async with probing_fleet("a", "b") as (a, b):
        dead = await gone_node("x")
        a.learn(dead)
        b.learn(dead)
        a.fail("x")
        await until(lambda: a.accused() == b.accused() == {"x"})
        async with running_node("x", port=int(dead.address.rpartition(":")[2])):
            await until(lambda: not (a.accused() or b.accused()))
            assert not a.node.registry.is_suspect("x")


async def test_a_broken_connection_is_looked_at_though_nobody_calls() -> None:
    async with probing_fleet("a", "b") as (a, b):
        async with running_node("x") as x:
            for one in (a, b):
                one.learn(x)
                assert (await one.node.exchange(x.address)).errors == {}
        await until(lambda: a.accused() == b.accused() == {"x"})


async def test_a_node_is_dialled_where_its_route_says() -> None:
    nowhere = (await gone_node("nowhere")).address
    async with running_node("x") as x:
        async with probing_node("a", route=lambda card: x.address) as a:
            a.learn_of(nowhere, "x")
            a.fail("x")
            await until(lambda: not a.node.registry.is_suspect("x"))


async def test_whoever_else_answers_at_the_address_is_not_the_node() -> None:
    async with probing_node("a") as a, running_node("z") as z:
        a.learn_of(z.address, "x")
        a.fail("x")
        await until(lambda: a.prober.last("x") is not None)
        assert a.node.registry.is_suspect("x")


async def test_a_busy_node_blames_nobody() -> None:
    """A deadline that passed while this node's own loop stood still counts as no miss."""
    async with probing_fleet("a", "b") as (a, b):
        looking = asyncio.create_task(a.prober._dialer.dial(a.node.card_of("b")))
        for _ in range(3):  # until the call is made
            await asyncio.sleep(0)
        until_mono = time.monotonic() + 1.2
        while time.monotonic() < until_mono:  # the fault itself; b stands still too
            pass
        assert (await looking).reach is DialResult.UNSURE
        assert not a.node.registry.is_suspect("b")
        a.prober._dialer._timeout_s = LIMIT_S
        assert (await a.prober._dialer.dial(b.node.registry.own)).reach is DialResult.REACHED


async def test_a_node_that_is_gone_is_no_more_accused_nor_dialled() -> None:
    async with probing_node("a") as a:
        dead = await gone_node("x")
        a.learn(dead)
        a.fail("x")
        await until(lambda: a.accused() == {"x"})
        assert dead.address in a.node.channels.addresses
        clock = a.node.clock
        a.node.registry.expire(now=clock.wall() + 700.0, mono=clock.mono() + 700.0)
        assert a.accused() == set()
        await until(lambda: dead.address not in a.node.channels.addresses)


# --- accusations of others


async def test_a_verdict_travels_by_gossip_and_is_checked_where_it_arrives() -> None:
    async with running_node("x") as x:
        pass
    async with probing_node("a", config=ProbeConfig(helpers=0)) as a, probing_node("b") as b:
        for one, other in ((a, b), (b, a)):
            one.learn(x, other.node)
        a.fail("x")
        await until(lambda: a.accused() == {"x"})
        assert not b.suspects
        await b.node.exchange(a.node.address)
        await until(lambda: b.accused() == {"x"})


async def test_a_hostile_member_talks_nobody_into_a_doubt() -> None:
    """It accuses everybody to everybody, its victims to themselves too."""
    began = time.monotonic()
    async with probing_fleet("a", "b", "c", "hostile", config=PATIENT) as (*honest, hostile):
        hostile.prober.outgoing = lambda: tuple(  # type: ignore[method-assign]
            sign
            for registry in (one.node.registry for one in honest)
            if (sign := registry.sign_of(registry.node_id))
        )
        for _ in range(3):
            for one in honest:
                await hostile.node.exchange(one.node.address)
                await one.node.exchange(hostile.node.address)
        await until(lambda: all(one.prober.is_idle for one in honest))
        assert not any(one.suspects or one.accused() for one in honest)
        assert all(one.pokes for one in honest)  # each defends itself
        most = 1 + (time.monotonic() - began) / DEFENCE_S
        assert all(len(one.pokes) <= most for one in honest)


async def test_an_accusation_is_looked_into_and_a_lie_changes_nothing() -> None:
    async with probing_fleet("a", "b", "c", config=PATIENT) as (a, b, c):
        signs = [a.node.registry.sign_of(name) for name in ("b", "c")]
        a.prober.hear([sign for sign in signs if sign])
        await until(lambda: all(a.prober.last(name) for name in ("b", "c")))
        await until(lambda: a.prober.is_idle)
        assert a.node.registry.suspects() == frozenset()
        assert a.accused() == set()
        assert a.pokes == b.pokes == c.pokes == []


async def test_a_true_accusation_becomes_an_own_verdict() -> None:
    async with probing_fleet("a", "b") as (a, b):
        dead = await gone_node("x")
        a.learn(dead)
        b.learn(dead)
        sign = a.node.registry.sign_of("x")
        assert sign is not None
        a.prober.hear([sign])
        await until(lambda: a.accused() == {"x"})


def test_a_liar_uses_up_its_own_share_of_looks_and_not_that_of_others() -> None:
    shares = Shares(32, 10.0, share=8)
    assert sum(shares.take("liar", 0.0) for _ in range(100)) == 8
    shares.fine("liar", 4)
    assert sum(shares.take("honest", 0.0) for _ in range(5)) == 5
    assert sum(shares.take(f"n{i}", 0.0) for i in range(100)) == 32 - 8 - 4 - 5
    assert shares.take("liar", 10.0), "a new interval"
    assert sum(shares.take("", 20.0) for _ in range(100)) == 32


async def test_one_that_accuses_everybody_leaves_looks_for_a_true_accusation() -> None:
    async with probing_node("a", is_looking=False) as a:
        crowd = [f"n{i:02}" for i in range(40)]
        for at, name in enumerate(crowd):
            a.learn_of(f"127.0.0.1:{at + 1}", name)
        signs = [sign for name in crowd if (sign := a.node.registry.sign_of(name))]
        a.prober.hear(signs[:39], "liar")
        assert a.prober.due == 8
        a.prober.hear(signs[39:], "honest")
        assert a.prober.due == 9


async def test_an_accusation_is_forgotten_with_the_look_that_it_began() -> None:
    """Kept, it would be held against its accuser once the node is there again."""
    async with probing_node("a") as a:
        a.learn(await gone_node("x"))
        sign = a.node.registry.sign_of("x")
        assert sign is not None
        a.prober.hear([sign], "honest")
        clock = a.node.clock
        assert a.node.registry.expire(now=clock.wall() + 200, mono=clock.mono() + 200) == ("x",)
        await until(lambda: a.prober.is_idle)
        assert a.prober._unproven == {}


async def test_an_accused_node_beats_again_and_not_for_each_accusation() -> None:
    async with probing_node("a") as a:
        own = a.node.registry.sign_of("a")
        assert own is not None
        for _ in range(100):
            a.prober.hear([own])
        assert len(a.pokes) == 1
        a.prober.hear([own._replace(incarnation=0)])
        assert len(a.pokes) == 1


SIGNS = st.builds(
    Sign,
    st.sampled_from(["me", "x", "y", "stranger"]),
    st.integers(0, 3),
    st.integers(0, 2**64 - 1),
    st.integers(0, 600),
)


@given(st.lists(SIGNS, max_size=200))
def test_no_accusation_makes_a_doubt_or_is_passed_on(accusations: list[Sign]) -> None:
    registry = make_registry()
    registry.merge([make_wire("x"), make_wire("y")], now=NOW, mono=0.0)
    prober = Prober(
        registry,
        channels=Channels(),
        clock=FakeClock(NOW, mono=0.0),
        rng=random.Random(1),
        poke=lambda: None,
        config=ProbeConfig(allowance=4),
    )
    prober.hear(accusations)
    assert prober.outgoing() == ()
    assert registry.suspects() == frozenset()
    assert prober.due <= 4


# --- probes for others


async def test_probe_says_what_this_node_reaches() -> None:
    async with probing_fleet("a", "b", config=PATIENT) as (a, _):
        a.learn(await gone_node("dead"))
        reached = await ask(a, "b")
        assert reached.is_reached
        assert reached.rtt_ms > 0.0
        assert not (await ask(a, "dead")).is_reached
        assert (await ask(a, "a")).is_reached


async def test_probe_dials_only_nodes_whose_cards_are_held() -> None:
    async with probing_node("a") as a, running_node("stranger") as stranger:
        for node_id in ("stranger", stranger.address, "", "\x00"):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await ask(a, node_id)
            assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ask(a, "x" * 300)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_hundred_requests_for_one_node_are_one_call_to_it() -> None:
    """Nobody makes this node hammer another."""
    calls, all_asked = 0, asyncio.Event()

    async def describe(request: bytes, context: object) -> bytes:
        nonlocal calls
        calls += 1
        await all_asked.wait()
        return b""

    handler = grpc.method_handlers_generic_handler(
        "kakeya.v1.CapabilityService",
        {"GetNodeCapability": grpc.unary_unary_rpc_method_handler(describe)},
    )
    server = grpc.aio.server(handlers=(handler,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with probing_node("a", config=PATIENT, is_looking=False) as a:
        a.learn_of(address, "x")
        with patch.object(a.prober._dialer, "dial", wraps=a.prober._dialer.dial) as dial:
            asking = asyncio.gather(*(ask(a, "x") for _ in range(100)), return_exceptions=True)
            await until(lambda: dial.call_count == 100)
            all_asked.set()
            answers = await asking
        assert len(answers) == 100
        assert calls == 1
    await server.stop(None)


async def test_probing_many_nodes_for_others_has_an_end() -> None:
    config = ProbeConfig(timeout_s=LIMIT_S, interval_s=60.0, allowance=3)
    async with probing_node("a", config=config, is_looking=False) as a:
        dead = await gone_node("dead")
        names = [f"n{i}" for i in range(10)]
        a.learn_of(dead.address, *names)
        codes = []
        for name in names:
            try:
                await ask(a, name)
                codes.append(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as failure:
                codes.append(failure.code())
        refused = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes == [grpc.StatusCode.OK] * 3 + [refused] * 7
