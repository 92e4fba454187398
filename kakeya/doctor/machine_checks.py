"""Judge this machine: sleep, disk, files, ports, arithmetic, networks. Pure."""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.hints import INSTALL_OPENBLAS
from kakeya.core.units import GIB, MIB, format_bytes
from kakeya.doctor.mends import (
    LOCAL_NETWORK,
    OPEN_LOCAL_NETWORK,
    is_mac,
    show_link,
    show_listener,
    show_route,
)
from kakeya.doctor.report import Finding, fault, ok, shell, warning
from kakeya.fleet.paths.discovery import DiscoveryStats
from kakeya.fleet.paths.interfaces import Interface
from kakeya.fleet.placement.ring import RingEnvironment
from kakeya.generation.spec import EMBEDDED_FOLDER

SELF_TEST = ("-m", "kakeya.mlx.selftest", str(EMBEDDED_FOLDER / "kakeya-tiny-draft"))
"""What Python is given to test mlx."""
DISK_WARNING_BYTES = GIB
DISK_FAULT_BYTES = 64 * MIB
"""With less room, the node's own small files cannot be written safely."""
_PMSET_ROW = re.compile(r"^\s+(\w[\w ]*?)\s+(\d+)(?:\s+\(.*\))?\s*$", re.MULTILINE)
_HELD_AWAKE = re.compile(
    r"^\s+sleep\s+\d+\s+\(sleep prevented by [^)]*\bcaffeinate\b", re.MULTILINE
)
_PRIVATE = 0o077
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""Variables that lead programs to a proxy, in either case."""
_PROXIES_OF_HTTP = ("http_proxy", "all_proxy")
_MDNS = "224.0.0.251"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The child's report on mlx; `error` "" = it is whole. `is_unfinished`: it took too long."""

    mlx: str = ""
    device: str = ""
    has_blas: bool = False
    is_same: bool = False
    """Whether two rows at once differ from each alone by rounding at most, as an engine asks."""
    share_off: float = 0.0
    """The largest difference, as a share of the largest logit."""
    error: str = ""
    is_unfinished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """One file or folder of the data directory."""

    path: Path
    mode: int
    uid: int


# --- sleep


def parse_pmset(text: str) -> dict[str, int]:
    """Read the current settings from the output of `pmset -g`, those of the whole system too;
    `caffeinate` 1 = that program keeps the machine awake, as a node has it do."""
    system, _, in_use = text.partition("Currently in use:")
    found = {name: int(value) for name, value in _PMSET_ROW.findall(system + "\n" + in_use)}
    return found | {"caffeinate": int(_HELD_AWAKE.search(in_use) is not None)}


def check_sleep(settings: Mapping[str, int]) -> Finding:
    """Judge a Mac's power settings, as `parse_pmset` reads them: a node must not sleep, and has to
    come back after a power cut."""
    if "sleep" not in settings:
        return warning("sleep", "pmset did not tell the power settings", "pmset -g")
    minutes = settings["sleep"]
    is_held = settings.get("SleepDisabled", 0) or settings.get("caffeinate", 0)
    wrong, change = [], []
    if minutes and not is_held:
        wrong.append(f"this Mac sleeps after {minutes} min without a user, and its models with it")
        change += ["sleep", "0"]
        if not settings.get("womp", 1):
            wrong.append("the network does not wake it")
            change += ["womp", "1"]
        if settings.get("powernap", 0):
            wrong.append("power nap makes it appear and vanish meanwhile")
            change += ["powernap", "0"]
    if settings.get("disksleep", 0):
        wrong.append(f"its disk sleeps after {settings['disksleep']} min")
        change += ["disksleep", "0"]
    if not settings.get("autorestart", 1):
        wrong.append("it stays off after a power cut")
        change += ["autorestart", "1"]
    if not wrong:
        return ok("sleep", "this Mac stays awake" + (" while a node runs" * bool(minutes)))
    return warning("sleep", "; ".join(wrong), shell("sudo", "pmset", "-a", *change))


# --- files


def check_disk(free_bytes: int, folder: Path) -> Finding:
    """Judge the room on the disk of the data directory."""
    room = f"{format_bytes(free_bytes)} free for {folder}"
    largest = "du -xh -d 2 ~ | sort -h | tail -20"
    if free_bytes < DISK_FAULT_BYTES:
        return fault("disk", f"only {room}: the node cannot keep its state safely", largest)
    if free_bytes < DISK_WARNING_BYTES:
        return warning("disk", f"only {room}: no model can be downloaded", largest)
    return ok("disk", room)


def check_files(facts: Sequence[FileFact], folder: Path, uid: int) -> Finding:
    """Judge whether only this user can read the data directory and its secrets."""
    if not facts:
        return ok("files", f"no node ran in {folder} yet")
    foreign = [fact for fact in facts if fact.uid != uid]
    if foreign:
        detail = f"{foreign[0].path} belongs to user {foreign[0].uid}, and this is user {uid}"
        return fault("files", detail, shell("sudo", "chown", "-R", str(uid), str(folder)))
    open_ones = [fact for fact in facts if fact.mode & _PRIVATE]
    if not open_ones:
        return ok("files", f"{folder} is open to its owner alone")
    worst = max(open_ones, key=lambda fact: (fact.path.name.endswith("key.pem"), fact.path.name))
    detail = f"other users can use {worst.path} (mode {worst.mode & 0o777:o})"
    command = shell("chmod", "-R", "go-rwx", str(folder))
    if worst.path.name.endswith("key.pem"):
        return fault("files", f"{detail}, a private key", command)
    return warning("files", detail, command)


