"""Renewing certificates: the own one at two thirds of its life and, as the authority, others'.

A node asks a live node with a card that claims the CA key. A card may lie, so an answer counts only
when it is the fleet's certificate for exactly this key; else the next node is asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound, PeerProtocol
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.fleet.identity.certificates import Untrusted, make_request, read_key
from kakeya.fleet.identity.identity import (
    Identity,
    duration,
    identity_of,
    renewed,
    save_certificate,
)
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import MembershipServiceServicer, MembershipServiceStub
from kakeya.wire.channels import Channels
from kakeya.wire.security import Caller
from kakeya.wire.status import abort, error_from_rpc

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_LOOK_S = 3600.0
"""Longest wait between two looks at the clock, which may have been set meanwhile."""
Context = grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewResponse]
Certify = Callable[[bytes, Caller], bytes]
"""Makes the certificate (PEM) for a request (DER), or refuses its caller."""


class Renewal:
    """Keeps one node's certificate from running out, without a restart.

    `authorities` gives the addresses of live nodes that claim the CA key; `own_authority` certifies
    on the node that holds it.
    """

    def __init__(
        self,
        data_dir: Path,
        trust: FleetTrust,
        *,
        authorities: Callable[[], Sequence[str]],
        own_authority: Certify | None,
        channels: Channels,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._data_dir = data_dir
        self._trust = trust
        self._authorities = authorities
        self._own_authority = own_authority
        self._channels = channels
        self._clock = clock
        self._rng = rng

    def start(self, supervisor: Supervisor) -> None:
        """Begin to renew in time."""
        supervisor.start("certificate", self._run)

    async def renew(self) -> Identity:
        """Renew now. Raises the error of the last node that was asked, OSError from the disk."""
        identity = self._trust.identity
        csr = make_request(read_key(identity.tls.key), identity.label)
        new = await self._ask(csr, lambda made: renewed(identity, made, self._clock.wall()))
        await asyncio.to_thread(save_certificate, self._data_dir, new)
        self._trust.adopt(new)
        left = duration(new.not_after_at - self._clock.wall())
        event(_log, "own certificate renewed", valid_for=left)
        return new

    async def certify_hosts(self, hosts: Iterable[str]) -> bytes:
        """Get a certificate (PEM) of the own key for HTTPS, with names of this machine.

        Raises as `renew`, but for OSError.
        """
        identity = self._trust.identity
        key = read_key(identity.tls.key)
        csr = make_request(key, identity.label, hosts)
        new = await self._ask(csr, lambda made: identity_of(key, made, identity.tls.authority))
        return new.tls.certificate

    async def _ask(self, csr: bytes, read: Callable[[bytes], Identity]) -> Identity:
        """Ask for a certificate; `read` raises Untrusted for one that is of no use."""
        if self._own_authority is not None:
            identity = self._trust.identity
            own = Caller(node_id=identity.node_id, role=identity.role, address="")
            return read(self._own_authority(csr, own))
        addresses = list(self._authorities())
        self._rng.shuffle(addresses)
        failure: KakeyaError = NotFound("no live node of the fleet holds its CA key")
        for address in addresses:
            stub = MembershipServiceStub(self._channels.get(address))
            try:
                answer = await stub.Renew(pb.RenewRequest(csr=csr), timeout=_TIMEOUT_S)
                return read(answer.certificate)
            except grpc.aio.AioRpcError as refusal:
                failure = error_from_rpc(refusal, address)
            except Untrusted as problem:
                failure = PeerProtocol(f"{address} issued no usable certificate: {problem}")
        raise failure

    async def _run(self) -> None:
        failures = 0
        while True:
            now = self._clock.wall()
            pause_s = pause_before_renewal(self._trust.identity, now, failures)
            await self._clock.sleep(pause_s)
            if not is_renewal_due(self._trust.identity, self._clock.wall()):
                continue
            try:
                await self.renew()
                failures = 0
            except (KakeyaError, Untrusted, OSError) as failure:
                failures += 1
                self._warn(failure)

    def _warn(self, failure: Exception) -> None:
        identity, now = self._trust.identity, self._clock.wall()
        fault = identity.fault_at(now)
        left = duration(max(0.0, identity.not_after_at - now))
        event(
            _log,
            fault or f"certificate not renewed; it ends in {left}",
            level=logging.ERROR if fault else logging.WARNING,
            problem=failure,
        )


def is_renewal_due(identity: Identity, now: float) -> bool:
    """Whether a new certificate is needed.

    An authority with a clock months ahead may have issued itself a certificate that begins in
    months, which excludes it from its own fleet. It alone can repair that without a peer.
    """
    return now >= identity.renew_at or (identity.is_authority and now < identity.not_before_at)


def pause_before_renewal(identity: Identity, now: float, failures: int) -> float:
    """Seconds until the next look: to the renewal, or after a failed one; 0 = try now.

    Pauses after failures grow up to an hour, but ten tries fit in the rest of the life.
    """
    if not is_renewal_due(identity, now):
        return min(identity.renew_at - now, _LOOK_S)
    if failures == 0:
        return 0.0
    left_s = max(identity.not_after_at - now, 0.0)
    backoff_s = min(60.0 * 2 ** min(failures - 1, 6), _LOOK_S)
    return max(1.0, min(backoff_s, left_s / 10) if left_s else _LOOK_S)


class MembershipService(MembershipServiceServicer):
    """Renews certificates; `caller` gives the certificate holder of the present call."""

    def __init__(self, certify: Certify, *, caller: Callable[[], Caller]) -> None:
        self._certify = certify
        self._caller = caller

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Certify the caller's key for another life."""
        try:
            certificate = self._certify(request.csr, self._caller())
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.RenewResponse(certificate=certificate)
