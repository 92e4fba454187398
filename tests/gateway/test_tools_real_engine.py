"""Tools with tool_choice "auto", from HTTP to a real engine, by `kakeya-tiny-tools`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from openai.types.chat import ChatCompletionMessageParam

from kakeya.backends.engine.backend import EngineBackend
from tests import findings
from tests.gateway.toy import serving

MODEL = Path(__file__).parents[2] / "kakeya" / "models" / "kakeya-tiny-tools"
ASKED: ChatCompletionMessageParam = {"role": "user", "content": "Call the tool § get_weather."}


def tool(name: str, *needed: str) -> dict[str, object]:
    properties = {one: {"type": "string"} for one in needed}
    told = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": told}


TOOLS = [tool("Bash", "command"), tool("get_weather", "city"), tool("unknown")]


def command(socket: Path) -> list[str]:
    module = [sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket)]
    return [*module, "--model", str(MODEL), "--model-id", "tools", *findings.flags()]


async def test_a_model_calls_a_tool_by_itself_and_ends_with_its_answer():
    async with EngineBackend("tools", command) as model, serving(model) as served:

        async def say(*messages, **fields):
            create = served.openai.chat.completions.create
            return await create(model="tools", messages=messages, tools=TOOLS, **fields)

        (choice,) = (await say(ASKED)).choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}

        streamed = served.openai.chat.completions.stream(
            model="tools", messages=[ASKED], tools=TOOLS
        )
        async with streamed as stream:
            (same,) = (await stream.get_final_completion()).choices
        assert same.finish_reason == "tool_calls"
        assert same.message.tool_calls[0].function.name == call.function.name
        assert same.message.tool_calls[0].function.arguments == call.function.arguments

        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        (ended,) = (await say(ASKED, choice.message.model_dump(), answer)).choices
        assert (ended.finish_reason, ended.message.content) == ("stop", "Done.")
        (plain,) = (await say({"role": "user", "content": "Hello."})).choices
        assert (plain.finish_reason, plain.message.content) == ("stop", "Done.")
        (none,) = (await say(ASKED, tool_choice="none")).choices
        assert none.message.tool_calls is None
