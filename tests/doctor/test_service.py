"""CheckBack: it dials its caller and nobody else, briefly, one check at a time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.doctor.service import (
    MAX_ADDRESSES,
    MAX_DIALS_EACH,
    NOT_TOLD,
    NOT_YOURS,
    QUIET_S,
    choose_target,
    source_of,
)
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.paths.addresses import read_literal
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import DoctorServiceStub
from kakeya.wire.channels import Keepalive
from tests.doctor.small_nodes import (
    SmallNode,
    closed_port,
    full_port,
    opener,
    silent_port,
    small_node,
)
from tests.netns import needs_all_loopback


async def check_back(
    node: SmallNode, *addresses: str, caller: SmallNode | None = None
) -> pb.CheckBackResponse:
    channels = opener(caller.identity if caller else None)(Keepalive())
    try:
        stub = DoctorServiceStub(channels.get(node.address))
        return await stub.CheckBack(
            pb.CheckBackRequest(addresses=addresses, sent_at_unix=time.time()), timeout=60
        )
    finally:
        await channels.aclose()


async def refused_while(
    running: asyncio.Task[pb.CheckBackResponse], node: SmallNode
) -> grpc.aio.AioRpcError:
    """Ask again and again until the running check makes the node refuse."""
    while not running.done():
        try:
            await check_back(node)
        except grpc.aio.AioRpcError as refusal:
            return refusal
    raise AssertionError("nothing was refused while a check ran")


async def test_it_says_who_it_is_and_how_it_reaches_the_caller(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "callee") as callee,
        small_node(tmp_path, "caller") as caller,
        small_node(tmp_path, "hasty", dial_s=1.0) as hasty,
    ):
        callee.meet(caller)
        with closed_port() as closed, silent_port() as silent, full_port() as full:
            answer = await check_back(callee, caller.address, closed)
            unanswered = await check_back(hasty, silent, full)
    dials = [*answer.dials, *unanswered.dials]
    assert (answer.node_id, answer.label, answer.version) == ("callee", "callee", "0.1.0")
    assert abs(answer.answered_at_unix - time.time()) < 5
    assert answer.protocol_max >= answer.protocol_min >= 1
    assert [result.is_reached for result in dials] == [True, False, False, False]
    assert [result.errno != 0 for result in dials] == [False, True, False, True]
    assert all(result.error for result in dials[1:])
    assert 0 <= answer.caller_age_s < 30
    assert not answer.is_caller_suspect


async def test_a_caller_that_it_never_heard_of_has_no_age(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "callee") as callee,
        small_node(tmp_path, "caller") as caller,
    ):
        assert (await check_back(callee, caller.address)).caller_age_s < 0


async def test_it_tells_a_suspicion(tmp_path: Path) -> None:
    async with (
        small_node(tmp_path, "callee") as callee,
        small_node(tmp_path, "caller") as caller,
    ):
        callee.meet(caller)
        callee.registry.mark_failed("caller", mono=callee.clock.mono())
        assert (await check_back(callee, caller.address)).is_caller_suspect


@needs_all_loopback()
async def test_it_never_dials_a_third_party(tmp_path: Path) -> None:
    """127.0.0.2 is another host to it; the counter shows that nobody knocked there."""
    knocks = 0

    def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        writer.close()

    victim = await asyncio.start_server(knocked, "127.0.0.2", 0)
    port = victim.sockets[0].getsockname()[1]
    async with victim, small_node(tmp_path, "callee") as callee:
        answer = await check_back(
            callee, f"127.0.0.2:{port}", f"localhost:{port}", f"[::ffff:127.0.0.2]:{port}", "x"
        )
        assert [result.is_reached for result in answer.dials] == [False] * 4
        assert answer.dials[0].error == NOT_YOURS
        assert knocks == 0
        # The control: the port does count.
        _, writer = await asyncio.open_connection("127.0.0.2", port)
        writer.close()
        for _ in range(100):
            if knocks:
                break
            await asyncio.sleep(0.01)
    assert knocks == 1


@asynccontextmanager
async def knocked(host: str) -> AsyncIterator[tuple[str, list[object]]]:
    """An address that takes connections and says nothing, and who came."""
    came: list[object] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer)
        writer.close()

    async with await asyncio.start_server(note, host, 0) as server:
        yield f"{host}:{server.sockets[0].getsockname()[1]}", came


@needs_all_loopback()
async def test_a_member_is_dialled_where_its_own_card_says(tmp_path: Path) -> None:
    """The certificate says who calls, so another member's card opens nothing."""
    fleet = new_fleet("callee", time.time())
    authority = authority_of(fleet)
    assert authority is not None
    one, two = (authority.new_identity(name, now=time.time()) for name in ("one", "two"))
    async with (
        small_node(tmp_path, "", identity=fleet) as callee,
        small_node(tmp_path, "", identity=one) as caller,
        small_node(tmp_path, "", identity=two) as other,
        knocked("127.0.0.3") as (mine, my_knocks),
        knocked("127.0.0.4") as (theirs, their_knocks),
    ):
        caller.offer(Endpoint(mine, "lan", 20))
        other.offer(Endpoint(theirs, "lan", 20))
        callee.meet(caller)
        callee.meet(other)
        answer = await check_back(callee, mine, theirs, caller=caller)
        assert (bool(my_knocks), their_knocks) == (True, [])
    allowed, foreign = answer.dials
    assert allowed.error == NOT_TOLD
    assert foreign.error == NOT_YOURS
    assert answer.caller_age_s >= 0


