"""One draft over a stream against one unary call, with prefixes of 1000 and 10,000 tokens.

A real node on loopback drafts n-grams; each request follows a text that has grown by a token.

    .venv/bin/python -m benchmarks.draft_round_trip
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from benchmarks.report import emit, interleaved, median
from kakeya.cli.child import NodeProcess
from kakeya.core.ids import NGRAM
from kakeya.decoding.remote.remote import RemoteProposer
from kakeya.decoding.remote.stream import StreamedDraft, StreamedPeer

SIZE = 16
REPEATS = 301
GOALS = {1_000: 0.6, 10_000: 0.35}
OPEN_S = 5.0
STEP_S = 0.002
"""Between two requests, as a verifier's step: threads have gone to sleep by then."""


class Text:
    """A text that grows, and what it costs to be told what may follow it."""

    def __init__(self, address: str, length: int) -> None:
        self._rng = random.Random(length)
        self._tokens = [self._rng.randrange(512) for _ in range(length)]
        self.proposer = RemoteProposer(address, NGRAM)
        self._peer = StreamedPeer(self.proposer)

    def streamed(self) -> float:
        """Microseconds of a request on the stream."""
        return self._timed(self._peer)

    def unary(self) -> float:
        """Microseconds of a call."""
        return self._timed(self.proposer)

    def open(self) -> None:
        """Wait until the peer takes requests on a stream."""
        self._peer.prepare(self._tokens, noise=None)
        deadline = time.monotonic() + OPEN_S
        prefix = list(self._tokens)
        while not isinstance(self._peer.begin(prefix, SIZE, noise=None), StreamedDraft):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.proposer.name} has opened no stream in {OPEN_S:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """End the stream and the channel."""
        self._peer.leave()
        self.proposer.close()

    def _timed(self, peer: RemoteProposer | StreamedPeer) -> float:
        self._tokens.append(self._rng.randrange(512))
        prefix = list(self._tokens)
        time.sleep(STEP_S)
        began = time.perf_counter()
        pending = peer.begin(prefix, SIZE, noise=None)
        if pending is None or not pending.wait(OPEN_S):
            raise RuntimeError(f"{self.proposer.name} gave no answer")
        peer.finish(pending)
        return (time.perf_counter() - began) * 1e6


def measure(address: str) -> None:
    for length, goal in GOALS.items():
        text = Text(address, length)
        text.open()
        taken = interleaved({"unary": text.unary, "stream": text.streamed}, REPEATS)
        text.close()
        ours, baseline = median(taken["stream"]), median(taken["unary"])
        emit(
            f"draft round trip over a stream, us, {length} tokens",
            ours=ours,
            baseline=baseline,
            ratio=ours / baseline,
            goal=f"<= {goal} of a unary call",
            met=ours / baseline <= goal,
        )


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home)) as node:
            await asyncio.to_thread(measure, node.grpc)


if __name__ == "__main__":
    asyncio.run(main())
