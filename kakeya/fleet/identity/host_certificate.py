"""The certificate of a member for HTTPS: of the node's own key, with the names of its machine.

    <data>/identity/host-cert.pem

Clients of HTTPS check the name that they dialled, which no certificate of a member carries
otherwise. It is asked for at the fleet's authority: when the machine has new names, and at two
thirds of its life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.fleet.identity.certificates import BACKDATED_S, Untrusted, read_leaf
from kakeya.fleet.identity.hosts import hosts_of, local_hosts
from kakeya.fleet.identity.identity import FOLDER, RENEW_AFTER
from kakeya.fleet.identity.renewal import Renewal

_log = logging.getLogger(__name__)
HOST_CERTIFICATE = "host-cert.pem"
_LOOK_S = 30.0
_LONGEST_PAUSE_S = 600.0


class HostCertificate:
    """Keeps the file of the certificate true.

    `hosts` gives the present names and addresses of the machine; `on_change` is called, in a
    thread, when the file has changed.
    """

    def __init__(
        self,
        data_dir: Path,
        renewal: Renewal,
        *,
        hosts: Callable[[], Iterable[str]],
        on_change: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.path = data_dir / FOLDER / HOST_CERTIFICATE
        self._renewal = renewal
        self._hosts = hosts
        self._on_change = on_change
        self._clock = clock

    async def run(self) -> None:
        """Look for new names for ever; a failed try is repeated, later each time."""
        failures = 0
        while True:
            failures = 0 if await self.keep() else failures + 1
            await self._clock.sleep(min(_LOOK_S * 2 ** min(failures, 5), _LONGEST_PAUSE_S))

    async def keep(self) -> bool:
        """Get a new certificate if one is needed; whether the present one is good then."""
        wanted = frozenset(local_hosts(self._hosts()))
        if await asyncio.to_thread(self._is_good, wanted):
            return True
        try:
            certificate = await self._renewal.certify_hosts(sorted(wanted))
            await asyncio.to_thread(write_atomically, self.path, certificate)
        except (KakeyaError, Untrusted, OSError) as failure:
            event(
                _log,
                "no certificate for HTTPS with the names of this machine; is the fleet's "
                "authority reached?",
                level=logging.WARNING,
                problem=failure,
            )
            return False
        await asyncio.to_thread(self._on_change)
        is_good = await asyncio.to_thread(self._is_good, wanted)
        event(
            _log,
            "certificate for HTTPS made"
            if is_good
            else "the fleet's authority runs a version that certifies no names; update it",
            level=logging.INFO if is_good else logging.WARNING,
            hosts=", ".join(sorted(wanted)),
        )
        return is_good

    def _is_good(self, wanted: frozenset[str]) -> bool:
        """Whether the certificate has these names, and a third of its life or more is left."""
        try:
            leaf = read_leaf(self.path.read_bytes())
            found = hosts_of(leaf.extensions)
        except (OSError, Untrusted, ValueError):
            return False
        begins_at = leaf.not_valid_before_utc.timestamp()
        made_at = begins_at + BACKDATED_S
        due_at = made_at + RENEW_AFTER * (leaf.not_valid_after_utc.timestamp() - made_at)
        return wanted <= set(found) and begins_at <= self._clock.wall() < due_at
