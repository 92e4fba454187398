"""A node in a process of its own, to be stopped, killed or blocked by a test.

Prints its address. SIGUSR1 blocks its event loop until SIGUSR2. Beside the capability service it
serves `/test.Stream/Hold`: one message, then silence.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import grpc

from kakeya.wire.channels import Keepalive
from tests.fleet.nodes import proposer, running_node


async def hold(request: bytes, context: object) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


async def main(node_id: str, interval_s: float, timeout_s: float) -> None:
    # Before other threads are there, which inherit the mask: one of them would die of the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, signal.sigwait, {signal.SIGUSR2})
    handler = grpc.method_handlers_generic_handler(
        "test.Stream", {"Hold": grpc.unary_stream_rpc_method_handler(hold)}
    )
    keepalive = Keepalive(interval_s=interval_s, timeout_s=timeout_s)
    async with running_node(
        node_id, models=[proposer("ngram")], keepalive=keepalive, handlers=(handler,)
    ) as node:
        print(node.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(float, sys.argv[2:4])))
