"""Network namespaces as machines: each with its own interfaces, joined by a switch, cut and healed.

    network(3)                      three machines on one switch, 10.77.0.1 to 10.77.0.3
    network(2, thunderbolt=True)    also a cable between each two neighbours, 169.254.i.0/24
                                    where i counts the cables from 1

    machine.run(...)                a command inside, to its end
    with machine.entered():         this thread inside
    machine.spawn(...)              a command inside, until `Spawned.stop`; its first line is read
    machine.cut() / heal()          pull its cable to the switch, carrier and all
    machine.cut(silently=True)      the switch drops its packets and says nothing
    machine.drop_dials_to(other)    new connections to another machine get no answer; those that
                                    the other opens work (a firewall on one side)
    machine.drop_out()              whatever it sends is lost, whatever is sent to it arrives
    machine.pass_out()              ends both

The switch is a namespace too, so nothing here touches an interface of the host. Everything lives
in names `kkns-PID-...`; those of a process that is gone are a crashed run's and are removed.
Needs root, `ip`, and for the one-way drops `tc` with classic BPF; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PREFIX = "kkns-"
LAN, CABLE = "lan0", "thunderbolt"
_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")
_REPO = Path(__file__).parents[1]
# Verdicts of classic BPF in tc's direct-action mode.
_PASS, _DROP = "6 0 0 0", "6 0 0 2"


def _ip(*arguments: str) -> None:
    _check("ip", *arguments)


def _check(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be used here; "" when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (package iproute2)"
    try:
        with network(2, has_carriers=False):
            return ""
    except (OSError, subprocess.SubprocessError) as problem:
        return f"network namespaces do not work here: {problem}"


def needs_netns() -> pytest.MarkDecorator:
    """Mark a test that runs only where namespaces do."""
    return pytest.mark.skipif(bool(why_not()), reason=why_not() or "they work")


@functools.cache
def _has_all_loopback() -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.9", 0))
        except OSError:
            return False
    return True


def needs_all_loopback() -> pytest.MarkDecorator:
    """Mark a test that plays other hosts by 127.0.0.2 to 127.0.0.9."""
    why = "macOS has 127.0.0.1 alone; as root: ifconfig lo0 alias 127.0.0.N up, N = 2 to 9"
    return pytest.mark.skipif(not _has_all_loopback(), reason=why)


Link = tuple[str, str]
"""The namespace and the name of an interface."""


@dataclass
class Spawned:
    """A command that runs inside a machine; `first_line` is what it printed first."""

    process: subprocess.Popen[str]
    log_file: Path
    first_line: str = ""

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self.log_file.read_text("utf-8", "replace")

    @property
    def pid(self) -> int:
        """Of the command itself: `ip netns exec` replaces itself by it."""
        return self.process.pid

    def read_line(self, limit_s: float = 30.0) -> str:
        """The next line that it prints; "" when it ended or the time is up."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        return self.process.stdout.readline() if ready else ""

    def stop(self, limit_s: float = 15.0, number: int = signal.SIGTERM) -> int:
        """Signal it, wait for its end (SIGKILL after the limit) and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@dataclass
class Machine:
    """One namespace; `ip` is its address on the switch, `cables` those to its neighbours."""

    name: str
    ip: str
    switch: str
    port: str
    cables: dict[str, str] = field(default_factory=dict)
    """Own address by the name of the interface."""
    far_ends: dict[str, Link] = field(default_factory=dict)
    """The other end of each of these."""
    spawned: list[Spawned] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """How a command is run inside."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def run(
        self, *arguments: str, limit_s: float = 30.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            input=stdin,
            timeout=limit_s,
            check=False,
            cwd=_REPO,
        )

    def python(self, *arguments: str, limit_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run this Python inside to its end."""
        return self.run(sys.executable, *arguments, limit_s=limit_s)

    def spawn(self, *arguments: str, log_file: Path, limit_s: float = 30.0) -> Spawned:
        """Start a command inside and wait for the first line that it prints."""
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                self.command(*arguments), stdout=subprocess.PIPE, stderr=log, text=True, cwd=_REPO
            )
        spawned = Spawned(process, log_file)
        self.spawned.append(spawned)
        spawned.first_line = spawned.read_line(limit_s)
        if not spawned.first_line:
            spawned.stop(number=signal.SIGKILL)
            raise AssertionError(f"{' '.join(arguments)} said nothing: {spawned.log[-2000:]}")
        return spawned

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread on the machine, and the threads and commands that it starts."""
        with (
            Path("/proc/thread-self/ns/net").open() as before,
            (_FOLDER / self.name).open() as inside,
        ):
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    # --- the wire

    def cut(self, *, silently: bool = False) -> None:
        """Take it off the switch: cables between machines stay."""
        if silently:
            for direction in ("ingress", "egress"):
                self._filter(self.switch, self.port, direction, [_DROP])
        else:
            _ip("-n", self.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Put it on the switch again."""
        _ip("-n", self.switch, "link", "set", self.port, "up")
        _wait_for_carriers([(self.switch, self.port), (self.name, LAN)])
        with contextlib.suppress(OSError):
            _check("tc", "-n", self.switch, "qdisc", "del", "dev", self.port, "clsact")

    def unplug(self, cable: str) -> None:
        """Take down an interface of its own, such as `thunderbolt0`."""
        _ip("-n", self.name, "link", "set", cable, "down")

    def plug(self, cable: str) -> None:
        """Take it up again; its IPv4 address has stayed. Its other end has to be up."""
        _ip("-n", self.name, "link", "set", cable, "up")
        _wait_for_carriers([(self.name, cable), self.far_ends[cable]])

    def drop_out(self, interface: str = LAN) -> None:
        """Lose every packet that it sends."""
        self._filter(self.name, interface, "egress", [_DROP])

    def drop_dials_to(self, other: Machine, interface: str = LAN) -> None:
        """Lose the first packet of each TCP connection that it opens to another machine."""
        address = int(ipaddress.IPv4Address(other.ip))
        program = [
            "40 0 0 12",  # ethertype
            "21 0 7 2048",  # not IPv4: pass
            "48 0 0 23",  # protocol
            "21 0 5 6",  # not TCP: pass
            "32 0 0 30",  # destination
            f"21 0 3 {address}",  # another one: pass
            "48 0 0 47",  # flags; our packets have no IP options
            "84 0 0 18",  # SYN and ACK
            "21 1 0 2",  # SYN alone: drop
            _PASS,
            _DROP,
        ]
        self._filter(self.name, interface, "egress", program)

    def pass_out(self, interface: str = LAN) -> None:
        """Lose nothing any more."""
        _check("tc", "-n", self.name, "qdisc", "del", "dev", interface, "clsact")

    def _filter(
        self, namespace: str, interface: str, direction: str, program: Sequence[str]
    ) -> None:
        if shutil.which("tc") is None:
            pytest.skip("dropping packets silently needs the tc command (package iproute2)")
        bytecode = f"{len(program)}," + ",".join(program)
        try:
            # The first direction has made the hook that the second one finds.
            with contextlib.suppress(OSError):
                _check("tc", "-n", namespace, "qdisc", "add", "dev", interface, "clsact")
            _check(
                *("tc", "-n", namespace, "filter", "add", "dev", interface, direction),
                *("bpf", "direct-action", "bytecode", bytecode),
            )
        except OSError as problem:
            pytest.skip(f"dropping packets silently does not work here: {problem}")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


@contextlib.contextmanager
def network(
    count: int, *, thunderbolt: bool = False, has_carriers: bool = True
) -> Iterator[tuple[Machine, ...]]:
    """Make machines on one switch; on leaving, their commands end and all of it is removed.

    Without `has_carriers`, systems may not have told yet that their links are up.
    """
    _remove_old()
    run = run_name(os.getpid())
    switch = f"{run}-switch"
    machines: list[Machine] = []
    try:
        _ip("netns", "add", switch)
        # Snooping would drop multicast for which nobody asked loudly enough.
        _ip("-n", switch, "link", "add", "name", "br0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(1, count + 1):
            machines.append(_add_machine(run, switch, number))
        if thunderbolt:
            for number, (left, right) in enumerate(itertools.pairwise(machines), 1):
                _add_cable(left, right, number)
        if has_carriers:
            _wait_for_carriers([(one.name, way) for one in machines for way in (LAN, *one.cables)])
        yield tuple(machines)
    finally:
        for machine in machines:
            for spawned in machine.spawned:
                spawned.stop(5.0, number=signal.SIGKILL)
        for name in (switch, *(f"{run}-{number}" for number in range(1, count + 1))):
            _remove(name)


def _add_machine(run: str, switch: str, number: int) -> Machine:
    name, port = f"{run}-{number}", f"port{number}"
    machine = Machine(name, f"10.77.0.{number}", switch, port)
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "add", "name", LAN, "type", "veth", "peer", "name", port)
    _ip("-n", name, "link", "set", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", name, "addr", "add", f"{machine.ip}/24", "brd", "+", "dev", LAN)
    _ip("-n", name, "link", "set", LAN, "up")
    return machine


def _wait_for_carriers(links: Sequence[Link]) -> None:
    """Linux tells of a new link's carrier when it has time: where busy, seconds later."""
    deadline_mono = time.monotonic() + 30.0
    for namespace, name in links:
        while (link := _shown(namespace, name))["operstate"] != "UP":
            if time.monotonic() > deadline_mono:
                raise OSError(f"no carrier at {name} of {namespace} for 30 s: {link}")
            time.sleep(0.1)


def _shown(namespace: str, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(
        _check("ip", "-json", "-n", namespace, "link", "show", "dev", name)
    )
    return found[0]


def _add_cable(left: Machine, right: Machine, number: int) -> None:
    for side, machine in enumerate((left, right), 1):
        name = f"{CABLE}{len(machine.cables)}"
        machine.cables[name] = f"169.254.{number}.{side}"
    here, there = list(left.cables)[-1], list(right.cables)[-1]
    _ip("-n", left.name, "link", "add", "name", here, "type", "veth", "peer", "name", "far0")
    _ip("-n", left.name, "link", "set", "far0", "netns", right.name, "name", there)
    left.far_ends[here], right.far_ends[there] = (right.name, there), (left.name, here)
    for machine, name in ((left, here), (right, there)):
        _ip("-n", machine.name, "addr", "add", f"{machine.cables[name]}/24", "dev", name)
        _ip("-n", machine.name, "link", "set", name, "up")


def run_name(pid: int) -> str:
    """Draw a name for one run of a process."""
    return f"{PREFIX}{pid}-{secrets.token_hex(2)}"


def _remove_old() -> None:
    for file in _FOLDER.glob(f"{PREFIX}*") if _FOLDER.is_dir() else ():
        pid = file.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(file.name)


def _remove(name: str) -> None:
    if not (_FOLDER / name).exists():
        return
    inside = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30, check=False
    )
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)
