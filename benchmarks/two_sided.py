"""Fetching a prompt's KV from its end while it is computed from its beginning, over a shaped link.

Two network namespaces are two machines, and `tc` shapes the link between them. One serves the
blocks of a 4096-token prompt; the other has them by fetching alone, with prefill where that is
sooner, and by meeting the peer in the middle. Prefill is a timer at a given rate, and a meeting is
charged the seconds that a switch of the engine takes. Needs root and Linux.

    sudo .venv/bin/python -m benchmarks.two_sided
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks.prefix_peer import Prompt, Source
from benchmarks.report import emit, median
from kakeya.core.clock import SystemClock
from kakeya.core.units import KIB
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.peers.choice import BlockHolder
from kakeya.prefix.peers.fetch import PeerFetch
from kakeya.prefix.peers.seams import BlockPart, Loan, MissingBlocks
from kakeya.prefix.peers.service import PrefillCacheService
from kakeya.prefix.peers.two_sided import SWITCH_S, Meeting
from kakeya.v1.distributed_pb2_grpc import add_PrefillCacheServiceServicer_to_server

BLOCKS, BLOCK_TOKENS = 16, 256
REPEATS = 3
GOAL = 1.2
SERVER, CLIENT = "kkb-server", "kkb-client"
ADDRESS = "10.99.0.1:7070"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A link in Gbit/s, KV in KiB a token, prefill in tokens a second."""

    gbit: int
    token_kib: int
    rates: Sequence[int]

    @property
    def prompt(self) -> Prompt:
        """The prompt of whole blocks."""
        return Prompt(
            layout="l",
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.token_kib * KIB * BLOCK_TOKENS,
            tokens=BLOCKS * BLOCK_TOKENS,
        )


CASES = (
    Case(gbit=1, token_kib=128, rates=(100, 300, 500, 1000)),  # 8 B parameters
    Case(gbit=1, token_kib=56, rates=(500, 1000)),  # 7 B with four heads of KV
    Case(gbit=10, token_kib=128, rates=(1000,)),
)


