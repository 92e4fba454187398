"""Eight agents with one long system prompt, many turns each, through HTTP on one node.

Counts which prompt tokens are computed: none of the shared part may be computed twice, up to its
last token, also after `kill -9` of the engine and after a restart of the node. Shared is what the
template writes of the system prompt, and in front of what a user says. Beside it, in the same run:
what such turns take on mlx_lm.server, and how long a 1000-token prompt takes cold, again, and after
a restart; the first two on mlx_lm.server too, in turns. `engine_restarts` of a line: how often the
node started an engine again while that was measured, beside the kill that it is about. Anything but
0 means that the figures include a load.

    .venv/bin/python -m benchmarks.eight_agents [--turns 20]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import random_model
from benchmarks.nodes import MlxLmServer, request, wait_ready
from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess
from kakeya.text.chat import Chat
from kakeya.text.prefix import encode_prefix
from kakeya.text.text import TextModel

AGENTS = 8
SYSTEM_WORDS = 1830
"""A little more than 2000 tokens."""
PROMPT_WORDS = 870
"""About 1000 tokens."""
ANSWER_TOKENS = 24
_WORDS = ("import", "os", "sys", "json", "class", "def", "return", "value", "self", "open", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one request cost."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float


def words(count: int, seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def ask(address: str, body: dict[str, object]) -> tuple[Turn, str]:
    """One chat completion, not streamed."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    started = time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    payload = json.loads(answer.read())
    seconds = time.perf_counter() - started
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{address}: {answer.status} {payload}")
    usage = payload["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    turn = Turn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        completion_tokens=usage["completion_tokens"],
        seconds=seconds,
    )
    return turn, payload["choices"][0]["message"]["content"]


class Agents:
    """Conversations that share a system prompt; each turn waits for the one before it."""

    def __init__(self, run: str) -> None:
        self.system = {"role": "system", "content": words(SYSTEM_WORDS, f"system {run}")}
        self._said = [[self.system] for _ in range(AGENTS)]
        self._run = run

    def turns(self, address: str, model: str, count: int, **more: object) -> list[Turn]:
        """`count` turns of every agent, all agents at once."""

        def agent(number: int) -> list[Turn]:
            taken = []
            said = self._said[number]
            for _ in range(count):
                said.append(
                    {"role": "user", "content": words(12, f"{self._run} {number} {len(said)}")}
                )
                body: dict[str, object] = {
                    "model": model,
                    "messages": said,
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 0,
                    **more,
                }
                turn, text = ask(address, body)
                said.append({"role": "assistant", "content": text})
                taken.append(turn)
            return taken

        with ThreadPoolExecutor(AGENTS) as pool:
            return [turn for taken in pool.map(agent, range(AGENTS)) for turn in taken]


def computed_of_shared(turns: list[Turn], shared: int) -> int:
    """Tokens of the shared part that were computed, over all turns."""
    return sum(max(0, shared - turn.cached_tokens) for turn in turns)


def say(what: str, shared: int, times: int, turns: list[Turn], restarts: int) -> None:
    """Tell how much of the shared part was computed; `times` it may be."""
    computed, allowed = computed_of_shared(turns, shared), times * shared
    prompt = sum(turn.prompt_tokens for turn in turns)
    emit(
        f"{AGENTS} agents, {what}: tokens of the shared prompt that were computed",
        ours=computed,
        baseline=allowed,
        ratio=computed / max(1, allowed),
        goal=f"<= {allowed}",
        met=computed <= allowed,
        requests=len(turns),
        shared=shared,
        cached_share=round(sum(turn.cached_tokens for turn in turns) / prompt, 4),
        engine_restarts=restarts,
    )


def first_token_s(address: str, model: str, prompt: str) -> float:
    """Seconds of a one-token request."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
        "temperature": 0,
    }
    return ask(address, body)[0].seconds


async def engine_of(node: NodeProcess) -> tuple[int, int]:
    """Of the node's one engine: (its process id, how often it was started again)."""
    status = json.loads(
        (await asyncio.to_thread(request, node.http, "GET", "/api/v1/status", None))[1]
    )
    model = next(model for model in status["models"] if model.get("pid"))
    return int(model["pid"]), int(model["restarts"])


