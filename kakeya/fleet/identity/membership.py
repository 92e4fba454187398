"""A node's membership while it runs: renewal of its certificate, and the duties of the authority.

every member    renews at two thirds of its certificate's life, at a node that has the CA key;
                keeps the list of revoked nodes on disk
the authority   renews itself and others, invites, revokes
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError, Denied
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.identity.authority import Authority, authority_of
from kakeya.fleet.identity.certificates import (
    LEAF_LIFE_S,
    authority_key,
    read_authority,
)
from kakeya.fleet.identity.identity import (
    FOLDER,
    REVOCATIONS,
    Identity,
)
from kakeya.fleet.identity.invite import VALID_S
from kakeya.fleet.identity.join_server import Invitation, JoinServer
from kakeya.fleet.identity.naming import find_node
from kakeya.fleet.identity.renewal import Renewal
from kakeya.fleet.identity.revocations import load_revocations, save_revocations
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.wire.channels import Channels
from kakeya.wire.security import Caller, CertRole, TlsMaterial

_log = logging.getLogger(__name__)
_SAVE_AGAIN_S = 30.0
INVITES = "invites.json"
"""The live invites of the authority, beside its key."""


def open_trust(data_dir: Path, identity: Identity) -> FleetTrust:
    """Return the trust of a node at its start: its identity and the list on disk.

    Raises ConfigError for a list that can neither be read nor set aside.
    """
    root = read_authority(identity.tls.authority)
    held = load_revocations(data_dir / FOLDER / REVOCATIONS, authority_key(root))
    return FleetTrust(identity, revocations=held)


class FleetSecurity:
    """`ChannelSecurity` of a member: the cards say which node is expected at an address.

    `node_at` gives the id of the live node at an address, "" where no node is known.
    """

    def __init__(self, trust: FleetTrust, node_at: Callable[[str], str]) -> None:
        self._trust = trust
        self._node_at = node_at

    def material(self) -> TlsMaterial:
        """The own key and certificate as of now."""
        return self._trust.material()

    def server_name(self, address: str) -> str:
        """The node id that is known at an address, else the name of any member."""
        return self._node_at(address) or self._trust.identity.member_name


class Membership:
    """One node's place in its fleet, from start to stop.

    `cards` gives the live cards, the own one among them, `route` where to call the node of a card;
    `hosts` are the own addresses, without ports, on which a new machine may join.
    """

    def __init__(
        self,
        data_dir: Path,
        trust: FleetTrust,
        *,
        cards: Callable[[], Sequence[Card]],
        hosts: Callable[[], Sequence[str]],
        channels: Channels,
        clock: Clock,
        rng: random.Random,
        route: Callable[[Card], str] = lambda card: card.grpc_address,
        life_s: float = LEAF_LIFE_S,
        join_port: int = 0,
    ) -> None:
        """`life_s` is that of the certificates which this node, as the authority, issues;
        `join_port` 0 = a free one."""
        self._data_dir = data_dir
        self._trust = trust
        self._cards = cards
        self._clock = clock
        self._route = route
        self._authority = authority_of(trust.identity, life_s=life_s)
        self._join_server = self._make_door(self._authority, hosts, join_port)
        self._renewal = Renewal(
            data_dir,
            trust,
            authorities=self._authorities,
            own_authority=self.certify if self._authority is not None else None,
            channels=channels,
            clock=clock,
            rng=rng,
        )
        self._path = data_dir / FOLDER / REVOCATIONS
        self._unsaved, self._saving = asyncio.Event(), asyncio.Lock()
        trust.subscribe(self._list_came)

    def _make_door(
        self, authority: Authority | None, hosts: Callable[[], Sequence[str]], port: int
    ) -> JoinServer | None:
        if authority is None:
            return None
        return JoinServer(
            authority,
            self._trust,
            hosts=hosts,
            peers=self._addresses,
            clock=self._clock,
            port=port,
            file=self._data_dir / FOLDER / INVITES,
        )

    @property
    def trust(self) -> FleetTrust:
        """The cards and callers that this node trusts."""
        return self._trust

    @property
    def renewal(self) -> Renewal:
        """The renewal of the certificate."""
        return self._renewal

    @property
    def join_server(self) -> JoinServer | None:
        """The server for joining machines; None on every node but the authority."""
        return self._join_server

    def start(self, supervisor: Supervisor) -> None:
        """Keep the certificate and the files up to date."""
        self._renewal.start(supervisor)
        supervisor.start("revocations", self._keep_saved)
        if self._join_server is not None:
            self._join_server.start(supervisor)

    async def aclose(self) -> None:
        """Close the join port. The background work ends with its supervisor."""
        if self._join_server is not None:
            await self._join_server.aclose()

    def _addresses(self) -> list[str]:
        """Addresses where a new machine finds members: this node's own, then others'."""
        found: list[str] = []
        for card in self._cards():
            if card.node_id == self._trust.identity.node_id:
                own = [card.grpc_address, *(endpoint.address for endpoint in card.endpoints)]
                found = own + found
            else:
                found.append(self._route(card))
        return [address for address in found if address]

    def _authorities(self) -> list[str]:
        return [
            self._route(card)
            for card in self._cards()
            if card.is_authority and card.node_id != self._trust.identity.node_id
        ]

    # --- commands of the owner

    async def invite(self, role: CertRole, valid_s: float = VALID_S) -> Invitation:
        """Let one machine join. Raises Denied on a node that is not the authority."""
        if self._join_server is None:
            raise self._not_here("invite")
        return await self._join_server.invite(role, valid_s)

    def revoke(self, node: str) -> tuple[str, int]:
        """Exclude a node from the fleet: an id, a unique prefix of one, or a label.

        Returns its id and the version of the list. Raises Denied on a node that is not the
        authority and for itself, NotFound, InvalidArgument when several nodes match.
        """
        if self._authority is None:
            raise self._not_here(f"revoke {node}")
        node_id = find_node(node, self._cards())
        if node_id == self._trust.identity.node_id:
            raise Denied(
                "this node is the fleet's authority and does not revoke itself: no node could "
                "renew a certificate after that"
            )
        made = self._trust.revoke(node_id, self._clock.wall())
        event(_log, "revoked", level=logging.WARNING, node_id=node_id, version=made.version)
        return node_id, made.version

    def _not_here(self, command: str) -> Denied:
        there = [card.label or card.node_id for card in self._cards() if card.is_authority]
        where = f"on {there[0]}" if there else "on the machine where `kakeya init` was run"
        return Denied(
            f"this node is not the authority of fleet {self._trust.identity.fleet}; run "
            f"`kakeya {command}` {where}"
        )

    def certify(self, csr: bytes, caller: Caller) -> bytes:
        """Certify a member's key again, as the authority. Raises Denied, InvalidArgument."""
        if self._authority is None:
            raise Denied(
                f"this node is not the authority of fleet {self._trust.identity.fleet}; renew at "
                "the node whose card says that it is"
            )
        wanted = self._authority.read(csr)
        if caller.role is None or wanted.node_id != caller.node_id:
            raise Denied(
                f"the request names the key of {wanted.node_id} and the caller is "
                f"{caller.node_id or 'not known'}; each member renews its own certificate only"
            )
        if self._trust.is_revoked(wanted.node_id):
            raise Denied(f"node {wanted.node_id} was revoked in this fleet")
        event(_log, "certificate of a member renewed", label=wanted.label, node_id=wanted.node_id)
        return self._authority.issue(wanted, role=caller.role, now=self._clock.wall())

    # The list of revoked nodes

    def _list_came(self, added: frozenset[str]) -> None:
        self._unsaved.set()
        identity = self._trust.identity
        if identity.node_id in added:
            event(
                _log,
                f"this node was removed from fleet {identity.fleet}; to come back, stop it and "
                "join with a new token (kakeya join TOKEN)",
                level=logging.ERROR,
            )

    async def save_revoked(self) -> None:
        """Return once the list is on disk, so that the owner can rely on the exclusion.

        Raises ConfigError when it cannot be written; the list is in force all the same.
        """
        try:
            await self._save()
        except OSError as problem:
            raise ConfigError(
                "the node is removed and the fleet hears of it, but the list cannot be written to "
                f"{self._path}: {problem.strerror or problem}; make room there, and do not stop "
                "this node before its log stops warning of it"
            ) from problem

    async def _save(self) -> None:
        async with self._saving:  # lest an older list end up on top
            await asyncio.to_thread(save_revocations, self._path, self._trust.revoked)

    async def _keep_saved(self) -> None:
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            try:
                await self._save()
            except OSError as problem:
                event(
                    _log,
                    "list of revoked nodes not saved",
                    level=logging.WARNING,
                    problem=problem,
                )
                self._unsaved.set()
                await self._clock.sleep(_SAVE_AGAIN_S)
