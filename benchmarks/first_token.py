"""The first token of a 1000-token prompt: computed here, again, from a peer, beside 8 streams, and
after a restart of the node.

Two nodes serve one model. The first one computes some prompts, each followed by the same again;
once the second one has heard on its card what it holds, the same prompts are asked there, each next
to one that nobody has seen. At the end the first one is started again, and asked for them once
more. What a request takes beside its prompt is shown by one of a few tokens.

    .venv/bin/python -m benchmarks.first_token
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import PROMPT_WORDS, Turn, ask, words
from benchmarks.long_prompt import STREAMS, stream
from benchmarks.models import any_model, repeats
from benchmarks.nodes import wait_ready
from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess

PROMPTS = 5
CARD_S = 40.0
"""A card tells of other blocks at most each 30 s."""
_serial = itertools.count()


def first_token(address: str, model: str, prompt: str) -> Turn:
    """A one-token request."""
    messages = [{"role": "user", "content": prompt}]
    return ask(address, {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0})[
        0
    ]


def unseen() -> str:
    return words(PROMPT_WORDS, f"unseen {next(_serial)}")


def beside_streams(address: str, model: str) -> tuple[list[float], list[float]]:
    """Seconds of new prompts and of the same again, while streams are decoded."""
    began = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(STREAMS):
            pool.submit(stream, address, model, began, draft_policy="off")
        began.wait()
        prompts = [unseen() for _ in range(3)]
        cold = [first_token(address, model, prompt).seconds for prompt in prompts]
        again = [first_token(address, model, prompt).seconds for prompt in prompts]
    return cold, again


def say(what: str, taken: list[float], cold: list[float], least: float, **more: object) -> None:
    ratio = median(cold) / median(taken)
    emit(
        f"first token of a 1000-token prompt {what}, ms",
        ours=1000 * median(taken),
        baseline=1000 * median(cold),
        ratio=ratio,
        goal=f">= {least}x faster than cold",
        met=ratio >= least,
        **more,
    )


async def compare(folder: Path) -> None:
    name = folder.name
    flags = ("--model", str(folder), "--no-mdns")

    async def taken(node: NodeProcess, prompt: str) -> Turn:
        return await asyncio.to_thread(first_token, node.http, name, prompt)

    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home) / "a", *flags) as first:
            await wait_ready(first)
            prompts = [unseen() for _ in range(repeats(PROMPTS))]
            cold, again, short = [], [], []
            # Alone: beside a second node it would send some of them there.
            for prompt in prompts:
                cold.append((await taken(first, prompt)).seconds)
                again.append((await taken(first, prompt)).seconds)
                short.append((await taken(first, f"Hi {next(_serial)}")).seconds)
            say("again", again, cold, 20, short_prompt_ms=round(1000 * median(short), 2))
            beside = await asyncio.to_thread(beside_streams, first.http, name)
            say(f"again, beside {STREAMS} streams", beside[1], beside[0], 1)
            async with NodeProcess(Path(home) / "b", *flags, "--peer", first.grpc) as second:
                await wait_ready(second)
                await asyncio.sleep(CARD_S)
                fetched, fresh = [], []
                for prompt in prompts:
                    fresh.append((await taken(second, unseen())).seconds)
                    fetched.append(await taken(second, prompt))
                say(
                    "that a peer has computed",
                    [turn.seconds for turn in fetched],
                    fresh,
                    1,
                    cached_tokens=[turn.cached_tokens for turn in fetched],
                )
        async with NodeProcess(Path(home) / "a", *flags) as restarted:
            await wait_ready(restarted)
            turns = [await taken(restarted, prompt) for prompt in prompts]
            status = await asyncio.to_thread(restarted.api.get, "/api/v1/status")
            say(
                "after a restart",
                [turn.seconds for turn in turns],
                cold,
                20,
                first_ms=round(1000 * turns[0].seconds, 2),
                cached_tokens=[turn.cached_tokens for turn in turns],
                tokens_from=status["prefixes"]["tokens"],
            )


if __name__ == "__main__":
    asyncio.run(compare(any_model("3m")))