class Restarts:
    """How often a node started its engine again, part by part of what is measured on it."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._told = 0

    async def here(self, *, own: int = 0) -> int:
        """In the part that ends here, beside its `own` kills."""
        # One that just died counts when it is there again.
        await wait_ready(self._node)
        _, restarts = await engine_of(self._node)
        since, self._told = restarts - self._told - own, restarts
        return since


async def shared_tokens(folder: Path, agents: Agents) -> int:
    """How many tokens all prompts of these agents begin with."""
    text = await asyncio.to_thread(TextModel, folder, time.time)
    return len(await encode_prefix(text, Chat(messages=(agents.system,)), at_most=1 << 20))


async def compare(folder: Path, turns: int) -> None:
    name, off = folder.name, {"draft_policy": "off"}
    with tempfile.TemporaryDirectory() as home, MlxLmServer(folder) as server:
        ours, theirs = Agents("a"), Agents("b")
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            restarts = Restarts(node)
            shared = await shared_tokens(folder, ours)

            def run(
                agents: Agents, address: str, model: str, **more: object
            ) -> Callable[[], list[Turn]]:
                return lambda: agents.turns(address, model, turns, **more)

            started = time.perf_counter()
            taken = await asyncio.to_thread(run(ours, node.http, name, **off))
            ours_s = time.perf_counter() - started
            in_turns = await restarts.here()
            say(f"{turns} turns each", shared, 1, taken, in_turns)
            made = sum(turn.completion_tokens for turn in taken)
            started = time.perf_counter()
            other = await asyncio.to_thread(run(theirs, server.address, server.model))
            theirs_s = time.perf_counter() - started
            other_made = sum(turn.completion_tokens for turn in other)
            ratio = (made / ours_s) / (other_made / theirs_s)
            emit(
                f"{AGENTS} agents, {turns} turns each, answer tokens/s, {name}",
                ours=made / ours_s,
                baseline=other_made / theirs_s,
                ratio=ratio,
                goal=">= 1.3x mlx_lm.server",
                met=ratio >= 1.3,
                engine_restarts=in_turns,
            )
            cold, again, their_cold, their_again = [], [], [], []
            for serial in range(5):
                prompt = words(PROMPT_WORDS, f"cold {serial}")
                for taken_s in (cold, again):
                    taken_s.append(await asyncio.to_thread(first_token_s, node.http, name, prompt))
                for taken_s in (their_cold, their_again):
                    taken_s.append(
                        await asyncio.to_thread(first_token_s, server.address, server.model, prompt)
                    )
            in_prompts = await restarts.here()
            os.kill((await engine_of(node))[0], signal.SIGKILL)
            taken = await asyncio.to_thread(lambda: ours.turns(node.http, name, 1, **off))
            say("after kill -9 of the engine", shared, 0, taken, await restarts.here(own=1))
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            restarts = Restarts(node)
            restarted = [
                await asyncio.to_thread(
                    first_token_s, node.http, name, words(PROMPT_WORDS, f"cold {serial}")
                )
                for serial in range(5)
            ]
            in_restarted = await restarts.here()
            taken = await asyncio.to_thread(lambda: ours.turns(node.http, name, 1, **off))
            say("after a restart of the node", shared, 0, taken, await restarts.here())
    for what, seconds, in_both in (
        ("again", again, in_prompts),
        ("after a restart", restarted, in_prompts + in_restarted),
    ):
        ratio = median(cold) / median(seconds)
        emit(
            f"first token of a 1000-token prompt {what}, ms, {name}",
            ours=1000 * median(seconds),
            baseline=1000 * median(cold),
            ratio=ratio,
            goal=">= 20x faster than cold",
            met=ratio >= 20,
            engine_restarts=in_both,
        )
        ratio = median(their_cold) / median(seconds)
        emit(
            f"first token of a 1000-token prompt {what}, against mlx_lm.server's cold, ms, {name}",
            ours=1000 * median(seconds),
            baseline=1000 * median(their_cold),
            ratio=ratio,
            goal=">= 20x faster than cold",
            met=ratio >= 20,
            engine_restarts=in_both,
            their_own_ratio=round(median(their_cold) / median(their_again), 1),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    asked = parser.parse_args()
    asyncio.run(compare(random_model("3m"), asked.turns))
