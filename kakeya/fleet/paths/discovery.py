"""Finds nodes of the same fleet on the local network by mDNS: `_kakeya._tcp`.

A node announces the first letters of its id, its port and its fleet's hash; nothing that a
stranger could use. An announcement is a hint to dial and neither liveness nor trust: any machine on
the network can announce anything, so all of it is bounded, and an address counts only if the policy
would dial it. Without multicast the node works on, with the addresses that the operator typed.

The library sends on in silence where the system refuses its packets, as macOS does to a program
without the permission for the local network. So a packet of our own is sent now and then, and its
errno is counted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import ipaddress
import logging
import os
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor
from kakeya.fleet.paths.addresses import AddressPolicy, Ip, Literal, dialable

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo

_log = logging.getLogger(__name__)
SERVICE = "_kakeya._tcp.local."
MAX_SIGHTINGS = 256
"""Instances that are kept: more nodes than one local network has; a flood replaces at random."""
MAX_ADDRESSES = 2
"""Most addresses of one instance, those on an own link first: one is enough, the card names all."""
_MAX_LOOKUPS = 64
_LOOKUPS_MS = (1500, 3000, 6000, 12_000)
"""How long each look at an announced name may take, one after the other. A Wi-Fi network loses some
of them, and zeroconf tells of a name again only when it has expired."""
_RETRY_S = 30.0
_LOOK_S = 600.0
"""Between two looks at whether multicast may be sent: a permission can be taken away."""
_PORT = 5353
_GROUPS = {socket.AF_INET: "224.0.0.251", socket.AF_INET6: "ff02::fb"}
_EMPTY_QUERY = bytes(12)
_GOODBYE_S = 2.0
_HOST_TTL_S = 120
# zeroconf keeps no name for less than 1125 s; a killed node's is then gone after 20 minutes.
_NAME_TTL_S = 1200
_NAME = re.compile(r"[a-z2-7]{8}-[0-9a-f]{4}\." + re.escape(SERVICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryStats:
    """Counts since the start; `is_running` false = no multicast, `sightings` as of now.

    `refusals` counts refused packets by errno; `is_silenced`: the last ones were refused on all
    own addresses, with `errno`.
    """

    is_running: bool = False
    sightings: int = 0
    appeared: int = 0
    vanished: int = 0
    ignored: int = 0
    failures: int = 0
    refusals: Mapping[int, int] = field(default_factory=dict)
    is_silenced: bool = False
    errno: int = 0


def mark_of(node_id: str) -> str:
    """The eight letters by which a node is announced: of an id bound to a key its first ones."""
    if re.fullmatch(r"[a-z2-7]{52}", node_id):
        return node_id[:8]
    return base64.b32encode(hashlib.sha256(node_id.encode()).digest()).decode().lower()[:8]


class Discovery:
    """Announces one node and keeps the addresses that others announce.

    `hosts` are the addresses to announce and to ask on, IPv6 with its zone where it needs one;
    `on_change` is called on the loop after the sightings changed, and must not wait.
    """

    def __init__(
        self,
        node_id: str,
        *,
        fleet: str,
        port: int,
        hosts: Sequence[str],
        policy: AddressPolicy,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[], None] | None = None,
        refusal: Callable[[str], int] | None = None,
    ) -> None:
        """`refusal` sends a packet from an address, and returns the errno; 0 = it was sent."""
        self._mark = mark_of(node_id)
        # Two processes with one id must both be seen: it is how the conflict comes to light.
        self._name = f"{self._mark}-{rng.getrandbits(16):04x}.{SERVICE}"
        self._fleet = fleet
        self._port = port
        self._hosts = tuple(hosts)
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._on_change = on_change or _nothing
        self._refusal = refusal or multicast_errno
        self._refusals: Counter[int] = Counter()
        self._silenced_by = 0
        self._seen: dict[str, tuple[str, ...]] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._has_warned = False
        self._is_running = False
        self._appeared = self._vanished = self._ignored = self._failures = 0

    def sightings(self) -> frozenset[str]:
        """Addresses of nodes of the same fleet, as announced and allowed by the policy."""
        return frozenset(address for found in self._seen.values() for address in found)

    @property
    def stats(self) -> DiscoveryStats:
        """Counts since the start."""
        return DiscoveryStats(
            is_running=self._is_running,
            sightings=len(self._seen),
            appeared=self._appeared,
            vanished=self._vanished,
            ignored=self._ignored,
            failures=self._failures,
            refusals=dict(self._refusals),
            is_silenced=bool(self._silenced_by),
            errno=self._silenced_by,
        )

    def update(self, *, hosts: Sequence[str], policy: AddressPolicy) -> None:
        """Announce and ask on other addresses: an interface came or went."""
        self._policy = policy
        if tuple(hosts) != self._hosts:
            self._hosts = tuple(hosts)
            self._changed.set()

    def start(self, supervisor: Supervisor) -> None:
        """Run under a supervisor."""
        supervisor.start("discovery", self.run)

    async def run(self) -> None:
        """Announce and listen for ever; cancelled, it says goodbye first."""
        while True:
            self._changed.clear()
            try:
                async with self._announced():
                    while not self._changed.is_set():
                        self._look_for_refusals()
                        pause_s = _RETRY_S if self._silenced_by else _LOOK_S
                        await self._clock.sleep(pause_s, self._changed)
            except (OSError, RuntimeError) as problem:
                self._is_running = False
                self._failures += 1
                self._warn_once(problem)
                await self._clock.sleep(_RETRY_S)

    def _look_for_refusals(self) -> None:
        numbers = [self._refusal(host) for host in self._hosts]
        self._refusals.update(number for number in numbers if number)
        was_silenced = bool(self._silenced_by)
        self._silenced_by = numbers[0] if numbers and all(numbers) else 0
        if self._silenced_by and not was_silenced:
            event(
                _log,
                "the system refuses to send multicast; nodes are not found by mDNS until it does "
                "(`kakeya doctor` says more)",
                level=logging.WARNING,
                errno=self._silenced_by,
                error=os.strerror(self._silenced_by),
            )
        elif was_silenced and not self._silenced_by:
            event(_log, "multicast is sent again")

    def _warn_once(self, problem: Exception) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        event(
            _log,
            "no discovery on this network; other nodes are found by --peer and by gossip",
            level=level,
            problem=problem,
            retry_s=_RETRY_S,
        )

    @contextlib.asynccontextmanager
    async def _announced(self) -> AsyncIterator[None]:
        # Imported here: a node on loopback has no use for it.
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        # One that vanished would fail all, and leave the library's sockets open.
        bare = [host.partition("%")[0] for host in self._hosts if _is_bindable(host)]
        if not bare:
            raise OSError(f"no interface has any of the addresses {', '.join(self._hosts) or '-'}")
        _quieten("zeroconf")
        kinds = {ipaddress.ip_address(host).version for host in bare}
        version = {
            frozenset({4}): IPVersion.V4Only,
            frozenset({6}): IPVersion.V6Only,
        }.get(frozenset(kinds), IPVersion.All)
        zeroconf = AsyncZeroconf(interfaces=[*bare], ip_version=version)
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._hear])
        try:
            # The name holds a random number, so the network is not asked whether it is free.
            await zeroconf.async_register_service(self._info(bare), cooperating_responders=True)
            self._is_running = True
            event(_log, "announced", name=self._name, hosts=",".join(self._hosts), port=self._port)
            yield
        finally:
            self._is_running = False
            for task in self._lookups.values():
                task.cancel()
            await asyncio.gather(*self._lookups.values(), return_exceptions=True)
            self._seen.clear()
            # Says goodbye; a network that is gone must not hold up the end.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await browser.async_cancel()
                    await zeroconf.async_close()

    def _info(self, hosts: Sequence[str]) -> AsyncServiceInfo:
        from zeroconf.asyncio import AsyncServiceInfo

        return AsyncServiceInfo(
            SERVICE,
            self._name,
            port=self._port,
            properties={"id": self._mark, "fleet": self._fleet},
            server=f"kakeya-{self._name.partition('.')[0]}.local.",
            parsed_addresses=list(hosts),
            host_ttl=_HOST_TTL_S,
            other_ttl=_NAME_TTL_S,
        )

    # --- announcements of others; called by zeroconf on the loop

    def _hear(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if name == self._name:
            return
        if not _NAME.fullmatch(name):
            self._ignored += 1
            return
        if state_change.name == "Removed":
            self._forget(name)
            return
        if name in self._lookups or len(self._lookups) >= _MAX_LOOKUPS:
            self._ignored += name not in self._lookups
            return
        task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, name))
        self._lookups[name] = task
        task.add_done_callback(lambda _: self._lookups.pop(name, None))

    async def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(SERVICE, name)
        for limit_ms in _LOOKUPS_MS:
            if await info.async_request(zeroconf, limit_ms):
                break
        else:
            self._ignored += 1
            return
        fleet = (info.properties or {}).get(b"fleet") or b""
        if fleet != self._fleet.encode():
            self._ignored += 1
            return
        ips: list[Ip] = []
        for text in info.parsed_scoped_addresses(IPVersion.All)[:16]:
            with contextlib.suppress(ValueError):
                ips.append(ipaddress.ip_address(text))
        self._keep(name, dialable(_written(ips, info.port or 0), self._policy, MAX_ADDRESSES))

    def _keep(self, name: str, addresses: tuple[str, ...]) -> None:
        if not addresses:
            self._ignored += 1
            self._forget(name)
        elif self._seen.get(name) != addresses:
            if name not in self._seen and len(self._seen) >= MAX_SIGHTINGS:
                del self._seen[self._rng.choice(list(self._seen))]
            self._appeared += name not in self._seen
            self._seen[name] = addresses
            event(_log, "sighted", name=name, addresses=",".join(addresses), level=logging.DEBUG)
            self._on_change()

    def _forget(self, name: str) -> None:
        task = self._lookups.get(name)
        if task is not None:
            task.cancel()
        if self._seen.pop(name, None) is not None:
            self._vanished += 1
            self._on_change()


def _written(ips: Sequence[Ip], port: int) -> tuple[str, ...]:
    literals = []
    for ip in ips:
        zone = ip.scope_id if isinstance(ip, ipaddress.IPv6Address) else None
        bare = ipaddress.ip_address(str(ip).partition("%")[0])
        literals.append(str(Literal(bare, port, zone or "")))
    return tuple(literals)


def multicast_errno(host: str) -> int:
    """Send an empty mDNS query from an address; return the errno of the refusal, 0 = it was sent.

    Receivers ignore a query that asks for nothing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.setblocking(False)
        try:
            own = socket.getaddrinfo(host, 0, family, socket.SOCK_DGRAM, 0, socket.AI_NUMERICHOST)
            address = own[0][4]
            trial.bind(address)
            if family is socket.AF_INET:
                link = socket.inet_aton(host)
                trial.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, link)
            trial.sendto(_EMPTY_QUERY, (_GROUPS[family], _PORT, *address[2:]))
        except OSError as refused:
            return refused.errno or errno.EINVAL
    return 0


def _is_bindable(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            numeric = socket.AI_NUMERICHOST
            trial.bind(socket.getaddrinfo(host, 0, family, socket.SOCK_DGRAM, 0, numeric)[0][4])
        except OSError:
            return False
    return True


def _nothing() -> None:
    return


class _Whisper(logging.Handler):
    """Hands a library's records on as debug lines, since strangers' packets cause them."""

    def emit(self, record: logging.LogRecord) -> None:
        event(_log, "mdns", level=logging.DEBUG, says=record.getMessage()[:500])


def _quieten(name: str) -> None:
    library = logging.getLogger(name)
    if library.propagate:
        library.propagate = False
        library.addHandler(_Whisper())
