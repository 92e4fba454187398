"""A model pulled from one peer, from two, and by two nodes at once from one.

Real nodes; the time is that from the first piece to the name, with all proofs and the sync of the
disk. Beside it, in turns: the same files copied within the folder and synced, which is the disk's
limit, and the rate of the link.

    .venv/bin/python -m benchmarks.model_pull [--model DIR] [--link loopback] [--link 1gbit]
        [--folder DIR] [--runs 3]

Over a shaped link the nodes are network namespaces, as root. `--folder /dev/shm` takes the disk
out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess
from kakeya.core.units import MIB
from kakeya.node.control import control_socket
from kakeya.v1 import weights_pb2 as pb
from kakeya.v1.weights_pb2_grpc import ModelFilesServiceStub
from kakeya.wire.channels import open_channel
from tests import netns

MODEL = Path.home() / ".cache/kakeya/real-model"
NAME = "pulled"
MBIT = 1_000_000 / 8
HEADERS = 0.95
"""Of a link's rate what is left for content below Ethernet, IP, TCP and HTTP/2."""


@contextlib.contextmanager
def places(link: str, count: int) -> Iterator[tuple[netns.Machine, ...]]:
    """Machines behind a shaped link; none for loopback."""
    if link == "loopback":
        yield ()
        return
    with netns.network(count) as machines:
        for machine in machines:
            shape = ("rate", link, "burst", "512kb", "latency", "50ms")
            machine.run("tc", "qdisc", "add", "dev", netns.LAN, "root", "tbf", *shape)
        yield machines


def node(folder: Path, name: str, machine: netns.Machine | None, *flags: str) -> NodeProcess:
    """A node that serves nothing."""
    own = ["--node-id", name, "--proposer", "ngram", "--exchange-interval", "0.5", *flags]
    program = [sys.executable, "-m", "kakeya.node.daemon"]
    if machine is not None:
        own += ["--bind", f"{machine.ip}:50051", "--insecure-lan"]
        program = machine.command(*program)
    return NodeProcess(folder / name, *own, program=program)


async def pull(folder: Path, sources: int) -> float:
    """Seconds from the first piece to the end, at the node in a folder."""
    async with open_channel(f"unix:{control_socket(folder / 'data')}") as channel:
        stub = ModelFilesServiceStub(channel)
        while True:  # until it sees the sources, with their digests
            listed = await stub.ListModels(pb.ListModelsRequest())
            if any(one.digest and len(one.peers) == sources for one in listed.models):
                break
            await asyncio.sleep(0.2)
        began = 0.0
        async for state in stub.PullModel(pb.PullModelRequest(name=NAME)):
            if state.phase == "fetching" and not began:
                began = time.perf_counter()
        seconds = time.perf_counter() - began
        assert state.phase == "done", state
        return seconds


async def forget(folder: Path) -> None:
    """Forget a model that was pulled."""
    async with open_channel(f"unix:{control_socket(folder / 'data')}") as channel:
        await ModelFilesServiceStub(channel).RemoveModel(pb.RemoveModelRequest(name=NAME))


def sent_by(source: NodeProcess, machine: netns.Machine | None) -> int:
    """The bytes of models that a node sent."""
    with machine.entered() if machine else contextlib.nullcontext():
        return int(source.api.get("/api/v1/status")["weights"]["served_bytes"])


def cpu_s(node: NodeProcess) -> float:
    """Seconds of processor that a node has taken; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def copied(model: Path, folder: Path) -> float:
    """Seconds to copy the files into a folder, and to sync them."""
    began = time.perf_counter()
    target = Path(shutil.copytree(model, folder / "copy"))
    for path in target.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


async def measured(
    folder: Path, model: Path, machines: Sequence[netns.Machine], runs: int
) -> dict[str, list[float]]:
    """Seconds of each kind of pull, and of the copy."""
    kinds = ("disk", "one", "two", "both", "shared", "source", "puller")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    at = [*machines] or [None] * 4
    for name in ("source-1", "source-2"):
        shutil.copytree(model, folder / name / "data" / "models" / NAME)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(node(folder, "source-1", at[0]))
        peer = ("--peer", first.grpc)
        pullers = [
            await stack.enter_async_context(node(folder, f"puller-{n}", at[1 + n], *peer))
            for n in (1, 2)
        ]
        places = [folder / "puller-1", folder / "puller-2"]
        for _ in range(runs):
            found["disk"].append(await asyncio.to_thread(copied, model, folder))
            before_s = [cpu_s(one) for one in (first, pullers[0])]
            found["one"].append(await pull(places[0], 1))
            found["source"].append(cpu_s(first) - before_s[0])
            found["puller"].append(cpu_s(pullers[0]) - before_s[1])
            await forget(places[0])
            before = sent_by(first, at[0])
            found["both"].append(max(await asyncio.gather(*(pull(one, 1) for one in places))))
            found["shared"].append(sent_by(first, at[0]) - before)
            for one in places:
                await forget(one)
        await pullers[1].stop()
        await stack.enter_async_context(node(folder, "source-2", at[1], *peer))
        for _ in range(runs):
            found["two"].append(await pull(places[0], 2))
            await forget(places[0])
    return found


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--link", action="append", help="loopback, or a rate as tc takes it")
    parser.add_argument("--folder", type=Path, help="where the nodes keep their files")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    size = sum(path.stat().st_size for path in options.model.iterdir())
    for link in options.link or ["loopback", "1gbit"]:
        with places(link, 4) as machines, tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = asyncio.run(measured(Path(folder), options.model, machines, options.runs))
        disk_rate = size / median(found["disk"])
        link_rate = 1000 * MBIT * HEADERS if link == "1gbit" else float("inf")
        # On Linux `pid` is that of `ip netns exec`, which becomes the node.
        cpu = {node: median(found[node]) / size * 1024 * MIB for node in ("source", "puller")}
        more = {
            "one": {f"{node}_cpu_s_per_gib": seconds for node, seconds in cpu.items()},
            "two": {},
            "both": {"sent_x": median(found["shared"]) / size},
        }
        for kind in more:
            rate = size / median(found[kind])
            # Two nodes write twice as much to the one disk of this machine.
            limit = min(disk_rate / (2 if kind == "both" else 1), link_rate)
            emit(
                f"{size / MIB:.0f} MiB over {link}, MiB/s, {kind}",
                ours=rate / MIB,
                baseline=limit / MIB,
                ratio=rate / limit,
                goal="0.9 of the disk's or the link's limit",
                met=rate >= 0.9 * limit,
                disk=disk_rate / MIB,
                **more[kind],
            )


if __name__ == "__main__":
    main()
