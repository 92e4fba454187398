"""The server for joining machines, on a port of its own that is open only while an invite lives.

The port is plain, because a joiner holds no certificate yet; `invite.py` says why that is safe. A
stranger can only send a few KiB here and have one HMAC per invite computed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError, InvalidArgument, KakeyaError
from kakeya.core.files import write_atomically
from kakeya.core.host import join_address
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.core.units import KIB
from kakeya.fleet.identity.authority import Authority
from kakeya.fleet.identity.invite import (
    CA_HASH_BYTES,
    MAX_ADDRESSES,
    VALID_S,
    Invites,
    InviteStats,
    Moment,
    Token,
    encode_token,
    proof_of_answer,
)
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.v1 import fleet_pb2 as pb
from kakeya.wire.channels import Keepalive, message_options
from kakeya.wire.security import CertRole
from kakeya.wire.server.connections import surplus
from kakeya.wire.server.sockets import accepted, hang_up
from kakeya.wire.status import abort

_log = logging.getLogger(__name__)
SERVICE_NAME = "kakeya.v1.JoinService"
_MAX_REQUEST_BYTES = 16 * KIB
_MAX_PEERS = 16
_MAX_OF_ONE_HOST = 16
"""Most connections at a time; a machine joins with one."""
_LOOK_EVERY_S = 2.0
_TELL_EVERY_S = 1.0
Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A token as one word, with the data of its invite."""

    token: str = field(repr=False)
    expires_at: float


