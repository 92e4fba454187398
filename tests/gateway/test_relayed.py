"""Backends that are no engines, behind every dialect: clouds and commands, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kakeya.backends.relay.config import CloudSettings, CommandSettings
from kakeya.backends.relay.relays import Relays
from kakeya.core.clock import SystemClock
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.tasks import TaskSpec
from kakeya.gateway.app import build_app
from kakeya.generation.facts import ModelState
from tests.backends.relay.upstream import delta, events, refuses, says, stalls, upstream
from tests.doctor.small_nodes import closed_port
from tests.gateway.test_coordinator_fields import DIALECTS, HI
from tests.gateway.toy import ToyModel, make_folder, serving
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
MODEL = "cloud:west/m"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@asynccontextmanager
async def node(
    *models: ToyModel, url: str = "", tasks: TaskRegistry | None = None, **commands: str
):
    """A gateway with the cloud west, and shell scripts as commands."""
    backends: dict[str, Any] = {
        "commands": {
            name: CommandSettings(argv=("sh", "-c", script)) for name, script in commands.items()
        }
    }
    if url:
        backends["clouds"] = {"west": CloudSettings(url=url, timeout_s=20)}
    async with (
        Relays(backends, SystemClock()) as relays,
        serving(*models, tasks=tasks, relays=relays) as served,
    ):
        yield served


def said(body: dict[str, Any]) -> str:
    """The text of a whole answer of any dialect."""
    if "choices" in body:
        (choice,) = body["choices"]
        return choice.get("text") or choice["message"]["content"]
    if "output" in body:
        (item,) = body["output"]
        return item["content"][0]["text"]
    if "content" in body:
        return "".join(block["text"] for block in body["content"])
    return body.get("response") or body["message"]["content"]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_command_answers_each_dialect_whole_and_streamed(path):
    body = {"model": "up", **DIALECTS[path]}
    async with node(up="tr a-z A-Z; printf ' one'; printf ' two'") as served:
        whole = await served.http.post(path, json=body | {"stream": False})
        streamed = await served.http.post(path, json=body | {"stream": True})
        found = await served.http.get(f"/api/v1/requests/{whole.headers['x-request-id']}")
    assert whole.status_code == 200, whole.text
    assert said(whole.json()) == "HI one two"
    assert whole.json()["model"] == "up"
    for word in ("HI", "one", "two"):
        assert word in streamed.text
    assert '"code":' not in streamed.text
    assert (found.json()["backend"], found.json()["model"]) == ("up", "up")
    assert "the backend up answered" in found.json()["reason"]


@pytest.mark.parametrize("path", DIALECTS)
async def test_another_node_is_a_cloud_of_each_dialect(folder, path):
    toy = ToyModel(folder, script="hello world")
    body = {"model": "cloud:west/toy", **DIALECTS[path], "stream": False}
    async with serving(toy) as far, node(url=f"http://127.0.0.1:{far.port}/v1") as served:
        whole = await served.http.post(path, json=body)
        streamed = await served.http.post(path, json=body | {"stream": True})
        own = await served.http.get("/api/v1/requests/" + whole.headers["x-request-id"])
    assert whole.status_code == 200, whole.text
    assert said(whole.json()) == "hello world"
    assert "hello" in streamed.text
    assert "world" in streamed.text
    first, second = toy.requests
    assert own.json()["prompt_tokens"] == len(first.token_ids) == len(second.token_ids)
    assert own.json()["completion_tokens"] == len(toy.tokenizer.encode(toy.script).ids) + 1
    assert toy.open == 0


async def test_the_openai_client_reads_usage_calls_and_thoughts():
    from anthropic import AsyncAnthropic  # it costs each worker a second to collect

    pieces = events(
        delta(reasoning_content="hm"),
        delta(content="I look."),
        delta(tool_calls=[{"index": 0, "id": "call_a", "function": {"name": "look"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"at": "sea"}'}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "wait", "arguments": ""}}]),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 8}},
    )

    async def respond(one) -> None:
        await one.start()
        await one.write(pieces, more=False)

    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": tools}
    async with upstream(respond) as west, node(url=west.url) as served:
        whole = await served.openai.chat.completions.create(**asked)
        stream = await served.openai.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        async with AsyncAnthropic(
            base_url=f"http://127.0.0.1:{served.port}", api_key="none", max_retries=0
        ) as client:
            named = {"name": "look", "input_schema": function["parameters"]}
            message = await client.messages.create(
                model=MODEL, messages=HI, max_tokens=50, tools=[named]
            )
    (choice,) = whole.choices
    look, wait = choice.message.tool_calls
    assert (look.id, look.function.name) == ("call_a", "look")
    assert json.loads(look.function.arguments) == {"at": "sea"}
    assert wait.id.startswith("call_")
    assert (wait.function.name, wait.function.arguments) == ("wait", "{}")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump()["reasoning_content"] == "hm"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (12, 8)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    streamed = [call for one in deltas for call in one.tool_calls or ()]
    assert (streamed[0].index, streamed[0].id) == (0, "call_a")
    assert [call.function.name for call in streamed] == ["look", "wait"]
    assert "".join(one.content or "" for one in deltas) == "I look."
    assert chunks[-1].usage.total_tokens == 20
    thinking, text, *uses = message.content
    assert (thinking.thinking, text.text) == ("hm", "I look.")
    assert [(use.name, use.input) for use in uses] == [("look", {"at": "sea"}), ("wait", {})]
    assert (message.stop_reason, message.usage.input_tokens) == ("tool_use", 12)


async def test_several_answers_are_requests_of_their_own_and_a_prompt_counts_once():
    async with upstream(says("x")) as west, node(url=west.url) as served:
        chats = await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=5)
        texts = await served.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": ["a", "b"], "n": 2}
        )
    assert [choice.index for choice in chats.choices] == [0, 1, 2]
    assert (chats.usage.prompt_tokens, chats.usage.completion_tokens) == (7, 3)
    assert sorted(one.body["seed"] for one in west.asked[:3]) == [5, 6, 7]
    assert sorted(one.body["prompt"] for one in west.asked[3:]) == ["a", "a", "b", "b"]
    assert texts.json()["usage"]["prompt_tokens"] == 14


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_closes_the_connection_to_the_cloud(is_streamed):
    began, gone = asyncio.Event(), asyncio.Event()

    async def respond(one) -> None:
        began.set()
        await stalls(one)
        gone.set()

    async with upstream(respond) as west, node(url=west.url) as served:
        body = {"model": MODEL, "messages": HI, "stream": is_streamed}
        asking = asyncio.create_task(served.http.post(CHAT, json=body))
        await asyncio.wait_for(began.wait(), 20)
        asking.cancel()
        await asyncio.wait_for(gone.wait(), 20)
        (west_now,) = (await served.http.get("/api/v1/config")).json()["clouds"].items()
    assert west_now[0] == "west"


async def test_a_client_that_leaves_ends_the_program(tmp_path):
    pid = tmp_path / "pid"
    async with node(slow=f"echo $$ > {pid}; echo on; sleep 600") as served:
        body = {"model": "slow", "messages": HI}
        asking = asyncio.create_task(served.http.post(CHAT, json=body))
        number = int(await eventually("it runs", lambda: pid.exists() and pid.read_text().strip()))
        asking.cancel()
        await eventually("it is gone", lambda: not _runs(number))


def _runs(pid: int) -> bool:
    from tests.backends.relay.test_command import is_alive

    return is_alive(pid)


@pytest.mark.parametrize(
    ("status", "ours", "says_"),
    [
        (400, 400, "no such thing"),
        (401, 502, "its key here"),
        (404, 404, "no such thing"),
        (429, 429, "no such thing"),
        (500, 502, "no such thing"),
        (503, 503, "no such thing"),
    ],
)
async def test_refusals_of_a_cloud_are_statuses_here(status, ours, says_):
    body = {"error": {"message": "no such thing"}}
    async with (
        upstream(refuses(status, body, retry_after="9")) as west,
        node(url=west.url) as served,
    ):
        for asked in ({}, {"stream": True}):
            answer = await served.http.post(CHAT, json={"model": MODEL, "messages": HI} | asked)
            assert answer.status_code == ours, answer.text
            assert says_ in answer.json()["error"]["message"]
            assert answer.headers.get("retry-after") == ("9" if ours in (429, 503) else None)


async def test_a_cloud_that_is_not_there_is_a_bad_gateway_and_a_late_program_a_timeout():
    fails = "echo ' it broke ' >&2; exit 3"
    with closed_port() as west:
        async with node(url=f"http://{west}/v1", slow="sleep 600", fails=fails) as served:
            absent = await served.http.post(CHAT, json={"model": MODEL, "messages": HI})
            late = {"model": "slow", "messages": HI, "deadline_s": 0.1}
            slow = await served.http.post(CHAT, json=late)
            failed = await served.http.post(CHAT, json={"model": "fails", "messages": HI})
    assert (absent.status_code, slow.status_code, failed.status_code) == (502, 504, 502)
    assert "the cloud west (127.0.0.1) does not answer" in absent.text
    assert "the command fails ended with 3: it broke" in failed.text


async def test_what_cannot_be_followed_is_named_or_refused():
    async with upstream(says("x")) as west, node(url=west.url, echo="cat") as served:
        body = {"model": "echo", "messages": HI, "temperature": 0.5, "max_tokens": 9, "x_other": 1}
        named = await served.http.post(CHAT, json=body)
        thinking = {"model": MODEL, "messages": HI, "enable_thinking": True}
        sent = await served.http.post(CHAT, json=thinking)
        logprobs = [
            await served.http.post(CHAT, json={"model": one, "messages": HI, "logprobs": True})
            for one in ("echo", MODEL)
        ]
        counted = await served.http.post(
            "/v1/messages/count_tokens", json={"model": MODEL, "messages": HI}
        )
        warmed = await served.http.post("/v1/precache", json={"model": "echo", "messages": HI})
    assert named.headers["x-kakeya-ignored"] == "x_other, temperature, max_tokens"
    assert sent.headers["x-kakeya-ignored"] == "chat_template_kwargs"
    for refused in logprobs:
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert counted.status_code == warmed.status_code == 400
    assert "its tokens are not known here" in counted.text


async def test_backends_are_listed_beside_models(folder):
    ladder = TaskSpec(candidates=(("small",), (MODEL,)))
    far = TaskSpec(candidates=((MODEL,), ("echo",)))
    tasks = TaskRegistry({"titles": ladder, "far": far})
    small = ToyModel(folder, "small")
    async with node(small, url="http://127.0.0.1:9/v1", tasks=tasks, echo="cat") as served:
        models = [one.id async for one in await served.openai.models.list()]
        one = (await served.openai.models.retrieve(MODEL)).model_dump()
        task = (await served.openai.models.retrieve("far")).model_dump()
        tags = (await served.http.get("/api/tags")).json()["models"]
        shown = await served.http.post("/api/show", json={"model": "echo"})
        config = (await served.http.get("/api/v1/config")).json()
        missing = await served.http.post(CHAT, json={"model": "eco", "messages": HI})
    assert models == ["small", "echo", MODEL, "titles", "far"]
    assert (task["kind"], task["state"], task["context_length"]) == ("task", "ready", None)
    assert (one["kind"], one["backend"], one["state"]) == ("clouds", "west", "ready")
    assert [tag["name"] for tag in tags] == ["small", "echo", "titles", "far"]
    assert shown.json()["capabilities"] == ["completion", "tools"]
    assert config["clouds"]["west"]["url"] == "http://127.0.0.1:9/v1"
    assert config["commands"]["echo"]["program"] == "sh"
    assert "small, echo, titles, far; did you mean echo?" in missing.json()["error"]["message"]


async def test_a_ladder_falls_back_to_a_cloud_where_its_guard_lets_it(folder):
    big = ToyModel(folder, "big", state=ModelState.FAILED, last_error="it broke")
    tasks = TaskRegistry(
        {
            "titles": TaskSpec(candidates=(("big",), (MODEL,))),
            "first": TaskSpec(candidates=((MODEL,), ("big",))),
        }
    )

    async with upstream(says("far")) as west, node(big, url=west.url, tasks=tasks) as served:

        async def ask(model: str):
            return await served.http.post(CHAT, json={"model": model, "messages": HI})

        far = await ask("titles")
        found = await served.http.get(f"/api/v1/requests/{far.headers['x-request-id']}")
        await served.http.put("/api/v1/config", json={"allowCloudFallback": False})
        near, first, named = [await ask(model) for model in ("titles", "first", MODEL)]
    assert far.json()["model"] == MODEL
    assert far.headers["x-kakeya-task"].endswith("reason=big cannot be loaded now")
    assert found.json()["task"]["model"] == MODEL
    assert near.status_code == 503
    assert "it broke" in near.text
    assert first.json()["model"] == named.json()["model"] == MODEL, (
        "its owner, or its caller, chose"
    )


async def test_a_loaded_model_goes_before_a_cloud_and_a_cloud_that_failed_goes_last(folder):
    idle = ToyModel(folder, "idle", script="idle", state=ModelState.UNLOADED)
    idle.loaded.set()
    tasks = TaskRegistry({"t": TaskSpec(candidates=((MODEL,), ("idle",)))})
    async with upstream(says("far")) as west, node(idle, url=west.url, tasks=tasks) as served:

        async def answers() -> str:
            body = {"model": "t", "messages": HI}
            answer = await served.http.post(CHAT, json=body)
            return answer.json().get("model") or str(answer.status_code)

        assert await answers() == MODEL
        idle.state = ModelState.READY
        assert await answers() == "idle"
        idle.state = ModelState.UNLOADED
    with closed_port() as nowhere:
        async with node(idle, url=f"http://{nowhere}/v1", tasks=tasks) as served:
            body = {"model": "t", "messages": HI}
            assert (await served.http.post(CHAT, json=body)).status_code == 502
            again = await served.http.post(CHAT, json=body)
    assert again.json()["model"] == "idle"
    assert again.headers["x-kakeya-task"].endswith(f"reason={MODEL} cannot be reached now")


def test_an_application_needs_no_backends():
    assert build_app.__kwdefaults__["relays"] is None