def check_port(flag: str, address: str, number: int) -> Finding:
    """Judge whether a node could listen on an address; `number` is the errno, 0 = it could."""
    what = f"port {address}"
    port = address.rpartition(":")[2]
    match number:
        case 0:
            return ok(what, "free")
        case errno.EADDRINUSE:
            detail = f"another program listens there; end it, or start the node with {flag}"
            return fault(what, detail, show_listener(port))
        case errno.EADDRNOTAVAIL:
            detail = "no interface of this machine has that address"
            return fault(what, detail, shell("kakeya-node", flag, f"127.0.0.1:{port}"))
        case _:
            detail = f"the system refuses it (errno {number}); ports below 1024 need root"
            return fault(what, detail, shell("kakeya-node", flag, "127.0.0.1:0"))


# --- arithmetic


def check_blas(test: SelfTest, platform: str) -> Finding | None:
    """Judge whether mlx multiplies fast on a CPU; None if that is unknown."""
    if test.error:
        return None
    if is_mac(platform):
        return ok("blas", "Accelerate")
    if test.has_blas:
        return ok("blas", "OpenBLAS")
    detail = "OpenBLAS is missing: prompts are read 10 to 40 times slower than they could be"
    return warning("blas", detail, f"sudo {INSTALL_OPENBLAS}")


def check_mlx(test: SelfTest, python: str) -> Finding:
    """Judge whether mlx runs here, and computes two rows at once like each row alone."""
    reinstall = shell(python, "-m", "pip", "install", "--upgrade", "mlx", "mlx-lm")
    if test.is_unfinished:
        detail = (
            f"the self-test was {test.error}: the machine is busy, or mlx hangs. Without a limit, "
            "as below, it ends with a line of its result unless mlx hangs"
        )
        return warning("mlx", detail, shell(python, *SELF_TEST))
    if test.error:
        return fault("mlx", f"the self-test did not pass: {test.error}", reinstall)
    where = f"mlx {test.mlx} on {test.device}"
    if not test.is_same:
        detail = (
            f"{where} computes other numbers for two rows at once than for each alone "
            f"(by {test.share_off:.2g} of the largest): batched answers would be wrong"
        )
        return fault("mlx", detail, reinstall)
    return ok("mlx", f"{where}: two rows at once give what each gives alone")


def check_multicast(mdns: DiscoveryStats, platform: str) -> Finding:
    """Judge whether nodes are found on the local network without being named."""
    if mdns.is_silenced:
        says = f"the system refuses to send multicast (errno {mdns.errno})"
        if is_mac(platform):
            return warning("mdns", f"{says}: {LOCAL_NETWORK}", OPEN_LOCAL_NETWORK)
        return warning("mdns", f"{says}: a firewall, or no network", show_route(platform, _MDNS))
    if not mdns.is_running:
        detail = "no multicast here: other nodes are found by --peer and by gossip alone"
        return warning("mdns", detail, show_route(platform, _MDNS))
    return ok("mdns", f"nodes on the local network are found; seen now: {mdns.sightings}")


def check_ring_probe(ring: RingEnvironment, environ: Mapping[str, str]) -> Finding:
    """Judge the mlx.distributed ring of this process; a node without a ring is fine."""
    if ring.is_available:
        return ok("ring", f"rank {ring.rank} of {ring.world_size} ({ring.backend})")
    if not environ.get("MLX_RANK"):
        return ok("ring", "none: not started by mlx.launch, and needed by no feature")
    detail = f"started by mlx.launch, and yet in no ring: {ring.failure_reason}"
    return warning("ring", detail, "mlx.launch --hostfile HOSTS.json scripts/kakeya-node")


# --- networks


def check_proxy(environ: Mapping[str, str]) -> Finding | None:
    """Judge the proxy variables of an environment; None if none is set.

    Nodes never call each other through a proxy, but clients of the HTTP API may. The address of a
    proxy can hold a password, so it is not shown.
    """
    found = [name for name in sorted(environ) if name.lower() in _PROXIES and environ[name]]
    if not found:
        return None
    named = f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} set"
    direct = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}".split(",")
    is_spared = not {"*", "127.0.0.1"}.isdisjoint(name.strip() for name in direct)
    if is_spared or not any(name.lower() in _PROXIES_OF_HTTP for name in found):
        return ok("proxy", f"{named}; nodes call each other without the proxy")
    detail = (
        f"{named}: nodes call each other without the proxy, but programs that use the HTTP API of "
        "this machine may send their requests to it"
    )
    return warning("proxy", detail, "export no_proxy=localhost,127.0.0.1,::1")


def link_to(host: str, interfaces: Sequence[Interface]) -> str:
    """Return the own interface that shares a network with a host; "" = none does."""
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    return next((own.name for own in interfaces if wanted in own.link), "")


def check_networks(
    interfaces: Sequence[Interface], platform: str, cut: Collection[str] = ()
) -> Finding:
    """Judge whether this machine is on a network that peers can share; `cut` are the names of
    interfaces without a carrier."""
    if not interfaces:
        command = "networksetup -listallhardwareports" if is_mac(platform) else "ip address"
        return warning("networks", "none: only this machine itself can reach this node", command)
    if lost := sorted({own.name for own in interfaces} & set(cut)):
        detail = f"no carrier at {', '.join(lost)}: a cable is not in, or its other end is off"
        return warning("networks", detail, show_link(platform, lost[0]))
    named = [
        f"{own.ip} on {own.name} ({own.priority.network})"
        for own in interfaces
        if not (own.ip.version == 6 and own.ip.is_link_local)
    ]
    return ok("networks", "; ".join(named) or "link-local addresses alone")
