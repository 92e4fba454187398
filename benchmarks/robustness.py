"""Single requests that ought to be refused, and clients that leave: what they do to a server.

Every input goes to a node and to mlx_lm.server; afterwards a normal request must still work.
mlx_lm.server is started anew after each input that broke it. Abandoned work is timed by the
processor time that the server's processes still use after the client has left.

    .venv/bin/python -m benchmarks.robustness
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import random_model
from benchmarks.nodes import MlxLmServer, request, wait_ready
from benchmarks.report import emit
from kakeya.cli.child import NodeProcess

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_WINDOW_S, _IDLE_SHARE, _IDLE_S, _GIVE_UP_S = 0.05, 0.3, 0.5, 60.0
_JSON = "content-type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Input:
    """One raw HTTP request; MODEL stands for the name of the served model."""

    name: str
    path: str
    body: bytes
    headers: str = ""

    def to(self, address: str, model: str) -> tuple[int, bytes]:
        """Send it: (status, body), status 0 when the connection ends without an answer."""
        body = self.body.replace(b"MODEL", model.encode())
        length = "" if "ength" in self.headers else f"content-length: {len(body)}\r\n"
        head = f"POST {self.path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
        return _raw(address, (head + _JSON + self.headers + length + "\r\n").encode() + body)


def _raw(address: str, message: bytes) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(message)
            while part := connection.recv(65536):
                answer += part
    except OSError:
        pass
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split()
    return (int(words[1]), body) if len(words) > 1 and words[1].isdigit() else (0, b"")


def _chat(name: str, **change: object) -> Input:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "MODEL", "messages": messages, "max_tokens": 4, **change}
    return Input(name, CHAT, json.dumps(body).encode())


def _inputs() -> Iterable[Input]:
    for stop in (5, [5], ["a", 5]):
        yield _chat(f"stop {stop}", stop=stop)
    yield _chat("top_k beyond the vocabulary", top_k=99999, temperature=1.0)
    yield Input("empty prompt", TEXT, b'{"model": "MODEL", "prompt": "", "max_tokens": 4}')
    yield _chat("logit_bias beyond the vocabulary", logit_bias={"99999999": 5})
    yield Input("invalid UTF-8", CHAT, b'{"model": "\xff\xfe"}')
    yield _chat("seed -1", seed=-1)
    yield Input("content-length -5", CHAT, b"{}", "content-length: -5\r\n")
    yield _chat("empty messages", messages=[])
    yield _chat("missing role", messages=[{"content": "hi"}])
    yield _chat("unknown model", model="no-such-model")
    yield Input("prompt as a number", TEXT, b'{"model": "MODEL", "prompt": 5}')
    yield _chat("n 2", n=2)
    yield Input(
        "temperature NaN",
        CHAT,
        b'{"model":"MODEL","messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    )
    yield _chat("max_tokens true", max_tokens=True)
    yield _chat("content as a number", messages=[{"role": "user", "content": 5}])
    yield Input("bad JSON", CHAT, b'{"model": ')
    yield _chat("negative max_tokens", max_tokens=-1)


def _works(address: str, model: str) -> bool:
    body = {"model": model, "prompt": "def f():", "max_tokens": 2}
    return request(address, "POST", TEXT, body)[0] == 200


def _is_json_4xx(status: int, body: bytes) -> bool:
    try:
        return 400 <= status < 500 and isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _busy_seconds(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / 100


def abandoned_s(address: str, body: dict[str, object], pids: Callable[[], list[int]]) -> float:
    """Leave a request after 0.3 s; seconds until the server's processes are idle again."""
    host, _, port = address.rpartition(":")
    payload = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(payload)}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + _JSON + "\r\n").encode() + payload)
        time.sleep(0.3)
    left = last_busy = time.perf_counter()
    used = _busy_seconds(pids())
    while (now := time.perf_counter()) - last_busy < _IDLE_S and now - left < _GIVE_UP_S:
        time.sleep(_WINDOW_S)
        before, used = used, _busy_seconds(pids())
        if used - before > _IDLE_SHARE * _WINDOW_S:
            last_busy = time.perf_counter()
    return last_busy - left


def _engine_pids(node: NodeProcess) -> list[int]:
    status = json.loads(request(node.http, "GET", "/api/v1/status", None)[1])
    return [node.pid, *(model["pid"] for model in status["models"] if model.get("pid"))]


def _try_inputs_on_mlx_lm(folder: Path) -> int:
    """How many inputs mlx_lm.server answers with a JSON 4xx and survives."""
    good = 0
    server = MlxLmServer(folder)
    with server:
        server_now = server
        for bad in _inputs():
            status, body = bad.to(server_now.address, server_now.model)
            if _works(server_now.address, server_now.model):
                good += _is_json_4xx(status, body)
                continue
            server_now.__exit__(None, None, None)
            server_now = MlxLmServer(folder).__enter__()
        server_now.__exit__(None, None, None)
    return good


async def main() -> None:
    folder = random_model("3m")
    count = len(list(_inputs()))
    long_decode = {"prompt": "def f():", "max_tokens": 4000}
    long_prefill = {"prompt": "import os\nx = 1\n" * 800, "max_tokens": 4}
    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            good = 0
            for bad in _inputs():
                status, body = await asyncio.to_thread(bad.to, node.http, folder.name)
                works = await asyncio.to_thread(_works, node.http, folder.name)
                if works and _is_json_4xx(status, body):
                    good += 1
                else:
                    print(f"not refused as it should be: {bad.name}: {status} {body[:120]!r}")
            pids = _engine_pids(node)
            ours = [
                await asyncio.to_thread(
                    abandoned_s, node.http, {"model": folder.name, **body}, lambda: pids
                )
                for body in (long_decode, long_prefill)
            ]
    theirs = _try_inputs_on_mlx_lm(folder)
    emit(
        "bad inputs answered with a JSON 4xx and survived",
        ours=good,
        baseline=theirs,
        ratio=good / count,
        goal=f"all {count}",
        met=good == count,
    )
    with MlxLmServer(folder) as server:
        for name, body, mine in zip(
            ("decode", "prefill"), (long_decode, long_prefill), ours, strict=True
        ):
            wanted = {"model": server.model, **body}
            baseline = abandoned_s(server.address, wanted, lambda: [server.pid])
            emit(
                f"work after a client left, not streaming, s, {name}",
                ours=mine,
                baseline=baseline,
                ratio=mine / max(baseline, 1e-3),
                goal="<= 0.5 s",
                met=mine <= 0.5,
            )


if __name__ == "__main__":
    asyncio.run(main())