class JoinServer:
    """Invites, and the listener that serves them. `aclose` shuts it at once.

    `hosts` are the addresses, without ports, under which this machine is to be joined; `peers` are
    members to gossip with first.
    """

    def __init__(
        self,
        authority: Authority,
        trust: FleetTrust,
        *,
        hosts: Callable[[], Sequence[str]],
        peers: Callable[[], Sequence[str]],
        clock: Clock,
        port: int = 0,
        file: Path | None = None,
    ) -> None:
        """`port` 0 = a free port, chosen by the system at each opening; `file` keeps live invites
        over a restart, None = they end with this process."""
        self._file = file
        self._saving = asyncio.Lock()
        self._authority = authority
        self._trust = trust
        self._hosts = hosts
        self._peers = peers
        self._clock = clock
        self._port = port
        self._invites = Invites(authority, is_revoked=trust.is_revoked)
        self._server: grpc.aio.Server | None = None
        self._addresses: tuple[str, ...] = ()
        self._opened = asyncio.Event()
        self._turn = asyncio.Lock()
        self._told_mono = -math.inf

    @property
    def stats(self) -> InviteStats:
        """Counts since the start."""
        return self._invites.stats

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses where the port is open now; empty = closed."""
        return self._addresses

    def start(self, supervisor: Supervisor) -> None:
        """Begin to close the port when the last invite ends, and to limit connections."""
        supervisor.start("join server", self._shut_in_time)
        supervisor.start("join connections", self._thin_out)

    async def invite(self, role: CertRole, valid_s: float = VALID_S) -> Invitation:
        """Make an invite and open the port for it.

        Raises ConfigError when no address can be opened, InvalidArgument, Refused.
        """
        async with self._turn:
            if self._server is None:
                await self._open([join_address(host, self._port) for host in self._hosts()])
            invite = self._invites.make(role, valid_s=valid_s, now=self._now())
            self._opened.set()
            await self._save()
            expires_at = invite.ends.wall
            token = Token(
                addresses=self._addresses,
                ca_hash=self._authority.key_hash[:CA_HASH_BYTES],
                secret=invite.secret,
                expires_at=expires_at,
            )
        event(_log, "invite made", role=role, valid_s=valid_s, addresses=",".join(self._addresses))
        return Invitation(token=encode_token(token), expires_at=expires_at)

    async def aclose(self) -> None:
        """Close the port, even while invites live."""
        async with self._turn:
            await self._shut()

    async def _open(self, wanted: Sequence[str]) -> None:
        options = dict(Keepalive().server_options() + message_options(_MAX_REQUEST_BYTES))
        options |= {
            "grpc.max_concurrent_streams": 8,
            "grpc.server_handshake_timeout_ms": 5000,
            "grpc.max_connection_idle_ms": 30_000,
        }
        server = grpc.aio.server(options=tuple(options.items()))
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Join": grpc.unary_unary_rpc_method_handler(self._join)
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )
        self._addresses = _bind(server, wanted[:MAX_ADDRESSES])
        await server.start()
        self._server = server
        event(_log, "join port open", addresses=",".join(self._addresses))

    async def _shut(self) -> None:
        server, self._server = self._server, None
        self._opened.clear()
        if server is not None:
            try:
                await server.stop(None)
            finally:
                self._addresses = ()
            event(_log, "join port closed")

    async def _restore(self) -> None:
        """Go on with the invites of an earlier run, at the addresses that its tokens name."""
        if self._file is None or self._server is not None:
            return
        try:
            told = json.loads(await asyncio.to_thread(self._file.read_bytes))
            self._invites.restore(told["invites"], self._now())
            if self._invites.left_s(self._now()):
                await self._open([str(address) for address in told["addresses"]])
                self._opened.set()
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as fault:
            why = "earlier invites cannot be used; make new ones"
            event(_log, why, level=logging.WARNING, file=self._file, fault=fault)

    async def _save(self) -> None:
        """Keep the invites on disk; where that fails, they end with this process."""
        if self._file is None:
            return
        try:
            async with self._saving:  # the latest state last
                told = {"addresses": self._addresses, "invites": self._invites.as_json()}
                await asyncio.to_thread(write_atomically, self._file, json.dumps(told).encode())
        except OSError as fault:
            event(_log, "invites not saved", level=logging.WARNING, file=self._file, fault=fault)

    async def _shut_in_time(self) -> None:
        async with self._turn:
            await self._restore()
        while True:
            await self._opened.wait()
            left_s = self._invites.left_s(self._now())
            if left_s > 0:
                # In short steps: a sleep of the machine does not count as time of this sleep.
                await self._clock.sleep(min(left_s, _LOOK_EVERY_S))
                continue
            async with self._turn:
                if not self._invites.left_s(self._now()):
                    await self._shut()

    def _now(self) -> Moment:
        return Moment(self._clock.mono(), self._clock.wall())

    async def _thin_out(self) -> None:
        """Close idle connections of strangers before they use up the files of this process."""
        while True:
            await self._opened.wait()
            await self._clock.sleep(_LOOK_EVERY_S)
            ports = {int(address.rpartition(":")[2]) for address in self._addresses}
            crowd = surplus(await asyncio.to_thread(accepted, ports), (), _MAX_OF_ONE_HOST)
            if crowd:
                closed = await asyncio.to_thread(hang_up, frozenset(crowd))
                event(
                    _log,
                    "closed connections to the join port of hosts that hold too many",
                    level=logging.WARNING,
                    closed=closed,
                    first=crowd[0],
                )

    async def _join(self, request: bytes, context: Context) -> bytes:
        try:
            answer = self._admit(request, context.peer()).SerializeToString()
        except KakeyaError as refusal:
            self._tell_of(refusal, context.peer())
            await abort(context, refusal)
            raise
        await self._save()  # first: a token that was used must not be new after a crash
        return answer

    def _tell_of(self, refusal: KakeyaError, peer: str) -> None:
        # A stranger with many tokens must not fill the disk with log lines; `stats` count all.
        mono = self._clock.mono()
        if mono - self._told_mono < _TELL_EVERY_S:
            return
        self._told_mono = mono
        event(
            _log,
            "refused to join",
            level=logging.WARNING,
            peer=peer,
            reason=refusal.message,
            wrong_proofs=self.stats.wrong_proofs,
            refused=self.stats.refused,
        )

    def _admit(self, request: bytes, peer: str) -> pb.JoinResponse:
        """Decide and answer without an await, so that no second joiner comes between."""
        try:
            asked = pb.JoinRequest.FromString(request)
        except DecodeError as problem:
            raise InvalidArgument("the request to join cannot be read") from problem
        invite, wanted = self._invites.admit(asked.csr, asked.proof, now=self._now())
        certificate = self._authority.issue(wanted, role=invite.role, now=self._clock.wall())
        peers = tuple(dict.fromkeys(self._peers()))[:_MAX_PEERS]
        _, revocations = self._trust.revocations
        proof = proof_of_answer(
            invite.secret,
            csr=asked.csr,
            certificate=certificate,
            authority=self._authority.certificate,
            peers=peers,
            revocations=revocations,
        )
        event(
            _log,
            "joined",
            label=wanted.label,
            node_id=wanted.node_id,
            role=invite.role,
            peer=peer,
        )
        return pb.JoinResponse(
            certificate=certificate,
            authority=self._authority.certificate,
            proof=proof,
            peers=peers,
            revocations=revocations,
        )


def _bind(server: grpc.aio.Server, wanted: Sequence[str]) -> tuple[str, ...]:
    """The addresses of those wanted that could be opened, with their ports."""
    bound = []
    for address in wanted:
        host = address.rpartition(":")[0]
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:  # gRPC says no more than that it failed
            event(_log, "the join port cannot be opened", level=logging.WARNING, address=address)
        else:
            bound.append(f"{host}:{port}")
    if not bound:
        raise ConfigError(
            "no address of this machine can take a join port; start the node with --bind and an "
            "address that the new machine reaches, or with another --join-port"
        )
    return tuple(bound)
