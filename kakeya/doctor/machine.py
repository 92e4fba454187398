"""Collect facts of this machine and judge them, with or without a running node.

Every collector is bounded in time and reports a failure as a fact. Files and interfaces are read
in a thread; programs (pmset, ping, the mlx self-test) are children that end at their limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kakeya.core.process import own_program
from kakeya.core.programs import Output, RunProgram, run_program
from kakeya.core.settings import Illegal, split_address
from kakeya.doctor import machine_checks as judge
from kakeya.doctor.machine_checks import FileFact, SelfTest
from kakeya.doctor.report import Finding, warning
from kakeya.fleet.identity.identity import FOLDER as IDENTITY
from kakeya.fleet.paths.interfaces import Interface, read_interfaces, read_thunderbolt_ports
from kakeya.fleet.placement.ring import probe_ring_environment

SELF_TEST_S = 6.0
"""The other facts of a busy machine are told within `examiner.LIMIT_S` all the same."""
_PROGRAM_S = 3.0
_GET_FLAGS, _UP, _RUNNING = 0x8913, 0x1, 0x40
"""Of Linux: SIOCGIFFLAGS, IFF_UP, IFF_RUNNING."""
_KEYS = f"{IDENTITY}/*key.pem"


class Machine:
    """Examines this machine."""

    def __init__(
        self,
        data_dir: Path,
        *,
        environ: Mapping[str, str],
        platform: str = sys.platform,
        python: str = sys.executable,
        run: RunProgram = run_program,
    ) -> None:
        """`environ` belongs to the examined process, and describes its ring and its proxies."""
        self.data_dir = data_dir
        self.platform = platform
        self.python = python
        self.program = python
        self._thunderbolt: Collection[str] = ()
        self._environ = environ
        self._run = run

    async def examine(self) -> tuple[Finding, ...]:
        """Collect and judge all facts; takes little more than `SELF_TEST_S` at most."""
        self._thunderbolt = await read_thunderbolt_ports(self.platform)
        self.program = await asyncio.to_thread(own_program)  # macOS resolves links
        test, sleep, files = await asyncio.gather(
            self._self_test(), self._sleep(), asyncio.to_thread(self._look)
        )
        found = [
            *files,
            sleep,
            judge.check_ring_probe(probe_ring_environment(self._environ), self._environ),
            judge.check_blas(test, self.platform),
            judge.check_mlx(test, self.python),
            judge.check_proxy(self._environ),
        ]
        return tuple(line for line in found if line is not None)

    async def pings(self, host: str) -> bool | None:
        """Whether a host answers a ping; None = this machine has no ping program."""
        ping = ("/sbin/ping", "-t", "1") if self.platform == "darwin" else ("ping", "-W", "1")
        output = await self._run((*ping, "-c", "1", host), _PROGRAM_S)
        return None if output is None else output.status == 0

    def interfaces(self) -> tuple[Interface, ...]:
        """List the addresses by which peers may reach this machine."""
        return read_interfaces(self.platform, self._thunderbolt)

    def cut_links(self, interfaces: Sequence[Interface]) -> frozenset[str]:
        """The names of interfaces without a carrier, as Linux tells; () on macOS."""
        names = {one.name for one in interfaces} if self.platform == "linux" else set()
        return frozenset(name for name in names if _is_cut(name))

    async def _self_test(self) -> SelfTest:
        output = await self._run((self.python, *judge.SELF_TEST), SELF_TEST_S)
        return read_self_test(output)

    async def _sleep(self) -> Finding | None:
        if self.platform != "darwin":
            return None
        output = await self._run(("/usr/bin/pmset", "-g"), _PROGRAM_S)
        return judge.check_sleep(judge.parse_pmset(output.stdout if output else ""))

    def _look(self) -> tuple[Finding, ...]:
        interfaces = self.interfaces()
        cut = self.cut_links(interfaces)
        networks = judge.check_networks(interfaces, self.platform, cut)
        existing = self.data_dir
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        try:
            disk = judge.check_disk(shutil.disk_usage(existing).free, self.data_dir)
            files = judge.check_files(_files(self.data_dir), self.data_dir, os.getuid())
        except OSError as problem:
            reason = problem.strerror or str(problem)
            line = warning("files", f"{self.data_dir}: {reason}", "kakeya-node --data-dir DIR")
            return (networks, line)
        return (networks, disk, files)


def _is_cut(name: str) -> bool:
    """Whether an interface is up and has no carrier."""
    asked = struct.pack("16sH14x", name.encode()[:15], 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            told = fcntl.ioctl(any_socket, _GET_FLAGS, asked)
        except OSError:
            return False
    (flags,) = struct.unpack_from("H", told, 16)
    return bool(flags & _UP) and not flags & _RUNNING


def _files(folder: Path) -> list[FileFact]:
    """Read mode and owner of the files that keep other users out; empty if no node ran yet."""
    facts = []
    for path in (folder, folder / "node.json", folder / IDENTITY, *folder.glob(_KEYS)):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            facts.append(FileFact(path=path, mode=found.st_mode & 0o777, uid=found.st_uid))
    return facts


def read_self_test(output: Output | None) -> SelfTest:
    """Read the result of the child that ran the self-test."""
    if output is None:
        return SelfTest(error="python could not be started")
    if output.status is None:
        return SelfTest(error=f"not done within {SELF_TEST_S:g} s", is_unfinished=True)
    if output.status != 0:
        lines = output.stderr.strip().splitlines()
        return SelfTest(error=lines[-1] if lines else f"it ended with status {output.status}")
    try:
        found = json.loads(output.stdout)
        return SelfTest(
            mlx=str(found["mlx"]),
            device=str(found["device"]),
            has_blas=bool(found["blas"]),
            is_same=bool(found["is_same"]),
            share_off=float(found["share_off"]),
        )
    except (ValueError, KeyError, TypeError) as problem:
        return SelfTest(error=f"its answer cannot be read: {problem!r}")


def listen_fault(address: str) -> int:
    """Try to listen on an address; return the errno of the refusal, 0 if it works."""
    try:
        host, port = split_address(address)
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as problem:
        return problem.errno or errno.EINVAL
    except Illegal:
        return errno.EINVAL
    return 0
