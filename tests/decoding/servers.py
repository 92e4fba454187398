"""Real proposer servers for the tests: in a thread, in a child process, and rude ones."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import distributed_pb2_grpc as rpc
from kakeya.v1.drafts_pb2_grpc import (
    DraftStreamServiceServicer,
    add_DraftStreamServiceServicer_to_server,
)

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, so that a test may block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.run(_last_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


async def _last_tasks() -> None:
    """Let cancelled calls end before the loop does."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(rest, timeout=2) if rest else None


@contextmanager
def serving(
    service: rpc.ProposerServiceServicer, streams: DraftStreamServiceServicer | None = None
) -> Iterator[str]:
    """Serve on a free loopback port; yields the address."""
    host = LoopThread()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        rpc.add_ProposerServiceServicer_to_server(service, server)
        if streams is not None:
            add_DraftStreamServiceServicer_to_server(streams, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = host.run(start())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        host.run(server.stop(0))
        host.close()


class PlainServicer(rpc.ProposerServiceServicer):
    """A node without our extensions, written with the generated stubs alone."""

    def __init__(self, answer: Callable[[list[int], int], list[int]]) -> None:
        self.answer = answer
        self.seen: list[pb.ProposeBlockRequest] = []

    def ProposeBlock(self, request, context):
        self.seen.append(request)
        if request.model_id not in ("", "plain"):
            context.abort(grpc.StatusCode.NOT_FOUND, "served: plain")
        ids = self.answer(list(request.committed_token_ids), request.block_size)
        return pb.ProposeBlockResponse(token_ids=ids, forward_passes=1)


@contextmanager
def plain_server(servicer: PlainServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_ProposerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def child_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A proposer server in a process of its own, that can be killed."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("child_proposer.py"))],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}",
        },
    )
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
