"""Choose the gRPC addresses of a node from the flag, the identity and the interfaces, and decide
whether HTTP may be reached from other machines. Pure.

no identity      what --bind says, plain; beyond loopback only with --insecure-lan
an identity      each address of the local networks, encrypted, and loopback for this machine's
                 own programs; --bind HOST:PORT narrows it to one address, loopback to none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.errors import ConfigError
from kakeya.core.host import join_address
from kakeya.core.settings import is_loopback, split_address
from kakeya.fleet.paths.interfaces import Interface, choose_listeners
from kakeya.wire.server.config import ListenConfig

DEFAULT_PORT = 50051
_LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Hosts to listen on with one port; 0 = the system chooses it for the first host.

    `network` hosts come first, and loopback does with `follows_interfaces`, where the network hosts
    change when cables do. `is_encrypted` holds for network hosts, loopback is plain.
    """

    port: int
    network: tuple[str, ...] = ()
    loopback: str = ""
    is_encrypted: bool = False
    follows_interfaces: bool = False


def choose_binding(
    bind: str,
    *,
    has_identity: bool,
    insecure_lan: bool,
    interfaces: Sequence[Interface],
) -> Binding:
    """Return the hosts that `--bind` means on this machine; "" = not given.

    Raises ConfigError for an address beyond loopback that is neither encrypted nor allowed.
    """
    host, port = split_address(bind) if bind else ("", DEFAULT_PORT)
    if host and is_loopback(bind):
        return Binding(port=port, loopback=host)
    if has_identity:
        follows = not host or host in _EVERYWHERE
        hosts = tuple(i.host for i in choose_listeners(interfaces)) if follows else (host,)
        return Binding(
            port=port,
            network=hosts,
            loopback=_LOOPBACK,
            is_encrypted=True,
            follows_interfaces=follows,
        )
    if not host:
        return Binding(port=port, loopback=_LOOPBACK)
    if not insecure_lan:
        raise ConfigError(
            f"--bind {bind} is reachable from other machines and this node has no identity; "
            "make one with kakeya init or --join TOKEN, add --insecure-lan on a trusted "
            f"network, or bind {join_address(_LOOPBACK, port)}"
        )
    return Binding(port=port, network=(host,))


def check_http(listen: ListenConfig, *, has_identity: bool, has_keys: bool) -> None:
    """Raise ConfigError where HTTP would be reached without encryption or without keys."""
    if is_loopback(listen.http) or listen.insecure_lan:
        return
    ways = "add --insecure-lan on a trusted network, or bind 127.0.0.1"
    if not has_identity and listen.http_cert is None:
        raise ConfigError(
            f"--http {listen.http} is reachable from other machines and this node has no "
            "certificate; make a fleet with kakeya init or --join TOKEN, give --http-cert and "
            f"--http-cert-key, {ways}"
        )
    if not has_keys:
        raise ConfigError(
            f"--http {listen.http} is reachable from other machines and no caller has an API key; "
            f"make one with kakeya key add NAME, {ways}"
        )