class WholeBlocks(Source):
    """The blocks of a prompt without a tail, all of the same bytes."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._payload = random.Random(1).randbytes(prompt.block_bytes)
        self._blocks = dict.fromkeys(prompt.ids, self._payload)

    def tail(self, behind: BlockId, names: Sequence[bytes]) -> BlockPart | None:
        """None."""
        return None

    async def read(self, block_id: BlockId) -> Loan | None:
        """Lend a block."""
        return Loan(memoryview(self._payload), lambda: None)


class Sink:
    """Drops what comes; a `BlockSink`."""

    async def put(self, index: int, payload: bytearray, tail_tokens: int = 0) -> bool:
        """Take a block."""
        return True


async def serve(prompt: Prompt) -> None:
    """Serve until stdin ends."""
    service = PrefillCacheService(
        "peer",
        WholeBlocks(prompt),
        summary=tuple,
        clock=SystemClock(),
        draw=lambda: secrets.token_hex(16),
    )
    server = grpc.aio.server()
    add_PrefillCacheServiceServicer_to_server(service, server)
    server.add_insecure_port(ADDRESS)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


class Requester:
    """A node that wants the prompt."""

    def __init__(self, prompt: Prompt) -> None:
        channel = grpc.aio.insecure_channel(ADDRESS)
        self._prompt = prompt
        self._holder = BlockHolder(node_id="peer", address=ADDRESS, blocks=BLOCKS)
        self._fetch = PeerFetch(
            channel_for=lambda holder: channel,
            clock=SystemClock(),
            rng=random.Random(1),
            lookup_s=5.0,
        )

    def wanted(self, rate: float, slack_s: float = 0.5) -> MissingBlocks:
        """All blocks, by a node that computes so many tokens a second."""
        return MissingBlocks(
            fingerprint=self._prompt.fingerprint,
            ids=self._prompt.ids,
            have=0,
            block_bytes=self._prompt.block_bytes,
            prefill_tokens_per_s=rate,
            most_slack_s=slack_s,
        )

    async def one_sided(self, wanted: MissingBlocks) -> float:
        """Fetch first, then compute the rest; seconds."""
        began = time.perf_counter()
        came = await self._fetch.fetch(wanted, [self._holder], Sink())
        return time.perf_counter() - began + (BLOCKS - came) * wanted.block_s

    async def two_sided(self, wanted: MissingBlocks) -> float:
        """Meet in the middle where the node would; seconds."""
        if self._fetch.prefers_meeting(wanted, [self._holder]) is None:
            return await self.one_sided(wanted)
        began, met = time.perf_counter(), asyncio.Event()
        found = await self._fetch.approach(wanted, self._holder)
        if found is None:
            raise SystemExit("the peer gave no lease")
        hit, meeting = found

        def moved() -> None:
            if meeting.pays:
                met.set()

        tasks = [
            asyncio.ensure_future(compute(meeting, wanted.block_s, moved)),
            asyncio.ensure_future(met.wait()),
            asyncio.ensure_future(self._fetch.fetch_back(hit, wanted, meeting, Sink(), moved)),
        ]
        await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - began + (SWITCH_S if met.is_set() else 0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seconds


async def compute(meeting: Meeting, block_s: float, moved: Callable[[], None]) -> None:
    """Compute one block after the other."""
    for block in range(BLOCKS):
        await asyncio.sleep(block_s)
        meeting.computed(block + 1)
        moved()


async def request(case: Case) -> None:
    """Measure one case."""
    node = Requester(case.prompt)
    for _ in range(2):  # connects, and measures the link
        await node.one_sided(node.wanted(1.0, slack_s=60.0))
    for rate in case.rates:
        wanted = node.wanted(float(rate))
        one, two = [], []
        for _ in range(REPEATS):
            one.append(await node.one_sided(wanted))
            two.append(await node.two_sided(wanted))
        ratio = median(one) / median(two)
        emit(
            f"4096 tokens of {case.token_kib} KiB over {case.gbit} Gbit/s, {rate} tokens/s, s",
            ours=median(two),
            baseline=median(one),
            ratio=ratio,
            goal=f">= {GOAL} somewhere",
            met=ratio >= GOAL,
            computed_s=BLOCKS * wanted.block_s,
        )


@contextmanager
def link(gbit: int) -> Iterator[None]:
    """Join two fresh namespaces by a link of so many Gbit/s each way."""
    names = (SERVER, CLIENT)
    for name in names:
        run("ip", "netns", "add", name)
    try:
        run("ip", "-n", SERVER, "link", "add", "v0", "type", "veth", "peer", "v0", "netns", CLIENT)
        for number, name in enumerate(names, start=1):
            run("ip", "-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "v0")
            run("ip", "-n", name, "link", "set", "v0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("rate", f"{gbit}gbit", "burst", "512kb", "latency", "20ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "v0", "root", "tbf", *shape)
        yield
    finally:
        for name in names:
            run("ip", "netns", "del", name)


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def inside(name: str, role: str, number: int) -> list[str]:
    this = (sys.executable, "-m", "benchmarks.two_sided", role, json.dumps(number))
    return ["ip", "netns", "exec", name, *this]


def main() -> None:
    if len(sys.argv) == 3:
        case = CASES[int(sys.argv[2])]
        asyncio.run(serve(case.prompt) if sys.argv[1] == "serve" else request(case))
        return
    if sys.platform != "linux" or os.geteuid():
        sys.exit("two_sided needs root on Linux: it shapes a link between network namespaces")
    for number, case in enumerate(CASES):
        with link(case.gbit):
            server = subprocess.Popen(
                inside(SERVER, "serve", number), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                assert server.stdout is not None
                server.stdout.readline()
                subprocess.run(inside(CLIENT, "request", number), check=True)
            finally:
                server.communicate()


if __name__ == "__main__":
    main()
