"""Agent libraries against a node with `kakeya-tiny-tools`: each chats, streams, has a tool called,
and gets an answer in the form that it asks for.

A library that is not installed skips its test: they are no packages of the extra `test`.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from kakeya.cli.child import NodeProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
NAME = "kakeya-tiny-tools"
CALL = "Call the tool § get_weather."
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test, before the node starts for it, where this package is not installed."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed (extra clients)")


class Place(BaseModel):
    """Whatever the model says, it ends soon."""

    city: Literal["Rome"]
    is_far: bool


class AnyCall(BaseModel):
    """What the model writes where it is asked for JSON of any form: it was trained on calls."""

    name: str
    arguments: dict[str, str]


def get_weather(city: Literal["Rome"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with asyncio.Runner() as runner:
        node = NodeProcess(tmp_path_factory.mktemp("node"), "--no-mdns", "--model", NAME)
        runner.run(node.__aenter__())
        try:
            yield f"http://{node.http}/v1"
        finally:
            runner.run(node.stop())


@needs("litellm")
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    import litellm

    def ask(*messages: object, **more: object):
        said = list(messages) or [{"role": "user", "content": "Hello."}]
        return litellm.completion(
            f"openai/{NAME}", said, api_base=url, api_key="none", temperature=0, **more
        )

    assert ask().choices[0].message.content == "Done."
    deltas = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "".join(deltas) == "Done."
    asked = {"role": "user", "content": CALL}
    called = ask(asked, tools=[TOOL], tool_choice=FORCED).choices[0].message
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    ended = ask(asked, called.model_dump(), result, tools=[TOOL]).choices[0]
    assert (ended.finish_reason, ended.message.content) == ("stop", "Done.")
    formed = ask(response_format=Place).choices[0].message.content
    assert Place.model_validate_json(formed).city == "Rome"


@needs("langchain_openai")
@pytest.mark.parametrize("is_responses", [False, True])
def test_langchain(url: str, is_responses: bool) -> None:
    import langchain_openai
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain_openai.ChatOpenAI(
        model=NAME, base_url=url, api_key="none", temperature=0, use_responses_api=is_responses
    )
    assert chat.invoke("Hello.").text == "".join(one.text for one in chat.stream("Hello."))
    called = chat.bind_tools([TOOL], tool_choice="get_weather").invoke(CALL)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert chat.bind_tools([TOOL]).invoke([HumanMessage(CALL), called, result]).text == "Done."
    for method in ("json_schema", "function_calling"):
        formed = chat.with_structured_output(Place, method=method).invoke("Hello.")
        assert formed.city == "Rome", method


@needs("pydantic_ai")
@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_pydantic_ai(url: str, model: str) -> None:
    import pydantic_ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        made = getattr(models, model)(NAME, provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(made, model_settings={"temperature": 0})
        assert (await agent.run("Hello.")).output == "Done."
        async with agent.run_stream("Hello.") as streamed:
            assert "".join([one async for one in streamed.stream_text(delta=True)]) == "Done."
        agent.tool_plain(get_weather)
        run = await agent.run(CALL)
        parts = [part for message in run.all_messages() for part in message.parts]
        assert "sunny in Rome" in [getattr(part, "content", "") for part in parts]
        assert run.output == "Done."
        for form in (pydantic_ai.NativeOutput, pydantic_ai.ToolOutput):
            formed = await pydantic_ai.Agent(made, output_type=form(Place)).run("Hello.")
            assert formed.output.city == "Rome", form


@needs("agents")
@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(url: str, model: str) -> None:
    import agents

    agents.set_tracing_disabled(True)

    async with AsyncOpenAI(base_url=url, api_key="none") as client:

        def agent(output_type: type | None = None, tools: object = (), **settings: object):
            return agents.Agent(
                "helper",
                model=getattr(agents, model)(NAME, client),
                output_type=output_type,
                tools=list(tools),
                model_settings=agents.ModelSettings(temperature=0, **settings),
            )

        run = await agents.Runner.run(agent(top_logprobs=1), "Hello.")
        (text,) = run.raw_responses[0].output[0].content
        assert "".join(one.token for one in text.logprobs) == run.final_output == "Done."
        streamed = agents.Runner.run_streamed(agent(), "Hello.")
        raw = [one.data async for one in streamed.stream_events() if hasattr(one, "data")]
        deltas = [one.delta for one in raw if one.type == "response.output_text.delta"]
        assert "".join(deltas) == streamed.final_output == "Done."
        tool = agents.function_tool(get_weather)
        run = await agents.Runner.run(agent(tools=[tool], tool_choice="get_weather"), CALL)
        assert run.final_output == "Done."
        assert "sunny in Rome" in [getattr(item, "output", "") for item in run.new_items]
        assert (await agents.Runner.run(agent(Place), "Hello.")).final_output.city == "Rome"


@needs("instructor")
def test_instructor(url: str) -> None:
    import instructor

    said = [{"role": "user", "content": "Hello."}]
    asked = {"model": NAME, "messages": said, "temperature": 0, "max_retries": 0}
    with OpenAI(base_url=url, api_key="none") as client:
        for mode, form in (("JSON", AnyCall), ("TOOLS", Place)):
            chat = instructor.from_openai(client, mode=instructor.Mode[mode]).chat
            formed = chat.completions.create(response_model=form, **asked)
            assert isinstance(formed, form), mode
        *_, streamed = chat.completions.create_partial(response_model=Place, **asked)
    assert streamed.model_dump() == formed.model_dump()
