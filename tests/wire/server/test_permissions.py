"""The walk: every method of every service against the table, over real TLS, by eight callers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio
import pytest

from kakeya.wire.security import CertRole
from kakeya.wire.server.permissions import PERMISSIONS
from tests.wire.certificates import EXPIRED, Fleet
from tests.wire.servers import Served, call, dial, listening, methods, path

OK = grpc.StatusCode.OK
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNREACHED = grpc.StatusCode.UNAVAILABLE
"""How a handshake ends that the server refuses."""
STRANGERS = ("no certificate", "foreign fleet", "expired")
KINDS = (*STRANGERS, "client", "member", "admin", "revoked", "loopback")
MEMBER, CLIENT, ADMIN = "member", "client", "admin"

# Written out a second time, by what a reader of the security model expects, not by the table.
ALLOWED: dict[str, set[str]] = {
    "kakeya.v1.CapabilityService": {MEMBER, "loopback"},
    "kakeya.v1.CapabilityService/GetNodeCapability": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.GossipService": {MEMBER, "loopback"},
    "kakeya.v1.GossipService/Probe": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.ProposerService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.DraftStreamService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.PrefillCacheService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.PrefillWorkerService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.DFlashProposerService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.MembershipService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.DoctorService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.ServingService/HoldAnswer": {MEMBER, "loopback"},
    "kakeya.v1.ServingService/FindAnswer": {MEMBER, "loopback"},
    "kakeya.v1.SessionMoveService": {MEMBER, "loopback"},
    "kakeya.v1.RingService": {MEMBER, "loopback"},
    "kakeya.v1.ServingService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.WeightsService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.RelayService": {MEMBER, ADMIN, "loopback"},
    "kakeya.v1.RuntimeService": {CLIENT, ADMIN, "loopback"},
    "kakeya.v1.PrecacheService/Wipe": {ADMIN},
    "kakeya.v1.PrecacheService": {CLIENT, ADMIN, "loopback"},
    "kakeya.v1.ControlService": {ADMIN},
    "kakeya.v1.AdapterService": {ADMIN},
    "kakeya.v1.ModelFilesService": {ADMIN},
    "kakeya.v1.JoinService": set(),
    "kakeya.v1.EngineService": set(),
    "kakeya.v1.FleetService": {MEMBER, CLIENT, ADMIN, "loopback"},
    "grpc.health.v1.Health": {MEMBER, CLIENT, ADMIN, "loopback"},
}


def expected(method: str, kind: str) -> grpc.StatusCode:
    if kind in STRANGERS:
        return UNREACHED
    full = method.removeprefix("/")
    allowed = ALLOWED.get(full, ALLOWED[full.partition("/")[0]])
    return OK if kind in allowed else DENIED


@asynccontextmanager
async def caller(kind: str, fleet: Fleet, node: Served) -> AsyncIterator[grpc.aio.Channel]:
    name = fleet.any_member
    material = None
    match kind:
        case "no certificate":
            pass
        case "foreign fleet":
            _, material = Fleet().issue()
        case "expired":
            _, material = fleet.issue(age=EXPIRED)
        case "revoked":
            node_id, material = fleet.issue()
            fleet.revoke(node_id)
        case "loopback":
            pass
        case role:
            _, material = fleet.issue(CertRole(role))
    channel = (
        grpc.aio.insecure_channel(node.plain)
        if kind == "loopback"
        else dial(node.tls, material, name, root=fleet.pem)
    )
    async with channel:
        yield channel


def test_the_table_names_every_method_and_no_other() -> None:
    assert set(PERMISSIONS) == {path(method) for method in methods()}


async def test_every_method_obeys_the_table_for_every_kind_of_caller() -> None:
    fleet = Fleet()
    deviations = []
    async with listening(fleet) as node, AsyncExitStack() as stack:
        for kind in KINDS:
            channel = await stack.enter_async_context(caller(kind, fleet, node))
            for method in methods():
                reached = node.stand_ins.calls.total()
                wanted = expected(path(method), kind)
                status = await call(channel, method)
                was_reached = node.stand_ins.calls.total() > reached
                if status is RESOURCE_EXHAUSTED or status is not wanted:
                    deviations.append(f"{kind} {path(method)}: {status}, expected {wanted}")
                if was_reached is not (wanted is OK):
                    deviations.append(f"{kind} {path(method)}: handler reached {was_reached}")
    assert deviations == []


RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", ["member", "loopback"])
async def test_handlers_see_who_calls(kind: str) -> None:
    fleet = Fleet()
    async with listening(fleet) as node, caller(kind, fleet, node) as channel:
        (method,) = (m for m in methods() if path(m).endswith("/GetNodeCapability"))
        assert await call(channel, method) is OK
        (seen,) = node.stand_ins.callers
        assert seen.role == (CertRole.MEMBER if kind == "member" else None)
        assert seen.address.startswith("ipv4:127.0.0.1:")
        assert (len(seen.node_id) == 52) is (kind == "member")
