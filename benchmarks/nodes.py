"""Real nodes, and mlx_lm.server beside them, as the end-to-end benchmarks need them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer

from benchmarks.models import EMBEDDED
from kakeya.cli.child import NodeProcess
from kakeya.mlx.numerics.blas import threads_for
from kakeya.sessions.client import Client

CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"


"""
_WAIT_S = 180.0
_SERVER = (
    "import runpy, sys; from kakeya.mlx.numerics.blas import preload_blas; "
    "preload_blas(int(sys.argv.pop(1))); sys.argv[0] = 'mlx_lm.server'; "
    "runpy.run_module('mlx_lm.server', run_name='__main__')"
)


def blas_threads(model: Path) -> int:
    """The threads that OpenBLAS has in our engine for a float32 model; baselines get as many."""
    return threads_for(sum(file.stat().st_size for file in model.glob("*.safetensors")) // 4)


def code_ids(repeats: int = 4) -> list[int]:
    """Ids of repetitive source text, in the embedded models' vocabulary."""
    ids: list[int] = (
        Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(CODE * repeats).ids
    )
    return ids


async def wait_ready(node: NodeProcess) -> None:
    """Wait until the node's default model is loaded."""
    async with asyncio.timeout(_WAIT_S):
        while (await asyncio.to_thread(request, node.http, "GET", "/readyz", None))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def generate(
    client: Client, ids: list[int], tokens: int, policy: str
) -> tuple[list[int], float, float]:
    """One fresh session: (its tokens, seconds seen here, seconds of decoding the engine says)."""
    session = await client.create_session()
    await session.append(ids)
    started = time.perf_counter()
    first = started
    got: list[int] = []
    async for token in session.generate(max_tokens=tokens, draft_policy=policy):
        if not got:
            first = time.perf_counter()
        got.append(token)
    seen_s = time.perf_counter() - first
    done = session.last_done
    await session.close()
    return got, seen_s, 0.0 if done is None else done.total_s - done.prefill_s


def request(
    address: str, method: str, path: str, body: Mapping[str, object] | bytes | None
) -> tuple[int, bytes]:
    """One HTTP call: (status, body). Status 0 = the connection was closed without an answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_WAIT_S)
    payload = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, payload, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer:
    """A streamed answer as its client saw it. Seconds are from the first try; `refused` are the
    statuses, 429 or 503, of the tries before the last one."""

    status: int
    text: str
    is_whole: bool
    first_s: float
    seconds: float
    refused: tuple[int, ...]

    @property
    def is_lost(self) -> bool:
        """Whether the request was not answered to its end."""
        return self.status != 200 or not self.is_whole


def streamed(address: str, body: Mapping[str, object], *, tries: int = 20) -> StreamedAnswer:
    """Ask for a streamed answer; a refusal with Retry-After is obeyed, `tries` times in all."""
    host, _, port = address.rpartition(":")
    began, refused = time.perf_counter(), list[int]()
    while True:
        connection = http.client.HTTPConnection(host, int(port), timeout=_WAIT_S)
        try:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            payload = json.dumps({**body, "stream": True})
            connection.request("POST", path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            pause_s = answer.getheader("retry-after")
            if answer.status in (429, 503) and pause_s and len(refused) + 1 < tries:
                refused.append(answer.status)
                time.sleep(float(pause_s))
                continue
            pieces, first_s, is_whole = [], 0.0, False
            for line in answer:
                is_whole |= line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - began
                    pieces.append(_piece(json.loads(line[6:])))
            status = answer.status
        except (OSError, http.client.HTTPException):
            status, pieces, first_s, is_whole = 0, [], 0.0, False
        finally:
            connection.close()
        return StreamedAnswer(
            status=status,
            text="".join(pieces),
            is_whole=is_whole,
            first_s=first_s,
            seconds=time.perf_counter() - began,
            refused=tuple(refused),
        )


def _piece(event: dict[str, Any]) -> str:
    """The text of one event, or what an error says."""
    if "error" in event:
        return str(event["error"])
    choice = (event.get("choices") or [{}])[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


class MlxLmServer:
    """mlx_lm.server on a free port, with OpenBLAS like our engines, and as many threads."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.model = str(model)
        program = (sys.executable, "-c", _SERVER, str(blas_threads(model)))
        self._command = [*program, "--model", self.model, "--port", str(port)]
        self._child: subprocess.Popen[bytes] | None = None
        self.start_s = 0.0

    def __enter__(self) -> Self:
        started = time.perf_counter()
        self._child = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while request(self.address, "GET", "/health", None)[0] != 200:
            if time.perf_counter() - started > _WAIT_S or self._child.poll() is not None:
                raise RuntimeError("mlx_lm.server did not start")
            time.sleep(0.05)
        self.start_s = time.perf_counter() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        return 0 if self._child is None else self._child.pid


def resident_mb(pid: int) -> float:
    """Resident set of a process in MB (10^6 bytes); Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