@needs_all_loopback()
async def test_a_card_makes_no_port_scanner_of_a_node(tmp_path: Path) -> None:
    """A member writes addresses of others on its card: open or closed, they look alike."""
    fleet = new_fleet("callee", time.time())
    authority = authority_of(fleet)
    assert authority is not None
    mallory = authority.new_identity("mallory", now=time.time())
    port = closed_port_at("127.0.0.5")
    async with (
        small_node(tmp_path, "", identity=fleet) as callee,
        small_node(tmp_path, "", identity=mallory) as caller,
        knocked("127.0.0.4") as (open_port, _),
    ):
        told = []
        for address in (open_port, port):
            caller.offer(Endpoint(address, "lan", 20))
            callee.meet(caller)
            began = time.monotonic()
            (dial,) = (await check_back(callee, address, caller=caller)).dials
            assert time.monotonic() - began >= QUIET_S
            told.append((dial.is_reached, dial.errno, dial.error, dial.rtt_ms))
    assert told == [(False, 0, NOT_TOLD, 0.0)] * 2


def closed_port_at(host: str) -> str:
    with socket.socket() as taken:
        taken.bind((host, 0))
        return f"{host}:{taken.getsockname()[1]}"


async def test_what_gossip_may_not_dial_is_not_dialled_at_the_callers_ip_either(
    tmp_path: Path,
) -> None:
    forbidden: dict[str, str] = {}
    async with (
        small_node(tmp_path, "callee", may_dial=lambda where: forbidden.get(where, "")) as callee,
        knocked("127.0.0.1") as (address, came),
    ):
        forbidden[address] = "it is a loopback address"
        (dial,) = (await check_back(callee, address)).dials
        assert (dial.error, came) == ("not dialled: it is a loopback address", [])
        forbidden.clear()  # the control
        await check_back(callee, address)
        assert came


