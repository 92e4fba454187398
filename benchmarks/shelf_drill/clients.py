"""The clients of a drill, and what became of each of their requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, AsyncStream, Timeout
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from benchmarks.failover import STORY, Streamed, forms
from benchmarks.report import percentile
from scripts.agents import run_agent

Form = tuple[str, Mapping[str, Any]]
Known = Mapping[str, tuple[Form, Streamed]]
"""Each form of request, by name, with the undisturbed answer."""
HUNG_S = 180.0
_AGENT_S = 420.0
_RETRY_S = 1.0
_SHORT = {
    "claude-code": "--tools Bash --system-prompt 'Call the tool that is asked for.'",
    "codex": "",
}
"""Claude Code's own prompt takes the toy model a minute and a half."""


@dataclass
class Tally:
    """How the requests of a drill ended, and their pauses beyond those of undisturbed answers.

    same      whole, and the undisturbed answer
    refused   with a type, a code and a time to come again, or by a closed port
    broken    in the middle of the answer, with a typed error
    wrong     another answer, a lost connection, an error that no other try helps
    hung      no end within `HUNG_S`
    """

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, end: str, why: str = "") -> None:
        """Count the end of a request."""
        self.ends.setdefault(kind, Counter())[end] += 1
        if end not in ("same", "refused"):
            self.problems.append(f"{kind} {end}: {why[:400]}")
            print(f"{time.strftime('%T')} {self.problems[-1]}", flush=True)

    def count(self, *ends: str) -> int:
        """Requests with one of these ends; none named = all."""
        counted = (item for one in self.ends.values() for item in one.items())
        return sum(number for end, number in counted if not ends or end in ends)

    def show(self) -> None:
        """Print the table."""
        names = ("same", "refused", "broken", "wrong", "hung")
        print(f"{'':<14}{'requests':>10}" + "".join(f"{name:>10}" for name in names))
        for kind, ends in sorted(self.ends.items()):
            row = "".join(f"{ends[name]:>10}" for name in names)
            print(f"{kind:<14}{ends.total():>10}{row}")
        print(f"refusals: {dict(self.refusals)}")
        if self.pauses:
            p50, p95 = percentile(self.pauses, 0.5), percentile(self.pauses, 0.95)
            print(f"pauses p50 {p50:.2f} s, p95 {p95:.2f} s, longest {max(self.pauses):.2f} s")


def told(call: str) -> Form:
    """The request behind the forced call: its result, and an answer in JSON."""
    path, body = forms()["schema"]
    name = "list_words"
    made = {"name": name, "arguments": call.removeprefix(name)}
    calls = [{"id": "call_1", "type": "function", "function": made}]
    turns = [
        *STORY,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "the words were listed"},
    ]
    tools = forms()["call"][1]["tools"]
    return path, body | {"messages": turns, "tools": tools, "tool_choice": "none"}


async def undisturbed(openai: AsyncOpenAI) -> dict[str, tuple[Form, Streamed]]:
    """Each form of request with its answer."""
    found = {name: (form, await stream(openai, form)) for name, form in forms().items()}
    after = told(found["call"][1].texts[0])
    return found | {"told": (after, await stream(openai, after))}


async def stream(openai: AsyncOpenAI, form: Form) -> Streamed:
    """Stream one answer by the openai client, without another try."""
    path, body = form
    got = Streamed(moments=[time.perf_counter()])
    kind: Any = ChatCompletionChunk if path.startswith("chat") else Completion
    chunks = await openai.post(
        f"/{path}", cast_to=kind, body=dict(body), stream=True, stream_cls=AsyncStream[kind]
    )
    async for chunk in chunks:
        got.take(chunk.model_dump())
    return got


def refusal(error: APIError) -> tuple[str, float] | None:
    """Why the request was not taken, and the seconds after which the client may come again; None =
    it is no refusal that another try can help."""
    if isinstance(error.__cause__, httpx2.ConnectError):
        return "port closed", _RETRY_S
    if not isinstance(error, APIStatusError) or error.status_code not in (429, 503):
        return None
    pause_s = error.response.headers.get("retry-after")
    if not (error.code and error.type and pause_s):
        return None
    return f"{error.status_code} {error.code}", float(pause_s)


async def ask(
    openai: AsyncOpenAI, kind: str, form: Form, known: Streamed, tally: Tally
) -> float | None:
    """Ask once; None, or the seconds after which a refused client comes again."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_S):
            got = await stream(openai, form)
    except TimeoutError:
        tally.note(kind, "hung")
    except APIError as error:
        after = (
            f"after {time.monotonic() - began:.1f} s: {error!r} {error.__cause__!r} {error.body}"
        )
        if (refused := refusal(error)) is not None:
            why, pause_s = refused
            tally.refusals[why] += 1
            tally.note(kind, "refused")
            return pause_s
        is_lost = isinstance(error, APIConnectionError | APIStatusError) or not error.code
        tally.note(kind, "wrong" if is_lost else "broken", after)
    except Exception as fault:  # noqa: BLE001 - each is a lost request
        tally.note(kind, "wrong", f"after {time.monotonic() - began:.1f} s: {fault!r}")
    else:
        is_same = got.said == known.said
        tally.note(kind, "same" if is_same else "wrong", str(got.said))
        tally.pauses.append(max(0.0, got.pause_s - known.pause_s))
    return None


async def openai_loop(
    address: str,
    known: Known,
    tally: Tally,
    goes_on: Callable[[], bool],
    rng: random.Random,
    *,
    rest_s: float = 1.0,
) -> None:
    """One request after the other, with rests of up to `rest_s` between them; a refused one comes
    again when it was told to."""
    async with client_of(address) as openai:
        while goes_on():
            name = rng.choice(list(known))
            again_s = await ask(openai, name, *known[name], tally)
            while again_s is not None and goes_on():
                await asyncio.sleep(again_s)
                again_s = await ask(openai, name, *known[name], tally)
            await asyncio.sleep(rng.uniform(0, rest_s))


def client_of(address: str) -> AsyncOpenAI:
    """A client that tries once. The drill itself may stand still for seconds on a busy machine, and
    would take that for a server without an answer."""
    patient = Timeout(600, connect=60)
    url = f"http://{address}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=patient)


async def agent_loop(
    name: str, address: str, folder: Path, tally: Tally, goes_on: Callable[[], bool]
) -> None:
    """An agent program again and again, which repeats by itself what is refused."""
    number = 0
    while goes_on():
        home = folder / f"{name}-{number}"
        began = time.monotonic()
        passed, seen = await asyncio.to_thread(
            run_agent, name, address, home, more=_SHORT[name], limit_s=_AGENT_S
        )
        print(f"{time.strftime('%T')} {name}: {seen}", flush=True)
        answers = json.loads((home / "answers.json").read_text())
        posts = json.loads((home / "requests.json").read_text())
        refused = [one for one in answers if one.startswith(("429", "503", "529"))]
        for one in refused:
            tally.note(f"{name} call", "refused")
            tally.refusals[f"{name} {one[:200]}"] += 1
        said = (home / "output.txt").read_text().strip().splitlines()
        is_right = passed and said[-1:] == ['"Done."']
        is_hung = time.monotonic() - began >= _AGENT_S
        end = "same" if is_right else "hung" if is_hung else "wrong"
        tally.note(name, end, f"{seen} {len(posts)} {answers[-2:]} {said[-3:]}")
        number += 1
