"""The length of the way of one streamed chunk, from an engine's message to the bytes of HTTP."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType

import pytest

import kakeya
from kakeya.backends.engine import guard
from kakeya.backends.engine.process import Command
from kakeya.backends.engines import EngineCommand
from kakeya.generation.spec import ModelSpec
from tests.gateway.toy import Served, make_folder, serving
from tests.prefix.world import TINY, node

PACKAGE = str(Path(kakeya.__file__).parent)
MOST_CALLS, MOST_GENERATORS = 22, 4
SEED = 7
"""Of an answer that is long enough."""


class Calls:
    """Calls and resumptions of Kakeya's functions in this thread, by the chunk that they are for;
    a chunk ends with the call that sends it."""

    def __init__(self) -> None:
        self.chunks: list[Counter[str]] = []
        self.generators: list[int] = []
        self._now: Counter[str] = Counter()
        self._generators: set[int] = set()

    def __enter__(self) -> Calls:
        sys.setprofile(self._saw)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _saw(self, frame: FrameType, what: str, _: object) -> None:
        code = frame.f_code
        if what == "return" and code.co_qualname == "Connection.send_event":
            self.chunks.append(self._now)
            self.generators.append(len(self._generators))
            self._now, self._generators = Counter(), set()
        if what == "call" and code.co_filename.startswith(PACKAGE):
            self._now[code.co_qualname] += 1
            if code.co_flags & inspect.CO_ASYNC_GENERATOR:
                self._generators.add(id(frame))


def engine(texts: Path) -> EngineCommand:
    """An engine that sends a message for each token, some time apart."""
    module = [sys.executable, "-m", "tests.backends.engine.toy_engine", "--delay-s", "0.02"]

    def command(_: ModelSpec, __: str) -> Command:
        return lambda socket: [*module, "--socket", str(socket), "--model-path", str(texts)]

    return command


async def test_a_chunk_in_the_middle_of_a_chat_passes_few_generators_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "TELL_S", 60.0)  # beside slow tokens its calls would count
    texts = await asyncio.to_thread(make_folder, tmp_path / "texts")
    async with (
        node(tmp_path / "node", command=engine(texts)) as here,
        serving(here.model) as served,
    ):
        await here.model.ready(60)
        await said(served)  # what is looked up once for each token
        tries = 0
        while True:
            tries += 1
            with Calls() as calls:
                pieces = await said(served)
            assert len(calls.chunks) > 20, pieces
            middle = slice(4, -4)
            # On a busy machine two messages may come at once, and their tokens in one chunk.
            single = [one for one in calls.chunks[middle] if one["EngineClient.decode"] == 2]
            assert len(single) > 5, calls.chunks
            usual = sorted(single, key=Counter.total)[len(single) // 2]
            # There, too, most chunks of an answer may pass beside calls of other work.
            if usual.total() <= MOST_CALLS or tries == 5:
                break
    assert usual["GenerationRoute._stream"] == 1, usual
    assert median(calls.generators[middle]) <= MOST_GENERATORS, usual
    assert usual.total() <= MOST_CALLS, dict(usual)


async def said(served: Served) -> list[str | None]:
    stream = await served.openai.chat.completions.create(
        model=TINY,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=60,
        temperature=1,
        seed=SEED,
        stream=True,
    )
    return [chunk.choices[0].delta.content async for chunk in stream]
