"""Ring groups of real processes on loopback, and engines beside them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kakeya.core.units import pack_ids
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from tests import findings, fork_server
from tests.engine.rig import frames_of
from tests.netns import Machine
from tests.waiting import wait_until

LAUNCH = Path(sys.executable).parent / "mlx.launch"
START_S = 240.0
ENGINE = ("kakeya.node.engine_main",)


@dataclass
class Served:
    """A group, or an engine, that was started."""

    process: subprocess.Popen[bytes]
    channel: grpc.Channel
    socket: Path
    log: Path

    @property
    def stub(self) -> EngineServiceStub:
        return EngineServiceStub(self.channel)

    def serves(self) -> Served:
        ready = grpc.channel_ready_future(self.channel)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(1.0)
                return self
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"not within {START_S:g} s: it serves"

    def decode(self, prompt: Sequence[int], tokens: int, **more: object) -> list[int]:
        """Greedy tokens, unless told otherwise."""
        return list(self.stream(prompt, tokens, **more))

    def stream(self, prompt: Sequence[int], tokens: int, **more: object) -> Iterator[int]:
        wanted = pb.DecodeRequest(token_ids_le32=pack_ids(prompt), max_tokens=tokens, **more)  # type: ignore[arg-type]
        for message in self.stub.Decode(wanted, timeout=START_S):
            for frame in frames_of(message):
                yield from frame.tokens.token_ids

    def said(self) -> str:
        return self.log.read_text()

    def pids(self) -> list[int]:
        """The processes of the ranks of a group, in their order."""
        found = re.findall(r"in the ring .*rank=(\d+) .*pid=(\d+)", self.said())
        return [pid for _, pid in sorted((int(rank), int(pid)) for rank, pid in found)]


def loses(served: Served, stream: Iterator[int]) -> None:
    """Rank 0 ends, and the client of the answer is told."""
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_until("the end of rank 0", lambda: not is_running(served.pids()[0]))


def is_running(pid: int) -> bool:
    """Whether a process computes, or could; one that ended and is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@functools.cache
def _first_ports() -> Iterator[int]:
    """Each fourth port of this worker, again and again."""
    begin, end, each = 20_000, 32_000, 100
    chosen = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if chosen.exists() and (lowest := int(chosen.read_text().split()[0])) >= begin + each:
        end = lowest
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    block = (os.getppid() + worker) % ((end - begin) // each)  # two runs have two parents
    return itertools.cycle(range(begin + block * each, begin + (block + 1) * each, 4))


def free_ports(count: int) -> int:
    """The first of at most four free ports that follow each other.

    Ranks bind them seconds later, so they lie below those that the system chooses for others.
    """
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            first = next(_first_ports())
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def launch(ranks: int) -> tuple[str, ...]:
    """What comes before the command of the ranks of a group: mlx.launch in scripts/soak, and what
    forks them, which spares most of their processor time, where children of tests are forked."""
    port = str(free_ports(ranks))
    if fork_server.installed:
        return (sys.executable, "-m", "tests.mlx.ring.child_launch", str(ranks), port, "--")
    return (str(LAUNCH), "-n", str(ranks), "--backend", "ring", "-p", port, "--")


@contextlib.contextmanager
def group(ranks: int, model: Path, *flags: str, engine: Sequence[str] = ENGINE) -> Iterator[Served]:
    """A group that loads; ended by the end of its launcher."""
    command = (*launch(ranks), sys.executable, "-m", *engine)
    with _started(command, model, flags) as served:
        yield served


@contextlib.contextmanager
def apart(
    machines: Sequence[Machine], model: Path, *flags: str, engine: Sequence[str] = ENGINE
) -> Iterator[list[Served]]:
    """A group with a rank on each machine, as a launch over ssh would start it."""
    with tempfile.TemporaryDirectory(prefix="kk") as folder, contextlib.ExitStack() as started:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"{machine.ip}:5757"] for machine in machines]))
        ranks = []
        for rank, machine in enumerate(machines):
            environ = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            command = machine.command(sys.executable, "-m", *engine)
            ranks.append(started.enter_context(_started(command, model, flags, environ)))
        yield ranks


@contextlib.contextmanager
def alone(model: Path, engine: Sequence[str] = ENGINE) -> Iterator[Served]:
    """One process that holds all of the model."""
    with _started((sys.executable, "-m", *engine), model, findings.flags()) as served:
        yield served.serves()


@contextlib.contextmanager
def _started(
    command: Sequence[str], model: Path, flags: Sequence[str], environ: Mapping[str, str] = {}
) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        about = ("--socket", f"{folder}/s", "--model", str(model), "--model-id", "toy")
        log = Path(folder) / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                (*command, *about, *flags),
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
            )
        channel = grpc.insecure_channel(f"unix:{folder}/s")
        served = Served(process, channel, Path(folder) / "s", log)
        try:
            yield served
        except BaseException:
            print(served.said())
            raise
        finally:
            channel.close()
            process.terminate()
            process.wait(60)
            if process.stdin is not None:
                process.stdin.close()
