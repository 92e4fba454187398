"""A GGUF file behind a real llama-server: what callers see, and what happens when parts die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.llama.http import call
from kakeya.core.errors import ConfigError, InvalidArgument, UnknownMethod, Unsupported
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.frames import Done, Progress, StopReason, Tokens
from kakeya.generation.kv import PageRef
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.text.text import TextModel
from tests import findings
from tests.backends.llama.server import TOOLS, llama, toy_gguf
from tests.gateway.toy import serving
from tests.waiting import until

ASKED: Any = {"role": "user", "content": "Call the tool § get_weather."}
LONG = "def hello(x):\n    return x\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def taken(backend: EngineBackend, request: DecodeRequest) -> tuple[list[int], Done]:
    ids: list[int] = []
    async for frame in backend.decode(request):
        if isinstance(frame, Tokens):
            ids += frame.token_ids
    assert isinstance(frame, Done)
    return ids, frame


def prompt(facts: ModelFacts, text: str = LONG) -> list[int]:
    read = TextModel(Path(facts.model_path), wall=lambda: 0.0)
    return list(read.tokenizer.encode(text, add_special_tokens=False).ids)


async def test_the_tokens_are_those_of_mlx(llama_server: Path, model: Path) -> None:
    """Greedy, of the same weights, behind the same ids: plain, with a bias, and behind an end that
    the request does not ask for."""
    mlx = [sys.executable, "-m", "kakeya.node.engine_main", "--model", str(TOOLS)]
    mlx += ["--model-id", "mlx", *findings.flags()]
    async with (
        llama(llama_server, model) as ours,
        EngineBackend("mlx", lambda socket: [*mlx, "--socket", str(socket)]) as theirs,
    ):
        facts = await ours.ready(60)
        known = await theirs.ready(60)
        assert facts.vocab_size == known.vocab_size
        assert facts.eos_token_ids == tuple(sorted(known.eos_token_ids))
        assert (facts.context_tokens, facts.kv_block_tokens, facts.adapter_slots) == (4096, 0, 0)
        ids = await asyncio.to_thread(prompt, facts)
        plain = DecodeRequest(token_ids=ids, max_tokens=24)
        ends = frozenset(facts.eos_token_ids)
        first, _ = await taken(theirs, plain)
        biased = Sampling(logit_bias=((first[0], -100.0),))
        for asked in (
            plain,
            replace(plain, stop_token_ids=ends),
            replace(plain, stop_token_ids=frozenset({first[5]})),
            replace(plain, sampling=biased),
        ):
            mine, done = await taken(ours, asked)
            others, ended = await taken(theirs, asked)
            assert mine == others
            assert done.reason is ended.reason


async def test_frames_of_a_generation(llama_server: Path, model: Path) -> None:
    async with llama(llama_server, model) as backend:
        facts = await backend.ready(60)
        ids = (await asyncio.to_thread(prompt, facts)) * 100
        asked = DecodeRequest(token_ids=ids, max_tokens=8, top_logprobs=3)
        frames = [frame async for frame in backend.decode(asked)]
        *parts, done = frames
        progress = [one for one in parts if isinstance(one, Progress)]
        assert progress
        assert progress[-1].total_tokens == len(ids)
        told = [one for part in parts if isinstance(part, Tokens) for one in part.logprobs]
        tokens = [one for part in parts if isinstance(part, Tokens) for one in part.token_ids]
        assert len(told) == len(tokens) == 8
        for token, one in zip(tokens, told, strict=True):
            assert len(one.top) == 3
            assert one.top[0] == (token, one.logprob)  # greedy: the most likely one
        assert isinstance(done, Done)
        assert done.reason is StopReason.MAX_TOKENS
        assert done.usage.prefill_s > 0
        again = [frame async for frame in backend.decode(asked)][-1]
        assert isinstance(again, Done)
        assert again.usage.cached_tokens >= len(ids) - 1

        full = DecodeRequest(token_ids=(ids * 8)[:4090], max_tokens=100)
        some, ended = await taken(backend, full)
        assert ended.reason is StopReason.CONTEXT_FULL
        assert 0 < len(some) <= 6
        seeded = replace(asked, sampling=Sampling(temperature=1.5, seed=7), top_logprobs=None)
        assert await same(backend, seeded) == await same(backend, seeded)


async def same(backend: EngineBackend, request: DecodeRequest) -> list[int]:
    return (await taken(backend, request))[0]


async def test_a_killed_server_costs_time_and_no_token(llama_server: Path, model: Path) -> None:
    async with llama(llama_server, model) as backend:
        facts = await backend.ready(60)
        asked = DecodeRequest(token_ids=await asyncio.to_thread(prompt, facts), max_tokens=64)
        whole, _ = await taken(backend, asked)
        seen: list[int] = []
        async for frame in backend.decode(asked):
            if isinstance(frame, Tokens):
                seen += frame.token_ids
                if backend.restarts == 0 and backend.pid and len(seen) >= 4:
                    os.kill(backend.pid, signal.SIGKILL)
                    await until(lambda: backend.restarts > 0 or backend.pid is None)
        assert seen == whole
        assert backend.restarts == 1


async def test_a_caller_that_leaves_frees_its_slot(llama_server: Path, model: Path) -> None:
    async with llama(llama_server, model) as backend:
        facts = await backend.ready(60)
        asked = DecodeRequest(token_ids=await asyncio.to_thread(prompt, facts), max_tokens=3000)
        async with aclosing(backend.decode(asked)) as frames:
            async for frame in frames:
                if isinstance(frame, Tokens):
                    break
        assert backend.engine is not None
        client: Any = backend.engine.client
        assert backend.running == 0

        async def busy() -> int:
            async with call(client._child.socket, "/slots") as answer:
                return sum(slot["is_processing"] for slot in (await answer.whole())["items"])

        async with asyncio.timeout(60):
            while await busy():
                await asyncio.sleep(0.05)
        assert (await taken(backend, replace(asked, max_tokens=3)))[1].reason


async def test_answers_that_have_no_room_beside_each_other_end_one_after_the_other(
    llama_server: Path, model: Path
) -> None:
    """Their KV together is more than the server has: it ends them all at once."""
    async with llama(llama_server, model, ctx_size=512, parallel=4) as backend:
        await backend.ready(60)
        asked = [DecodeRequest(token_ids=[5 + i, 6, 7] * 50, max_tokens=150) for i in range(4)]
        found = await asyncio.gather(*(taken(backend, one) for one in asked))
        assert [len(ids) for ids, _ in found] == [150] * 4
        assert {done.reason for _, done in found} == {StopReason.MAX_TOKENS}


async def test_what_it_cannot_do_is_refused_by_type(llama_server: Path, model: Path) -> None:
    async with llama(llama_server, model) as backend:
        facts = await backend.ready(60)
        asked = DecodeRequest(token_ids=[5, 6], max_tokens=4)
        for wrong, error in (
            (replace(asked, token_ids=[facts.vocab_size]), InvalidArgument),
            (replace(asked, token_ids=[5] * 5000), InvalidArgument),
            (replace(asked, adapter_id="mine"), Unsupported),
            (replace(asked, grammar="%llguidance {}\nstart: /[a-z]+/"), Unsupported),
        ):
            with pytest.raises(error):
                await taken(backend, wrong)
        with pytest.raises(UnknownMethod, match="draft"):
            await backend.draft([5], 2)
        with pytest.raises(UnknownMethod, match="embed"):
            await backend.embed([[5]])
        page = PageRef(slab="", slab_pages=1, page_bytes=64, first=0, pages=1, length=1, stamp=1)
        with pytest.raises(UnknownMethod, match="adapters"):
            await backend.load_adapter("mine", page, 1.0)
        assert backend.state is ModelState.READY
        footprint = await backend.set_limits(memory_bytes=1 << 30)
        assert footprint.resident_bytes > 1 << 20


async def test_a_hung_server_is_replaced(llama_server: Path, model: Path) -> None:
    quick = EngineOptions(probe_interval_s=0.05, probe_timeout_s=1.0, max_missed_probes=2)
    async with llama(llama_server, model, options=quick) as backend:
        await backend.ready(60)
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGSTOP)
        # On a busy machine the next one may be late with an answer, too.
        await until(lambda: backend.restarts)
        await backend.ready(60)


async def test_a_damaged_file_ends_in_failure_with_its_reason(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-4096])
    async with llama(llama_server, cut) as backend:
        await until(lambda: backend.state in (ModelState.FAILED, ModelState.RESTARTING))
        assert "exit" in backend.last_error
    cut.write_bytes(model.read_bytes()[:100])
    with pytest.raises(ConfigError, match="damaged"):
        async with llama(llama_server, cut):
            pass


def tool(name: str, *needed: str) -> dict[str, object]:
    properties = {one: {"type": "string"} for one in needed}
    told = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": told}


async def test_an_openai_client(llama_server: Path, model: Path) -> None:
    """A chat, its stream, a call of a tool, JSON by a schema, and input that is wrong."""
    async with llama(llama_server, model) as backend, serving(backend) as served:  # type: ignore[arg-type]
        create = served.openai.chat.completions.create
        tools: Any = [tool("Bash", "command"), tool("get_weather", "city")]
        greeting = {"role": "user", "content": "Hello."}
        greedy: Any = {"model": "tools", "temperature": 0}
        plain: Any = {**greedy, "messages": [greeting], "tools": tools}
        (whole,) = (await create(**plain)).choices
        assert (whole.finish_reason, whole.message.content) == ("stop", "Done.")
        stream = await create(**plain, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "Done."
        assert sum(map(bool, pieces)) > 1

        (choice,) = (await create(**greedy, messages=[ASKED], tools=tools)).choices
        assert choice.finish_reason == "tool_calls"
        (made,) = choice.message.tool_calls or ()
        assert made.type == "function"
        assert made.function.name == "get_weather"
        assert json.loads(made.function.arguments) == {"city": "Paris"}

        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
        forced = await create(**greedy, messages=[greeting], response_format=form, max_tokens=100)
        told = json.loads(forced.choices[0].message.content or "")
        assert told["name"] in ("red", "blue")
        assert isinstance(told["sure"], bool)

        named: Any = {"type": "function", "function": {"name": "Bash"}}
        for choice_of_tool, names in (("required", {"Bash", "get_weather"}), (named, {"Bash"})):
            asked: Any = {**plain, "tool_choice": choice_of_tool, "max_tokens": 200}
            (choice,) = (await create(**asked)).choices
            assert choice.finish_reason == "tool_calls"
            for made in choice.message.tool_calls or ():
                assert made.type == "function"
                assert made.function.name in names
                assert isinstance(json.loads(made.function.arguments), dict)
        tools[0]["function"]["parameters"]["properties"]["command"]["format"] = "email"
        with pytest.raises(openai.BadRequestError, match="'format'"):
            await create(**{**plain, "tool_choice": "required"})
        with pytest.raises(openai.BadRequestError, match="4096"):
            await create(**greedy, messages=[{**greeting, "content": "hello " * 5000}])


async def test_forced_calls_validate_at_any_temperature(llama_server: Path, model: Path) -> None:
    form = {
        "type": "object",
        "properties": {
            "place": {"type": "string", "minLength": 1, "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
            "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
        },
        "required": ["place", "days"],
        "additionalProperties": False,
    }
    tools: Any = [
        tool("Bash"),
        {"type": "function", "function": {"name": "see", "parameters": form}},
    ]
    tools[0]["function"]["parameters"] = {"type": "object", "additionalProperties": False}
    async with llama(llama_server, model) as backend, serving(backend) as served:  # type: ignore[arg-type]

        async def ask(seed: int) -> list[tuple[str, Any]]:
            answer = await served.openai.chat.completions.create(
                model="tools",
                messages=[{"role": "user", "content": "Hello."}],
                tools=tools,
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1.5,
                seed=seed,
                max_tokens=200,
            )
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            made: Any = choice.message.tool_calls
            return [(one.function.name, json.loads(one.function.arguments)) for one in made]

        found = [call for calls in await asyncio.gather(*map(ask, range(8))) for call in calls]
        assert len(found) == 8
        for name, arguments in found:
            Draft202012Validator(form if name == "see" else {"maxProperties": 0}).validate(
                arguments
            )


async def test_an_answer_that_follows_a_schema_goes_on_in_the_next_server(
    llama_server: Path, model: Path
) -> None:
    words = {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "minItems": 30}
    schema = {"type": "object", "properties": {"all": words}, "required": ["all"]}
    async with llama(llama_server, model) as backend, serving(backend) as served:  # type: ignore[arg-type]
        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        ask: Any = {"model": "tools", "messages": [{"role": "user", "content": "Say it."}]}
        stream = await served.openai.chat.completions.create(
            **ask, response_format=form, max_tokens=400, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if backend.restarts == 0 and backend.pid and len(text) > 20:
                os.kill(backend.pid, signal.SIGKILL)
                await until(lambda: backend.restarts > 0 or backend.pid is None)
        assert backend.restarts == 1
        if text.endswith("}"):
            assert len(json.loads(text)["all"]) >= 30
        else:
            assert text.replace(" ", "").startswith('{"all":["')
