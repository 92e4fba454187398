"""Conversations that name themselves, through HTTP on one node: how much of their prompts is found.

    one of 50 turns behind a prompt of 4000 tokens      tokens found, of all tokens of its prompts
    100 of 10 turns each on 16 slots, eight at once     turns that hit, of all and of those that are
                                                        not a conversation's first

A turn hits when it finds at least the whole blocks of the prompt before its own, whose last token
was not computed ahead; a first turn has nothing to hit. Counted is what answers say:
`usage.prompt_tokens_details.cached_tokens`.

    .venv/bin/python -m benchmarks.conversations
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import Restarts, Turn, ask, words
from benchmarks.models import random_model
from benchmarks.nodes import wait_ready
from benchmarks.report import emit
from kakeya.cli.child import NodeProcess

LONG_WORDS, LONG_TURNS = 3650, 50
"""A little more than 4000 tokens."""
CONVERSATIONS, TURNS, SLOTS, AT_ONCE = 100, 10, 16, 8
OPENING_WORDS = 300
"""Of each conversation's own system prompt: more than a block."""
BLOCK = 256
ANSWER_TOKENS = 8


class Conversation:
    """What was said under one name, and what each turn cost."""

    def __init__(self, name: str, opening: str) -> None:
        self.turns: list[Turn] = []
        self._name = name
        self._said = [{"role": "system", "content": opening}]

    def turn(self, address: str, model: str) -> None:
        """One turn more."""
        said = self._said
        said.append({"role": "user", "content": words(12, f"{self._name} {len(said)}")})
        body: dict[str, object] = {
            "model": model,
            "messages": said,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "conversation_id": self._name,
        }
        turn, text = ask(address, body)
        said.append({"role": "assistant", "content": text})
        self.turns.append(turn)

    @property
    def hits(self) -> int:
        """Turns that found at least the whole blocks of the prompt before theirs, without its last
        token."""
        pairs = zip(self.turns, self.turns[1:], strict=False)
        return sum(
            now.cached_tokens >= (before.prompt_tokens - 1) // BLOCK * BLOCK
            for before, now in pairs
        )


def one_long(address: str, model: str) -> Conversation:
    """All its turns, one behind the other."""
    long = Conversation("long", words(LONG_WORDS, "long"))
    for _ in range(LONG_TURNS):
        long.turn(address, model)
    return long


def many(address: str, model: str) -> list[Conversation]:
    """Each conversation's first turn, then each one's second, and so on."""
    rooms = [
        Conversation(f"room-{number}", words(OPENING_WORDS, f"room {number}"))
        for number in range(CONVERSATIONS)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(TURNS):
            list(pool.map(lambda room: room.turn(address, model), rooms))
    return rooms


async def measure(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "node.toml"
        config.write_text(f"[precache]\nparallel = {SLOTS}\n")
        flags = ("--model", str(folder), "--config", str(config))
        async with NodeProcess(Path(home), *flags) as node:
            await wait_ready(node)
            restarts, name = Restarts(node), folder.name
            started = time.perf_counter()
            long = await asyncio.to_thread(one_long, node.http, name)
            say_long(long.turns, time.perf_counter() - started, await restarts.here())
            started = time.perf_counter()
            rooms = await asyncio.to_thread(many, node.http, name)
            say_many(rooms, time.perf_counter() - started, await restarts.here())


def say_long(turns: list[Turn], seconds: float, restarts: int) -> None:
    found = sum(turn.cached_tokens for turn in turns)
    say(
        f"{LONG_TURNS} turns behind {turns[0].prompt_tokens} tokens: share of prompts found",
        found / sum(turn.prompt_tokens for turn in turns),
        least=0.95,
        seconds=round(seconds, 1),
        engine_restarts=restarts,
    )


def say_many(rooms: list[Conversation], seconds: float, restarts: int) -> None:
    hits = sum(room.hits for room in rooms)
    turns = sum(len(room.turns) for room in rooms)
    shortest = min(room.turns[0].prompt_tokens for room in rooms)
    what = f"{CONVERSATIONS} conversations x {TURNS} turns on {SLOTS} slots: share of"
    for which, count, least in (("turns", turns, 0.895), ("warm turns", turns - len(rooms), 0.99)):
        say(
            f"{what} {which} that hit",
            hits / count,
            least=least,
            shortest_prompt=shortest,
            seconds=round(seconds, 1),
            engine_restarts=restarts,
        )


def say(what: str, share: float, *, least: float, **more: object) -> None:
    """Tell a share; beside it stands what it is to be at least."""
    emit(
        what,
        ours=share,
        baseline=least,
        ratio=share / least,
        goal=f">= {least}",
        met=share >= least,
        **more,
    )


if __name__ == "__main__":
    asyncio.run(measure(random_model("3m")))
