"""Clients of a node whose prompts repeat, and what a node that begins from nothing answers.

`ask` is one request over HTTP, until its end or until its client leaves. `Cold` is a node that
keeps no KV, so that each answer of it was computed from the prompt alone. Neither node has
OpenBLAS: without it a row's bits do not depend on what is computed beside it, and answers of both
must be equal to the last token.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kakeya.cli.child import NodeProcess
from tests.node.nodes import DRAFTER

WORDS = ("what", "is", "lent", "comes", "back", "def", "return", "None", "class", "if", "for")
MODEL = DRAFTER
"""Served itself: without OpenBLAS it reads prompts eight times faster than the larger one."""
Message = dict[str, str]
Body = dict[str, Any]
WITHOUT_OPENBLAS = """
import sys
if "kakeya.node.engine_main" in sys.orig_argv:
    import mlx.core  # nothing that is loaded later takes the place of its own BLAS
"""


@dataclass(slots=True)
class Answer:
    """What was said. `usage` is {} where a client left before the end."""

    text: str = ""
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def cached(self) -> int:
        """0 where a stop string ended it: then nobody knows."""
        return int(self.usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"])

    def is_like(self, other: Answer) -> bool:
        """Whether both said the same, and of the same prompt."""
        ours = (self.text, self.finish, self.prompt, self.usage["completion_tokens"])
        return ours == (other.text, other.finish, other.prompt, other.usage["completion_tokens"])


@dataclass(eq=False)
class Refusal(Exception):
    """A request that was not served; `retry_after_s` None = it need not come again."""

    status: int
    code: str
    message: str
    retry_after_s: float | None


def exact_program(folder: Path, **variables: str) -> tuple[str, ...]:
    """The command of a daemon whose engines have no OpenBLAS, with variables of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(WITHOUT_OPENBLAS)
    top = Path(__file__).parents[2]
    given = [f"{name}={value}" for name, value in variables.items()]
    path = f"PYTHONPATH={folder}:{top}"
    return (
        "env",
        "-u",
        "KAKEYA_SOAK_MINUTES",
        path,
        *given,
        sys.executable,
        "-m",
        "kakeya.node.daemon",
    )


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


async def ask(http: httpx.AsyncClient, address: str, body: Body) -> Answer:
    """One chat request. Raises Refusal, and what httpx raises."""
    url = f"http://{address}/v1/chat/completions"
    if not body.get("stream"):
        reply = await http.post(url, json=body)
        if reply.status_code != 200:
            raise _refusal(reply, reply.text)
        choice = reply.json()["choices"][0]
        return Answer(choice["message"]["content"], choice["finish_reason"], reply.json()["usage"])
    answer = Answer()
    async with http.stream("POST", url, json=body) as reply:
        if reply.status_code != 200:
            raise _refusal(reply, (await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                _take(answer, json.loads(line.removeprefix("data: ")))
    if not answer.finish or not answer.usage:
        raise httpx.RemoteProtocolError("a stream ended in its middle")
    return answer


async def warm(http: httpx.AsyncClient, address: str, body: Body) -> dict[str, Any]:
    """Send a prefix ahead. Raises as `ask`."""
    reply = await http.post(f"http://{address}/v1/precache", json=body)
    if reply.status_code != 200:
        raise _refusal(reply, reply.text)
    said: dict[str, Any] = reply.json()
    return said


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        # Its headers are gone: it may come again at once.
        raise Refusal(200, error["code"], error["message"], 1.0)
    for choice in event["choices"]:
        answer.text += choice["delta"].get("content") or ""
        answer.finish = choice["finish_reason"] or answer.finish
    answer.usage = event.get("usage") or answer.usage


def _refusal(reply: httpx.Response, text: str) -> Refusal:
    said = json.loads(text)["error"]
    after = reply.headers.get("retry-after", "1" if reply.status_code == 504 else None)
    retry_s = None if after is None else float(after)
    return Refusal(reply.status_code, said["code"], said["message"], retry_s)


@dataclass
class Cold:
    """A node that keeps nothing, and what of the other's answers it was asked about."""

    node: NodeProcess
    http: httpx.AsyncClient
    compared: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, body: Body) -> Answer:
        """What comes of a request that finds nothing to begin from."""
        known = {"model": MODEL, "messages": body["messages"], "max_tokens": body["max_tokens"]}
        shaping = ("temperature", "top_p", "top_k", "seed", "stop")
        known |= {name: body[name] for name in shaping if name in body}
        while True:
            try:
                found = await ask(self.http, self.node.http, known)
            except Refusal as refused:
                if refused.retry_after_s is None:
                    raise
                await asyncio.sleep(refused.retry_after_s)
                continue
            assert found.cached == 0, f"the cold node found {found.cached} tokens"
            return found

    def compare(self, body: Body, warm: Answer, cold: Answer) -> None:
        """Note whether an answer is what it ought to be."""
        self.compared += 1
        if not warm.is_like(cold):
            self.differing.append({"body": body, "warm": repr(warm), "cold": repr(cold)})
