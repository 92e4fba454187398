"""What the gateway adds to a token: one SSE event from frame to socket, against json.dumps of it.

Three lines: the making of one event in process (microseconds); the whole path over a loopback
socket, per token of a stream from a model that costs nothing (milliseconds; goal <= 0.15); and the
processor time of a chat's token with tools, whose marks are looked for, against one without (us).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kakeya.gateway.answer import GeneratedAnswer
from kakeya.gateway.openai.requests import parse_chat
from kakeya.gateway.reply import AnswerHead
from kakeya.generation.frames import Done, Frame, StopReason, Tokens
from kakeya.generation.request import DecodeRequest
from kakeya.text.text import TextModel
from kakeya.text.tools.answer import Said
from tests.gateway.toy import ToyModel, make_folder, serving

TOKENS = 2000
ROUNDS = 7


class FreeModel(ToyModel):
    """Commits one token per step and takes no time for it, but lets the loop turn once."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last."""
        for frame in frames(request.max_tokens):
            await asyncio.sleep(0)
            yield frame
        yield Done(reason=StopReason.MAX_TOKENS)


def frames(count: int) -> list[Tokens]:
    noise = random.Random(1)
    return [Tokens(token_ids=(noise.randrange(100, 300),)) for _ in range(count)]


def per_token_us(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / TOKENS * 1e6


def making(folder: Path) -> tuple[float, float]:
    text = TextModel(folder, time.time)
    reply = parse_chat({"model": "m", "messages": [{"role": "user", "content": "a"}]})
    reply.head = AnswerHead(answer_id="a", created_at=1, model="m", prompt_tokens=1)
    steps = frames(TOKENS)

    def ours() -> list[bytes]:
        answer = GeneratedAnswer(text.detokenizer())
        return [reply.part(answer, part) for frame in steps for part in answer.take(frame)]

    def plain() -> list[bytes]:
        answer = GeneratedAnswer(text.detokenizer())
        chunk: dict[str, object] = {"id": "a", "object": "chat.completion.chunk", "created": 1}
        return [
            b"data: %b\n\n"
            % json.dumps(
                {
                    **chunk,
                    "model": "m",
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": part.text},
                            "finish_reason": None,
                            "logprobs": None,
                        }
                    ],
                }
            ).encode()
            for frame in steps
            for part in answer.take(frame)
            if isinstance(part, Said)
        ]

    ours_us, plain_us = [], []
    for _ in range(ROUNDS):
        ours_us.append(per_token_us(ours))
        plain_us.append(per_token_us(plain))
    return statistics.median(ours_us), statistics.median(plain_us)


async def bare_turns_us() -> float:
    """The same generator with nobody behind it: what the measure itself costs."""
    began = time.perf_counter()
    for _ in frames(TOKENS):
        await asyncio.sleep(0)
    return (time.perf_counter() - began) / TOKENS * 1e6


async def socket_ms(folder: Path) -> float:
    body = json.dumps(
        {"model": "toy", "prompt": "hi", "max_tokens": TOKENS, "stream": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    model = FreeModel(folder, context_tokens=TOKENS + 10)
    taken = []
    async with serving(model) as served:
        for _ in range(ROUNDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            began = time.perf_counter()
            writer.write(head % len(body) + body)
            while b"[DONE]" not in await reader.read(1 << 16):
                pass
            whole_us = (time.perf_counter() - began) / TOKENS * 1e6
            taken.append((whole_us - await bare_turns_us()) / 1000)
            writer.close()
    return statistics.median(taken)


async def chat_cpu_us(folder: Path) -> tuple[float, float]:
    """Processor time of this process per token of a streamed chat, with tools and without."""
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    model = FreeModel(folder, context_tokens=TOKENS + 2000)
    taken: dict[bool, list[float]] = {True: [], False: []}
    async with serving(model) as served:
        for has_tools in (True, False) * ROUNDS:
            asked = {
                "model": "toy",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": TOKENS,
                "stream": True,
                "tools": [tool] if has_tools else [],
            }
            body = json.dumps(asked).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(body)
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            began = time.process_time()
            writer.write(head + body)
            while b"[DONE]" not in await reader.read(1 << 16):
                pass
            taken[has_tools].append((time.process_time() - began) / TOKENS * 1e6)
            writer.close()
    return statistics.median(taken[True]), statistics.median(taken[False])


def main() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place))
        ours, plain = making(folder)
        over_socket = asyncio.run(socket_ms(folder))
        with_tools, without = asyncio.run(chat_cpu_us(folder))
    rows = [
        ("gateway: one SSE event, us", ours, plain, plain / ours, ">= 2x json.dumps"),
        ("gateway: per token to a socket, ms", over_socket, 0.77, 0.77 / over_socket, "<= 0.15"),
        (
            "gateway: CPU of a chat's token, tools, us",
            with_tools,
            without,
            without / with_tools,
            "<= 150",
        ),
    ]
    for what, figure, baseline, ratio, goal in rows:
        row = {"what": what, "ours": round(figure, 4), "baseline": round(baseline, 4)}
        row |= {"ratio": round(ratio, 2), "goal": goal, "commit": commit}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