async def test_a_caller_gets_so_many_dials_in_a_minute(tmp_path: Path) -> None:
    async with small_node(tmp_path, "callee") as callee:
        with closed_port() as closed:
            host, _, port = closed.rpartition(":")
            addresses = [f"{host}:{port}"] + [f"10.0.0.{n}:1" for n in range(1, MAX_ADDRESSES)]
            for _ in range(MAX_DIALS_EACH // MAX_ADDRESSES):
                assert len((await check_back(callee, *addresses)).dials) == MAX_ADDRESSES
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check_back(callee, closed)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "ask again later" in str(refused.value.details())


async def test_too_many_addresses_are_refused(tmp_path: Path) -> None:
    async with small_node(tmp_path, "callee") as callee:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check_back(callee, *(f"127.0.0.1:{n}" for n in range(1, MAX_ADDRESSES + 2)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 8" in str(refused.value.details())


async def test_a_check_that_is_refused_while_another_runs_uses_up_no_dials(tmp_path: Path) -> None:
    many = [f"10.0.0.{n}:1" for n in range(MAX_ADDRESSES)]
    async with small_node(tmp_path, "callee") as callee:
        with closed_port() as closed:
            with silent_port() as silent:  # whose end ends the dial
                first = asyncio.create_task(check_back(callee, silent))
                await refused_while(first, callee)
                for _ in range(1 + MAX_DIALS_EACH // MAX_ADDRESSES):
                    with pytest.raises(grpc.aio.AioRpcError, match="already checks back"):
                        await check_back(callee, *many)
            await first
            assert len((await check_back(callee, closed)).dials) == 1


async def test_one_check_at_a_time_for_one_caller(tmp_path: Path) -> None:
    async with small_node(tmp_path, "callee") as callee:
        with silent_port() as silent:  # whose end ends the dial
            first = asyncio.create_task(check_back(callee, silent))
            refusal = await refused_while(first, callee)
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "ask again" in str(refusal.details())
        await first
        assert not (await check_back(callee)).dials


async def test_a_caller_that_leaves_frees_its_turn(tmp_path: Path) -> None:
    async with small_node(tmp_path, "callee") as callee:
        with full_port() as full:
            first = asyncio.create_task(check_back(callee, full))
            await refused_while(first, callee)
            first.cancel()
            for _ in range(200):
                try:
                    await check_back(callee)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.02)
                else:
                    return
    raise AssertionError("the turn of the caller that left was never freed")


# --- the choice


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("ipv4:10.0.0.5:1234", "10.0.0.5:1234"),
        ("ipv6:%5Bfd00::5%5D:1234", "[fd00::5]:1234"),
        ("ipv6:[fe80::5%25eth0]:1234", "[fe80::5%eth0]:1234"),
        ("unix:", None),
        ("unix:/tmp/x", None),
        ("", None),
    ],
)
def test_where_a_call_came_from(peer: str, text: str | None) -> None:
    source = source_of(peer)
    assert (str(source) if source else None) == text


@pytest.mark.parametrize(
    ("address", "source", "target"),
    [
        ("10.0.0.5:50051", "10.0.0.5:999", "10.0.0.5:50051"),
        ("10.0.0.6:50051", "10.0.0.5:999", ""),
        ("10.0.0.5:50051", "[::ffff:10.0.0.5]:999", "10.0.0.5:50051"),
        ("[fe80::5%en7]:50051", "[fe80::5%eth0]:999", "[fe80::5%eth0]:50051"),
        ("mini.local:50051", "10.0.0.5:999", ""),
        ("10.0.0.5:0", "10.0.0.5:999", ""),
        ("0.0.0.0:50051", "10.0.0.5:999", ""),
        ("10.0.0.5:50051", "", ""),
    ],
)
def test_only_the_callers_ip_is_dialled_without_a_card(
    address: str, source: str, target: str
) -> None:
    literal = read_literal(source) if source else None
    assert choose_target(address, None, literal, lambda where: "").address == target


async def test_the_policy_has_a_word_about_cards(tmp_path: Path) -> None:
    async with small_node(tmp_path, "caller") as caller:
        caller.offer(Endpoint("8.8.8.8:53", "public", 40))
        card = caller.registry.own
    refused = choose_target("8.8.8.8:53", card, None, lambda where: "it is no network of ours")
    assert refused == ("", "not dialled: it is no network of ours", False)
    assert choose_target("8.8.8.8:53", card, None, lambda where: "") == ("8.8.8.8:53", "", False)
