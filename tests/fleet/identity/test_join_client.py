"""Machines that join over real sockets: who gets in, who does not, and what each is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    ConfigError,
    Denied,
    InvalidArgument,
    KakeyaError,
    PeerProtocol,
    PeerUnavailable,
    Unauthenticated,
)
from kakeya.core.tasks import Supervisor
from kakeya.fleet.identity.authority import Authority, authority_of, new_fleet
from kakeya.fleet.identity.certificates import DAY_S
from kakeya.fleet.identity.identity import (
    FOLDER,
    REVOCATIONS,
    Identity,
    load_identity,
    load_peers,
    save_identity,
)
from kakeya.fleet.identity.invite import (
    decode_token,
    encode_token,
    proof_of_answer,
    proof_of_request,
)
from kakeya.fleet.identity.join_client import PENDING_KEY, JoinedFleet, join
from kakeya.fleet.identity.join_server import JoinServer
from kakeya.fleet.identity.membership import open_trust
from kakeya.fleet.identity.revocations import save_revocations
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import JoinServiceStub
from kakeya.wire.security import CertRole
from kakeya.wire.server.sockets import accepted
from tests.fakes import SettableClock
from tests.waiting import until

PEERS = ("192.168.1.5:50051", "192.168.1.6:50051")


@dataclass
class House:
    """The inviting node."""

    identity: Identity
    authority: Authority
    trust: FleetTrust
    door: JoinServer
    clock: SettableClock

    async def token(self, role: CertRole = CertRole.MEMBER, valid_s: float = 900.0) -> str:
        return (await self.door.invite(role, valid_s)).token


@asynccontextmanager
async def open_house(
    *, identity: Identity | None = None, **options: object
) -> AsyncIterator[House]:
    clock = SettableClock()
    identity = identity or new_fleet("mini-1", clock.wall())
    authority = authority_of(identity)
    assert authority is not None
    trust = FleetTrust(identity)
    settings = {"hosts": lambda: ["127.0.0.1"], "peers": lambda: PEERS, **options}
    door = JoinServer(authority, trust, clock=clock, **settings)  # type: ignore[arg-type]
    async with Supervisor(clock) as tasks:
        door.start(tasks)
        try:
            yield House(identity, authority, trust, door, clock)
        finally:
            await door.aclose()
    assert {health.failures for health in tasks.health()} == {0}


async def enter(
    home: Path, token: str, label: str = "mini-2", clock: Clock | None = None
) -> JoinedFleet:
    return await join(home, token, label, clock=clock or SettableClock())


async def held(home: Path) -> Identity | None:
    return await asyncio.to_thread(load_identity, home)


async def test_one_token_makes_a_member_that_its_fleet_believes(tmp_path: Path) -> None:
    async with open_house() as house:
        house.trust.revoke("a" * 51 + "q", house.clock.wall())
        joined = await enter(tmp_path, await house.token())
    identity = await held(tmp_path)
    assert identity == joined.identity
    assert joined.is_new
    assert (identity.label, identity.role) == ("mini-2", CertRole.MEMBER)
    assert (identity.fleet, identity.is_authority) == (house.identity.fleet, False)
    assert joined.peers == PEERS == await asyncio.to_thread(load_peers, tmp_path)
    caller = house.trust.caller_of(identity.tls.certificate)
    assert caller == (identity.node_id, CertRole.MEMBER, identity.not_after_at)
    trust = await asyncio.to_thread(open_trust, tmp_path, identity)
    assert trust.revocations == house.trust.revocations
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


@pytest.mark.parametrize("role", list(CertRole))
async def test_the_invite_says_the_role(tmp_path: Path, role: CertRole) -> None:
    async with open_house() as house:
        assert (await enter(tmp_path, await house.token(role))).identity.role is role


async def test_who_only_connects_does_not_take_all_files_of_the_inviting_node(
    tmp_path: Path,
) -> None:
    async with open_house() as house:
        token = await house.token()
        host, _, port = house.door.addresses[0].rpartition(":")
        crowd = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
        async with asyncio.timeout(4):  # well before their handshakes time out
            while len(await asyncio.to_thread(accepted, {int(port)})) > 16:
                house.clock.advance(2.0)
                await asyncio.sleep(0.05)
        assert (await enter(tmp_path, token)).is_new
        for _, writer in crowd:
            writer.transport.abort()


async def test_who_tries_many_tokens_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house() as house:
        token = decode_token(await house.token())
        began_mono = house.clock.mono()
        async with grpc.aio.insecure_channel(token.addresses[0]) as channel:
            stub = JoinServiceStub(channel)
            for n in range(50):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub.Join(pb.JoinRequest(csr=b"x", proof=bytes([n] * 32)), timeout=5)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert house.door.stats.wrong_proofs == 50
        seconds = house.clock.mono() - began_mono
    assert 1 <= sum("refused to join" in record.message for record in caplog.records) <= 1 + seconds


async def test_the_port_is_open_only_while_an_invite_lives(tmp_path: Path) -> None:
    async with open_house() as house:
        assert house.door.addresses == ()
        token = await house.token(valid_s=60)
        (address,) = house.door.addresses
        assert await _accepts(address)
        house.clock.advance(30)
        await house.token(valid_s=60)
        house.clock.advance(31)
        assert house.door.addresses == (address,)  # the second invite lives on
        house.clock.advance(30)
        await until(lambda: not house.door.addresses)
        assert not await _accepts(address)
        with pytest.raises(PeerUnavailable, match=r"token expired \d+ seconds ago.*kakeya invite"):
            await enter(tmp_path, token, clock=house.clock)
        again = await house.token()
        assert (await enter(tmp_path, again)).is_new


async def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def test_a_token_takes_in_one_of_two_who_come_at_once(tmp_path: Path) -> None:
    async with open_house() as house:
        for turn in range(10):
            token = await house.token()
            homes = [tmp_path / f"{turn}-{name}" for name in "ab"]
            results = await asyncio.gather(
                *(enter(home, token, home.name) for home in homes), return_exceptions=True
            )
            losers = [each for each in results if isinstance(each, Denied)]
            winners = [each for each in results if isinstance(each, JoinedFleet)]
            assert (len(winners), len(losers)) == (1, 1), results
            winner = winners[0].identity.label
            assert f"used already, by {winner}" in losers[0].message
            assert [home.name for home in homes if await held(home)] == [winner]
            house.clock.advance(1000)  # or too many invites would live
        assert house.door.stats.admitted == 10


async def test_whoever_loses_the_answer_asks_again_with_the_same_key(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()

        def has_answered() -> bool:
            return house.door.stats.admitted > 0

        async with _cut_once(house.door.addresses[0], has_answered) as (address, cuts):
            joined = await enter(tmp_path, _moved(token, address))
            assert cuts == [1]
        assert house.door.stats.admitted == 1
        assert await held(tmp_path) == joined.identity
        with pytest.raises(Denied, match="used already, by mini-2"):
            await enter(tmp_path / "other", token)


async def test_whoever_was_killed_before_the_answer_came_runs_the_same_command_again(
    tmp_path: Path,
) -> None:
    async with open_house() as house:
        token = await house.token()
        async with _cut_once(house.door.addresses[0], lambda: house.door.stats.admitted > 0) as (
            address,
            cuts,
        ):
            first = asyncio.create_task(enter(tmp_path, _moved(token, address)))
            await until(lambda: bool(cuts))
            first.cancel()
            await asyncio.wait([first])
        assert await held(tmp_path) is None
        assert (tmp_path / PENDING_KEY).stat().st_mode & 0o077 == 0
        assert (await enter(tmp_path, token)).is_new
        assert not (tmp_path / PENDING_KEY).exists()


def _moved(token: str, *addresses: str) -> str:
    return encode_token(replace(decode_token(token), addresses=addresses))


@asynccontextmanager
async def _cut_once(
    target: str, is_time: Callable[[], bool]
) -> AsyncIterator[tuple[str, list[int]]]:
    """A relay that ends one connection when the other end is about to answer."""
    host, _, port = target.rpartition(":")
    cuts: list[int] = []
    tasks = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if back and is_time() and not cuts:
                    cuts.append(1)
                    break
                sink.write(data)
                await sink.drain()
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for ends in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.create_task(pump(*ends))
            tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    here = server.sockets[0].getsockname()
    try:
        yield f"{here[0]}:{here[1]}", cuts
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_address_that_leads_nowhere_or_to_a_stranger_is_passed_over(
    tmp_path: Path,
) -> None:
    stranger = grpc.aio.server()
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    async with open_house() as house, open_house() as neighbour:
        await neighbour.token()
        token = await house.token()
        addresses = ("127.0.0.1:1", f"127.0.0.1:{port}", *neighbour.door.addresses)
        joined = await enter(tmp_path, _moved(token, *addresses, *house.door.addresses))
        assert joined.identity.fleet == house.identity.fleet
    await stranger.stop(None)


async def test_a_token_of_another_fleet_is_not_known(tmp_path: Path) -> None:
    async with open_house() as house, open_house() as neighbour:
        await house.token()
        lost = _moved(await neighbour.token(), *house.door.addresses)
        with pytest.raises(Unauthenticated, match=f"fleet {house.identity.fleet} does not know"):
            await enter(tmp_path, lost)
        assert house.door.stats.wrong_proofs == 1
        assert await held(tmp_path) is None


async def test_wrong_proofs_cost_the_invite_nothing(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        guess = replace(decode_token(token), secret=bytes(16))
        for _ in range(20):
            with pytest.raises(Unauthenticated):
                await enter(tmp_path / "thief", encode_token(guess))
        assert house.door.stats.wrong_proofs == 20
        assert (await enter(tmp_path, token)).is_new


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\x05abc", bytes(20_000)])
async def test_rubbish_at_the_door_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    async with open_house() as house:
        token = await house.token()
        async with grpc.aio.insecure_channel(house.door.addresses[0]) as channel:
            call = channel.unary_unary("/kakeya.v1.JoinService/Join")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(data, timeout=5)
        assert failure.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        assert (await enter(tmp_path, token)).is_new


async def test_silent_half_sent_calls_do_not_block_the_door(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        host, _, port = house.door.addresses[0].rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        assert (await enter(tmp_path, token)).is_new
        for _, writer in silent:
            writer.close()


# What joiners are told about themselves


async def test_a_member_needs_no_second_invitation_and_asks_nobody(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        first = await enter(tmp_path, token)
    again = await enter(tmp_path, token)
    assert (again.identity, again.peers, again.is_new) == (first.identity, PEERS, False)


async def test_a_member_of_one_fleet_joins_no_other(tmp_path: Path) -> None:
    mine = new_fleet("mini-9", SettableClock().wall())
    await asyncio.to_thread(save_identity, tmp_path, mine)
    async with open_house() as house:
        with pytest.raises(ConfigError, match=f"mini-9 of fleet {mine.fleet} already") as problem:
            await enter(tmp_path, await house.token())
        assert house.identity.fleet in problem.value.message
        assert house.door.stats.admitted == 0


@pytest.mark.parametrize(("ahead_s", "words"), [(-3 * DAY_S, "behind"), (3 * DAY_S, "ahead of")])
async def test_a_clock_that_is_off_is_named_and_the_same_token_works_once_it_is_set(
    tmp_path: Path, ahead_s: float, words: str
) -> None:
    clock = SettableClock()
    clock.advance(ahead_s)
    async with open_house() as house:
        token = await house.token()
        with pytest.raises(ConfigError, match=f"clock of this machine is 3 days {words}"):
            await enter(tmp_path, token, clock=clock)
        assert await held(tmp_path) is None
        clock.advance(-ahead_s)
        assert (await enter(tmp_path, token, clock=clock)).is_new


@pytest.mark.parametrize("skew_s", [-23 * 3600, -3600, 3600, 23 * 3600])
async def test_a_clock_that_is_a_little_off_does_not_matter(tmp_path: Path, skew_s: float) -> None:
    clock = SettableClock()
    clock.advance(skew_s)
    async with open_house() as house:
        joined = await enter(tmp_path, await house.token(), clock=clock)
    assert joined.identity.fault_at(clock.wall()) == ""


async def test_a_certificate_that_ran_out_is_replaced_for_the_same_key(tmp_path: Path) -> None:
    async with open_house() as house:
        old = house.authority.new_identity("mini-2", now=house.clock.wall() - 100, life_s=50)
        await asyncio.to_thread(save_identity, tmp_path, old)
        joined = await enter(tmp_path, await house.token())
    assert joined.is_new
    assert joined.identity.node_id == old.node_id
    assert await held(tmp_path) == joined.identity
    assert joined.identity.fault_at(house.clock.wall()) == ""


async def test_a_revoked_node_is_told_so(tmp_path: Path) -> None:
    async with open_house() as house:
        old = house.authority.new_identity("mini-2", now=house.clock.wall() - 100, life_s=50)
        await asyncio.to_thread(save_identity, tmp_path, old)
        house.trust.revoke(old.node_id, house.clock.wall())
        with pytest.raises(Denied, match="revoked"):
            await enter(tmp_path, await house.token())


async def test_a_removed_node_that_knows_it_joins_again_with_a_new_token(tmp_path: Path) -> None:
    """Its key stays out of the fleet for good; the machine is in it with another one."""
    async with open_house() as house:
        first = (await enter(tmp_path, await house.token())).identity
        assert not (await enter(tmp_path, await house.token())).is_new
        made = house.trust.revoke(first.node_id, house.clock.wall())
        await asyncio.to_thread(save_revocations, tmp_path / FOLDER / REVOCATIONS, made)
        again = await enter(tmp_path, await house.token())
        assert again.is_new
        assert await held(tmp_path) == again.identity
        assert again.identity.node_id != first.node_id
        assert not house.trust.is_revoked(again.identity.node_id)
        assert house.trust.caller_of(again.identity.tls.certificate) is not None
        assert not (await enter(tmp_path, await house.token())).is_new


async def test_a_removed_node_that_does_not_know_it_joins_again_when_a_person_says_so(
    tmp_path: Path,
) -> None:
    async with open_house() as house:
        first = (await enter(tmp_path, await house.token())).identity
        house.trust.revoke(first.node_id, house.clock.wall())
        token = await house.token()
        assert not (await enter(tmp_path, token)).is_new
        again = await join(tmp_path, token, "mini-2", clock=house.clock, is_typed=True)
        assert again.is_new
        assert again.identity.node_id != first.node_id
        assert await held(tmp_path) == again.identity
    alone = await join(tmp_path, token, "mini-2", clock=house.clock, is_typed=True)
    assert not alone.is_new


async def test_a_restart_of_the_authority_ends_no_invite(tmp_path: Path) -> None:
    file = tmp_path / "invites.json"
    async with open_house(file=file) as house:
        used, fresh = await house.token(), await house.token()
        await enter(tmp_path / "two", used)
        addresses, identity = house.door.addresses, house.identity
    async with open_house(file=file, identity=identity) as house:
        await until(lambda: house.door.addresses == addresses)
        assert (await enter(tmp_path / "three", fresh)).is_new
        for taken in (used, fresh):
            with pytest.raises(Denied, match="used already"):
                await enter(tmp_path / "four", taken)
        house.clock.advance(901)
        await until(lambda: not house.door.addresses)
    async with open_house(file=file, identity=identity) as house:
        house.clock.advance(901)
        with pytest.raises(PeerUnavailable, match="no node answers"):
            await enter(tmp_path / "four", fresh)


async def test_a_damaged_file_of_invites_costs_no_more_than_these(tmp_path: Path) -> None:
    file = tmp_path / "invites.json"
    for damaged in ("{", "[]", '{"addresses": [], "invites": [{"secret": "zz"}]}'):
        file.write_text(damaged)
        async with open_house(file=file) as house:
            assert (await enter(tmp_path / str(len(damaged)), await house.token())).is_new


async def test_the_join_port_can_be_fixed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
        async with open_house(port=port) as house:
            with pytest.raises(ConfigError, match="another --join-port"):
                await house.token()
    async with open_house(port=port) as house:
        assert (await enter(tmp_path, await house.token())).is_new
        assert house.door.addresses == (f"127.0.0.1:{port}",)


async def test_a_node_that_ended_since_is_named_with_its_address(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        (address,) = house.door.addresses
    with pytest.raises(PeerUnavailable, match=f"no node answers at {address}"):
        await enter(tmp_path, token)


async def test_a_label_or_token_that_is_none_asks_nobody(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        for label in ("", "a\nb", "x" * 65):
            with pytest.raises(InvalidArgument, match="label"):
                await enter(tmp_path, token, label)
        with pytest.raises(InvalidArgument, match="token"):
            await enter(tmp_path, token[:-5])
    assert not list(tmp_path.iterdir())


async def test_a_door_that_can_open_nowhere_says_so(tmp_path: Path) -> None:
    async with open_house(hosts=lambda: ["192.0.2.77"]) as house:
        with pytest.raises(ConfigError, match="no address of this machine"):
            await house.token()


# Whoever stands between


class _Forger:
    """A relay that knows no secret and changes one field of the answer."""

    def __init__(self, target: str, forge: Callable[[pb.JoinResponse], None]) -> None:
        self._target = target
        self._forge = forge

    async def join(self, request: bytes, context: object) -> bytes:
        async with grpc.aio.insecure_channel(self._target) as channel:
            answer = await JoinServiceStub(channel).Join(
                pb.JoinRequest.FromString(request), timeout=5
            )
        self._forge(answer)
        return answer.SerializeToString()


def _other_certificate(answer: pb.JoinResponse) -> None:
    answer.certificate = new_fleet("evil", SettableClock().wall()).tls.certificate


def _other_authority(answer: pb.JoinResponse) -> None:
    answer.authority = new_fleet("evil", SettableClock().wall()).tls.authority


def _other_peers(answer: pb.JoinResponse) -> None:
    answer.peers.append("6.6.6.6:6")


def _other_revocations(answer: pb.JoinResponse) -> None:
    answer.revocations = b"all of them"


def _no_proof(answer: pb.JoinResponse) -> None:
    answer.proof = b""


@pytest.mark.parametrize(
    "forge",
    [_other_certificate, _other_authority, _other_peers, _other_revocations, _no_proof],
)
async def test_nobody_on_the_way_can_change_the_answer(
    tmp_path: Path, forge: Callable[[pb.JoinResponse], None]
) -> None:
    async with open_house() as house:
        token = await house.token()
        forger = _Forger(house.door.addresses[0], forge)
        server = grpc.aio.server()
        handlers = {"Join": grpc.unary_unary_rpc_method_handler(forger.join)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kakeya.v1.JoinService", handlers),)
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        with pytest.raises(PeerProtocol, match="not the node that made the token"):
            await enter(tmp_path, _moved(token, address))
        await server.stop(None)
        assert await held(tmp_path) is None
        assert (await enter(tmp_path, token)).is_new  # the same key: nothing was lost


async def test_even_with_the_secret_nobody_leads_into_another_fleet(tmp_path: Path) -> None:
    """Who stole the token can take its place, not have the joiner trust another authority."""
    clock = SettableClock()
    evil = new_fleet("evil", clock.wall())
    authority = authority_of(evil)
    assert authority is not None
    async with open_house() as house:
        token = decode_token(await house.token())

        async def answer(request: bytes, context: object) -> bytes:
            asked = pb.JoinRequest.FromString(request)
            wanted = authority.read(asked.csr)
            certificate = authority.issue(wanted, role=CertRole.MEMBER, now=clock.wall())
            told = {"certificate": certificate, "authority": authority.certificate}
            proof = proof_of_answer(token.secret, csr=asked.csr, peers=(), revocations=b"", **told)
            return pb.JoinResponse(proof=proof, **told).SerializeToString()

        server = grpc.aio.server()
        handlers = {"Join": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kakeya.v1.JoinService", handlers),)
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        with pytest.raises(PeerProtocol, match=f"leads into fleet {evil.fleet}"):
            await enter(tmp_path, encode_token(replace(token, addresses=(address,))))
        await server.stop(None)


async def test_a_request_that_was_listened_to_helps_nobody(tmp_path: Path) -> None:
    """The same bytes again get the same key certified, which only its owner has."""
    async with open_house() as house:
        token = decode_token(await house.token())
        joined = await enter(tmp_path, encode_token(token))
        from kakeya.fleet.identity.certificates import make_request, read_key

        csr = make_request(read_key(joined.identity.tls.key), "mini-2")
        proof = proof_of_request(token.secret, ca_hash=token.ca_hash, csr=csr)
        async with grpc.aio.insecure_channel(house.door.addresses[0]) as channel:
            answer = await JoinServiceStub(channel).Join(
                pb.JoinRequest(csr=csr, proof=proof), timeout=5
            )
        found = house.trust.caller_of(answer.certificate)
        assert found is not None
        assert found[:2] == (joined.identity.node_id, CertRole.MEMBER)


async def test_every_refusal_at_the_door_is_a_sentence(tmp_path: Path) -> None:
    async with open_house() as house:
        token = await house.token()
        await enter(tmp_path / "a", token)
        with pytest.raises(KakeyaError) as used:
            await enter(tmp_path / "b", token)
        assert "kakeya invite" in used.value.message
        assert len(used.value.message) < 300
