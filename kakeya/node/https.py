"""HTTP of a node beyond its own machine: the certificate that it shows, from files or from the
fleet, kept true by a task; the keys that callers need, and the names by which they call it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError
from kakeya.core.figures import Figure
from kakeya.core.host import host_names
from kakeya.core.log import event
from kakeya.core.settings import is_loopback, split_address
from kakeya.core.tasks import Supervisor
from kakeya.fleet.identity.host_certificate import HostCertificate
from kakeya.fleet.identity.identity import CERTIFICATE, FOLDER, KEY
from kakeya.fleet.paths.binding import check_http
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.keys import KeyRing, read_keys
from kakeya.gateway.http.tls import ServerTls
from kakeya.node.fleet import NodeFleet
from kakeya.wire.server.config import ListenConfig

_log = logging.getLogger(__name__)
_LOOK_S = 30.0


async def check_http_start(listen: ListenConfig, data_dir: Path, *, has_identity: bool) -> None:
    """Raise ConfigError where HTTP would be open to other machines without keys or encryption, and
    StoreFailed for keys that cannot be read."""
    has_keys = bool(await asyncio.to_thread(read_keys, data_dir))
    check_http(listen, has_identity=has_identity, has_keys=has_keys)


class NodeHttps:
    """The certificate, the API keys and the names of one node. `tls` is None where the node speaks
    plain HTTP only: on loopback and on an open network, unless the owner gives a certificate."""

    def __init__(
        self,
        listen: ListenConfig,
        data_dir: Path,
        plane: NodeFleet,
        *,
        address: str,
        clock: Clock,
    ) -> None:
        """`address` is the bound one. Raises ConfigError for files that are no certificate."""
        self._clock, self._reach = clock, plane.reach
        ours = {split_address(one)[0] for one in (address, plane.reach.advertised)}
        self.hosts = host_names() | ours | set(listen.http_hosts)
        self.keys = KeyCheck(ring=KeyRing(data_dir, clock.mono), needed=listen.needs_key)
        self.tls: ServerTls | None = None
        self._own: HostCertificate | None = None
        is_open, membership = listen.insecure_lan, plane.membership
        if listen.http_cert is not None and listen.http_cert_key is not None:
            self.tls = ServerTls(listen.http_cert, listen.http_cert_key, is_plain_open=is_open)
        elif membership is not None and not is_open and not is_loopback(listen.http):
            self._own = HostCertificate(
                data_dir,
                membership.renewal,
                hosts=lambda: (*self.hosts, *self._reach.hosts),
                on_change=self._refresh,
                clock=clock,
            )
            folder = data_dir / FOLDER
            self.tls = ServerTls(
                self._own.path, folder / KEY, spare=folder / CERTIFICATE, is_plain_open=False
            )

    def start(self, supervisor: Supervisor) -> None:
        """Keep the certificate true; a new one counts from the next connection on."""
        if self._own is not None:
            supervisor.start("https certificate", self._own.run)
        elif self.tls is not None:
            supervisor.start("https certificate", self._follow)

    def figures(self) -> Iterator[Figure]:
        """The connections that ended before HTTP."""
        yield from self.tls.figures() if self.tls is not None else ()

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_S)
            await asyncio.to_thread(self._refresh)

    def _refresh(self) -> None:
        assert self.tls is not None
        try:
            self.tls.refresh()
        except ConfigError as problem:
            words = "the certificate of before is still shown"
            event(_log, words, level=logging.WARNING, problem=problem.message)
