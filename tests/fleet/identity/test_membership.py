"""Renewal without a restart, revocation, and the authority's refusals, over real mutual TLS."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core.clock import Clock
from kakeya.core.errors import Denied, InvalidArgument, KakeyaError, NotFound, PeerProtocol
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Card, CardFault
from kakeya.fleet.cards.convert import from_wire
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.certificates import DAY_S, Request, make_request, new_key, read_key
from kakeya.fleet.identity.identity import (
    FOLDER,
    REVOCATIONS,
    Identity,
    load_identity,
    save_identity,
)
from kakeya.fleet.identity.join_client import join
from kakeya.fleet.identity.membership import FleetSecurity, Membership, open_trust
from kakeya.fleet.identity.naming import find_node
from kakeya.fleet.identity.renewal import MembershipService, pause_before_renewal
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import distributed_pb2
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import (
    MembershipServiceStub,
    add_MembershipServiceServicer_to_server,
)
from kakeya.wire.channels import Channels
from kakeya.wire.security import Caller, CertRole
from kakeya.wire.server.authorization import current_caller
from kakeya.wire.server.listeners import Listeners
from tests.fakes import FakeClock, SettableClock
from tests.waiting import until

LIFE_S = 3600.0


@dataclass
class Node:
    """A member with its services behind mutual TLS on loopback."""

    home: Path
    trust: FleetTrust
    membership: Membership
    channels: Channels
    cards: list[Card] = field(default_factory=list)
    address: str = ""

    def card(self, *, is_authority: bool | None = None, address: str = "") -> Card:
        identity = self.trust.identity
        body = distributed_pb2.NodeCapability(
            node_id=identity.node_id,
            label=identity.label,
            grpc_address=address or self.address,
            is_authority=identity.is_authority if is_authority is None else is_authority,
            announced_at_unix=1.0,
            ttl_seconds=120,
            protocol_max=1,
        )
        return from_wire(self.trust.seal(body.SerializeToString()))


@asynccontextmanager
async def running(home: Path, identity: Identity, clock: Clock) -> AsyncIterator[Node]:
    await asyncio.to_thread(save_identity, home, identity)
    trust = await asyncio.to_thread(open_trust, home, identity)
    cards: list[Card] = []
    channels = Channels(security=FleetSecurity(trust, lambda _: ""), is_plain=lambda _: False)
    membership = Membership(
        home,
        trust,
        cards=lambda: cards,
        hosts=lambda: ["127.0.0.1"],
        channels=channels,
        clock=clock,
        rng=random.Random(1),
        life_s=LIFE_S,
    )

    def register(server: grpc.aio.Server) -> None:
        service = MembershipService(membership.certify, caller=current_caller)
        add_MembershipServiceServicer_to_server(service, server)

    listeners = Listeners(register, clock=clock, material=trust.material, trust=trust)
    trust.subscribe(lambda _: listeners.drop_revoked() and None)
    address = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    await listeners.start()
    try:
        yield Node(home, trust, membership, channels, cards, address)
    finally:
        await membership.aclose()
        await channels.aclose()
        await listeners.stop(None)


@asynccontextmanager
async def two_nodes(folder: Path, clock: Clock) -> AsyncIterator[tuple[Node, Node]]:
    """The authority, whose certificate lasts, and a member that knows its card."""
    first = new_fleet("mini-1", clock.wall())
    authority = authority_of(first)
    assert authority is not None
    second = authority.new_identity("mini-2", now=clock.wall(), life_s=LIFE_S)
    async with running(folder / "1", first, clock) as one:
        async with running(folder / "2", second, clock) as two:
            cards = [one.card(), two.card()]
            one.cards[:] = two.cards[:] = cards
            yield one, two


async def held(home: Path) -> Identity | None:
    return await asyncio.to_thread(load_identity, home)


# Renewal


async def test_a_member_renews_at_two_thirds_of_its_life_without_a_restart(
    tmp_path: Path,
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two), Supervisor(clock) as tasks:
        two.membership.start(tasks)
        before = two.trust.identity
        clock.advance(2 / 3 * LIFE_S - 60)
        await asyncio.sleep(0.05)
        assert two.trust.identity is before
        clock.advance(61)
        await until(lambda: two.trust.identity is not before)
        after = two.trust.identity
        assert (after.node_id, after.role, after.label) == (
            before.node_id,
            before.role,
            before.label,
        )
        assert after.not_after_at == pytest.approx(clock.wall() + LIFE_S, abs=5)
        assert await held(two.home) == after
        # Cards, channels and the listener show it from now on.
        assert one.trust.fault_of(two.card(), before.not_after_at + 1) is None
        assert two.trust.material() == after.tls
        await two.membership.renewal.renew()
        assert not any(task.failures for task in tasks.health())


async def test_a_card_that_lies_about_the_authority_only_costs_a_try(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        liar = authority_of(one.trust.identity)
        assert liar is not None
        third = liar.new_identity("mallory", now=clock.wall())
        async with running(tmp_path / "3", third, clock) as mallory:
            fake = new_fleet("evil", clock.wall())

            def certify(csr: bytes, caller: Caller) -> bytes:
                return fake.tls.certificate

            mallory.membership.certify = certify  # type: ignore[method-assign]
            two.cards[:] = [mallory.card(is_authority=True)]
            before = two.trust.identity
            with pytest.raises(KakeyaError):
                await two.membership.renewal.renew()
            assert two.trust.identity is before
            two.cards[:] = [mallory.card(is_authority=True), one.card()]
            clock.advance(60)
            for _ in range(8):  # in either order
                await two.membership.renewal.renew()
                clock.advance(60)
            assert two.trust.identity.fleet == one.trust.identity.fleet


async def test_a_member_without_an_authority_keeps_trying_until_one_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two), Supervisor(clock) as tasks:
        two.cards[:] = [two.card()]
        two.membership.start(tasks)
        before = two.trust.identity
        clock.advance(2 / 3 * LIFE_S)
        await until(lambda: "certificate not renewed; it ends in 20 minutes" in caplog.text)
        two.cards[:] = [one.card()]
        clock.advance(61)
        await until(lambda: two.trust.identity is not before)


async def test_the_authority_renews_itself_for_years(tmp_path: Path) -> None:
    clock = FakeClock()
    first = new_fleet("mini-1", clock.wall(), life_s=LIFE_S)
    async with running(tmp_path, first, clock) as node, Supervisor(clock) as tasks:
        start = clock.wall()
        faults = []

        async def watch() -> None:
            while True:
                faults.append(node.trust.identity.fault_at(clock.wall()))
                await asyncio.sleep(0)

        tasks.start("watch", watch)
        node.membership.start(tasks)
        await until(lambda: clock.wall() > start + 20 * LIFE_S)
        assert set(faults) == {""}
        assert node.trust.identity.is_authority
        assert node.trust.identity.not_after_at > start + 20 * LIFE_S
        await tasks.aclose()
        on_disk = await held(tmp_path)  # perhaps one ahead: written, not yet shown
        assert on_disk is not None
        assert on_disk.is_authority
        assert on_disk.not_after_at >= node.trust.identity.not_after_at


async def test_an_authority_whose_clock_was_wrong_comes_back_with_the_right_time(
    tmp_path: Path,
) -> None:
    """300 days ahead it renews itself, by a certificate that then begins in 298 days."""
    clock = SettableClock()
    first = new_fleet("mini-1", clock.wall(), life_s=LIFE_S)
    async with running(tmp_path, first, clock) as node:
        async with Supervisor(clock) as tasks:
            node.membership.start(tasks)
            before = node.trust.identity
            clock.shift_wall(300 * DAY_S)
            clock.advance(3600)
            await until(lambda: node.trust.identity is not before)
            clock.shift_wall(-300 * DAY_S)
            assert node.trust.identity.fault_at(clock.wall())
            clock.advance(3600)
            await until(lambda: not node.trust.identity.fault_at(clock.wall()))
            await tasks.aclose()
    on_disk = await held(tmp_path)
    assert on_disk is not None
    assert not on_disk.fault_at(clock.wall())


async def test_a_member_does_not_take_a_certificate_that_begins_in_months(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        authority = one.membership._authority
        assert authority is not None
        issue = authority.issue

        def issue_later(request: Request, *, role: CertRole, now: float) -> bytes:
            return issue(request, role=role, now=now + 300 * DAY_S)

        monkeypatch.setattr(authority, "issue", issue_later)
        before = two.trust.identity
        with pytest.raises(PeerProtocol, match=r"does not count at this machine's time"):
            await two.membership.renewal.renew()
        assert two.trust.identity is before


async def test_nobody_renews_for_somebody_else(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        stub = MembershipServiceStub(two.channels.get(one.address))
        for key in (new_key(), read_key(one.trust.identity.tls.key)):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Renew(pb.RenewRequest(csr=make_request(key, "mini-2")), timeout=5)
            assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "renews its own certificate only" in (failure.value.details() or "")
        for csr in (b"", b"rubbish"):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Renew(pb.RenewRequest(csr=csr), timeout=5)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_member_renews_for_nobody(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        stub = MembershipServiceStub(one.channels.get(two.address))
        csr = make_request(read_key(one.trust.identity.tls.key), "mini-1")
        with pytest.raises(grpc.aio.AioRpcError, match="not the authority"):
            await stub.Renew(pb.RenewRequest(csr=csr), timeout=5)
        two.cards[:] = [two.card(is_authority=True)]  # its own card is nobody to ask
        with pytest.raises(NotFound, match="no live node of the fleet holds its CA key"):
            await two.membership.renewal.renew()


async def test_a_removed_node_tells_its_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        one.membership.revoke("mini-2")
        assert two.trust.apply_revocations(one.trust.revocations[1])
        assert f"this node was removed from fleet {two.trust.identity.fleet}" in caplog.text


async def test_renewal_needs_the_callers_certificate(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        csr = make_request(read_key(two.trust.identity.tls.key), "mini-2")
        local = Caller(node_id="", role=None, address="ipv4:127.0.0.1:1")
        with pytest.raises(Denied, match="the caller is not known"):
            one.membership.certify(csr, local)


def test_pauses_grow_after_failures_but_ten_fit_in_what_is_left() -> None:
    identity = new_fleet("mini-1", 1e9, life_s=3 * 86_400)
    due = identity.renew_at
    assert pause_before_renewal(identity, due - 10, 5) == 10
    assert pause_before_renewal(identity, due - 1e5, 0) == 3600
    assert pause_before_renewal(identity, due, 0) == 0
    pauses = [pause_before_renewal(identity, due, failures) for failures in range(1, 10)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (60, 3600)
    assert pause_before_renewal(identity, identity.not_after_at - 100, 9) == pytest.approx(10)
    assert pause_before_renewal(identity, identity.not_after_at + 100, 9) == 3600


async def test_a_new_machine_is_told_where_members_are_the_inviter_first(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        one.cards.reverse()
        made = await one.membership.invite(CertRole.MEMBER)
        joined = await join(tmp_path / "3", made.token, "mini-3", clock=clock)
        assert joined.peers == (one.address, two.address)


# Revocation


async def test_a_revoked_member_is_refused_at_once_and_its_connection_closed(
    tmp_path: Path,
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two), Supervisor(clock) as tasks:
        one.membership.start(tasks)
        await two.membership.renewal.renew()
        card = two.card()
        assert one.trust.fault_of(card, clock.wall()) is None
        node_id, version = one.membership.revoke("mini-2")
        assert node_id == two.trust.identity.node_id
        assert one.trust.revocations[0] == version
        assert one.trust.fault_of(card, clock.wall()) is CardFault.REVOKED
        with pytest.raises(KakeyaError):
            await two.membership.renewal.renew()
        with pytest.raises(Denied, match="removed from"):  # on a connection of its own, too
            await two.membership.renewal.renew()
        path = one.home / FOLDER / REVOCATIONS
        await until(path.exists)
        again = await asyncio.to_thread(open_trust, one.home, one.trust.identity)
        assert again.is_revoked(node_id)


async def test_a_disk_that_cannot_be_written_costs_the_list_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two), Supervisor(clock) as tasks:
        folder = one.home / FOLDER
        aside = one.home / "aside"
        one.membership.start(tasks)
        await asyncio.to_thread(folder.rename, aside)
        one.membership.revoke("mini-2")
        await until(lambda: "list of revoked nodes not saved" in caplog.text)
        assert one.trust.is_revoked(two.trust.identity.node_id)
        await asyncio.to_thread(aside.rename, folder)
        clock.advance(31)
        await until((folder / REVOCATIONS).exists)


def membership_of(folder: Path, identity: Identity, cards: Sequence[Card]) -> Membership:
    return Membership(
        folder,
        FleetTrust(identity),
        cards=lambda: cards,
        hosts=lambda: ["127.0.0.1"],
        channels=Channels(),
        clock=SettableClock(),
        rng=random.Random(1),
    )


async def test_only_the_authority_invites_and_revokes_and_others_say_where(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        with pytest.raises(Denied, match=r"run `kakeya invite` on mini-1"):
            await two.membership.invite(CertRole.MEMBER)
        with pytest.raises(Denied, match=r"run `kakeya revoke mini-1` on mini-1"):
            two.membership.revoke("mini-1")
        with pytest.raises(Denied, match="does not revoke itself"):
            one.membership.revoke("mini-1")
        two.cards.clear()
        with pytest.raises(Denied, match="where `kakeya init` was run"):
            await two.membership.invite(CertRole.MEMBER)


async def test_a_node_is_named_by_label_id_or_the_start_of_its_id(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        node_id = two.trust.identity.node_id
        for named in ("mini-2", node_id, node_id[:8], node_id[:8].upper()):
            assert find_node(named, one.cards) == node_id
        with pytest.raises(NotFound, match=r"no live node is called 'mini-7'; known are mini-1"):
            one.membership.revoke("mini-7")
        with pytest.raises(NotFound):
            one.membership.revoke(node_id[:3])
        away = "a" * 51 + "q"
        assert one.membership.revoke(away)[0] == away
        one.cards.append(two.card())
        twin = authority_of(one.trust.identity)
        assert twin is not None
        other = FleetTrust(twin.new_identity("mini-2", now=clock.wall()))
        body = distributed_pb2.NodeCapability(node_id=other.identity.node_id, label="mini-2")
        one.cards.append(from_wire(other.seal(body.SerializeToString())))
        with pytest.raises(InvalidArgument, match="means 2 nodes"):
            one.membership.revoke("mini-2")


async def test_nobody_hides_behind_a_label(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (one, two):
        authority = authority_of(one.trust.identity)
        assert authority is not None
        victim = one.trust.identity.node_id
        for label in (victim, victim[:8]):
            trust = FleetTrust(authority.new_identity(label, now=clock.wall()))
            body = distributed_pb2.NodeCapability(node_id=trust.identity.node_id, label=label)
            cards = [two.card(), one.card(), from_wire(trust.seal(body.SerializeToString()))]
            assert find_node(victim, cards) == victim
        with pytest.raises(InvalidArgument, match="means 2 nodes"):
            find_node(victim[:8], cards)
