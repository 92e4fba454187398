"""Tools, thoughts, several answers: over a real socket, by the real openai client."""

from __future__ import annotations

import json
import sys

import openai
import pytest
from llguidance import LLMatcher

from kakeya.core.errors import PeerUnavailable
from kakeya.gateway.http.connection import HttpLimits
from kakeya.generation.facts import ModelState
from kakeya.text.tools.families import ENTRY_POINTS, tool_families
from tests.gateway.toy import TEMPLATE, Pace, ToyModel, make_folder, serving

HI = [{"role": "user", "content": "hi"}]
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"at": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


async def test_a_call_of_a_tool_comes_as_one_streamed_and_whole(folder):
    async with serving(ToyModel(folder, script="I look. " + CALL)) as served:
        chats = served.openai.chat.completions
        whole = await chats.create(model="toy", messages=HI, tools=[LOOK])
        stream = await chats.create(model="toy", messages=HI, tools=[LOOK], stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 3})
    assert whole.choices[0].message.content == "I look."
    assert whole.choices[0].finish_reason == deltas[-1].finish_reason == "tool_calls"
    (streamed,) = [one for choice in deltas for one in choice.delta.tool_calls or ()]
    assert (streamed.index, streamed.function.name) == (0, "look")
    assert streamed.id.startswith("call_")
    assert "".join(choice.delta.content or "" for choice in deltas) == "I look."


FAMILY = """
from kakeya.text.tools.calls import CallForm, Called, functions_of

class Arrows:
    name, start, end, inner_marks = "arrows", "=>", ";", ()
    form = CallForm(opening="", closing="")

    def writes_for(self, template, vocabulary):
        return "=>" in template

    def parse(self, text, tools):
        name, _, value = text.strip().partition(" ")
        if not value.isdecimal():
            raise ValueError(f"{text!r} is no call")
        (argument,) = functions_of(tools)[0].parameters["properties"]
        return [Called(name, f'{{"{argument}": {value}}}')]

FAMILY = Arrows()
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with two families of calls, one of which cannot be imported."""
    site = tmp_path / "site"
    info = site / "arrow_calls-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arrow-calls\nVersion: 1.0\n")
    points = "arrows = arrow_calls:FAMILY\nbroken = arrow_calls:NONE\n"
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}")
    (site / "arrow_calls.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(str(site))
    tool_families.cache_clear()
    yield
    tool_families.cache_clear()
    sys.modules.pop("arrow_calls", None)


async def test_calls_are_read_in_the_syntax_of_an_installed_package(tmp_path, installed, caplog):
    template = TEMPLATE + "{% for tool in tools %}{{ tool.function.name }} => 1;{% endfor %}"
    folder = make_folder(tmp_path / "toy", template=template)
    async with serving(ToyModel(folder, script="I look. => look 3;")) as served:
        answer = await served.openai.chat.completions.create(model="toy", messages=HI, tools=[LOOK])
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": 3}')
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (left_out,) = [record for record in caplog.records if "left out" in record.message]
    assert left_out.kakeya_fields["plugin"] == "broken"


async def test_the_history_of_a_call_is_taken_back(folder):
    model = ToyModel(folder, script="done")
    async with serving(model) as served:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for content in (None, ""):
            asked = {"role": "assistant", "content": content, "tool_calls": [call]}
            told = {"role": "tool", "tool_call_id": "c1", "content": "a tree"}
            answer = await served.openai.chat.completions.create(
                model="toy", messages=[*HI, asked, told], tools=[LOOK]
            )
            assert answer.choices[0].message.content == "done"
    assert "a tree" in model.tokenizer.decode(list(model.requests[-1].token_ids))


async def test_text_that_is_no_call_is_given_back_as_text(folder):
    broken = "<tool_call>\n{broken}\n</tool_call>"
    async with serving(ToyModel(folder, script=broken)) as served:
        answer = await served.openai.chat.completions.create(model="toy", messages=HI, tools=[LOOK])
        untold = await served.openai.chat.completions.create(
            model="toy", messages=HI, tools=[LOOK], tool_choice="none"
        )
    for one in (answer, untold):
        assert one.choices[0].message.content == broken
        assert one.choices[0].finish_reason == "stop"


async def test_several_answers_have_seeds_of_their_own_and_share_the_prompt(folder):
    model = ToyModel(folder, pace=Pace(step_s=0.001))
    async with serving(model) as served:
        asked = {"model": "toy", "messages": HI, "n": 3, "seed": 5, "temperature": 1}
        whole = await served.openai.chat.completions.create(**asked, max_tokens=8)
        stream = await served.openai.chat.completions.create(**asked, max_tokens=8, stream=True)
        said = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == list(said.values())
    assert len(set(said.values())) == 3
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == len(model.requests[0].token_ids)
    assert [request.sampling.seed for request in model.requests[:3]] == [5, 6, 7]
    assert model.open == 0


async def test_a_list_of_prompts_gives_an_answer_to_each_in_order(folder):
    model = ToyModel(folder)
    async with serving(model) as served:
        answer = await served.openai.completions.create(
            model="toy", prompt=["hello", "world of"], n=2, max_tokens=3, seed=1
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    lengths = [len(request.token_ids) for request in model.requests]
    assert answer.usage.prompt_tokens == lengths[0] + lengths[2]
    assert lengths[0] == lengths[1]
    seeds = [request.sampling.seed for request in model.requests]
    assert seeds == [1, 2, 1, 2], "an answer does not depend on the prompts beside its own"


async def test_a_completion_takes_what_its_answers_are_anyway(folder):
    async with serving(ToyModel(folder, script="hello")) as served:
        for neutral in ({"best_of": 1, "echo": False}, {"best_of": 2, "n": 2}, {"best_of": None}):
            answer = await served.openai.completions.create(model="toy", prompt="a", **neutral)
            assert [choice.text for choice in answer.choices] == ["hello"] * neutral.get("n", 1)
        for asked, said in (
            ({"best_of": 3, "n": 2}, "best_of=3 with n=2 .* give n=3"),
            ({"echo": True}, "echo=true .* leave it out"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await served.openai.completions.create(model="toy", prompt="a", **asked)


async def test_the_failure_of_one_answer_ends_all_of_them(folder):
    model = ToyModel(folder, fail_after=2, pace=Pace(step_s=0.001))
    async with serving(model) as served:
        with pytest.raises(openai.InternalServerError) as caught:
            await served.openai.with_options(max_retries=0).chat.completions.create(
                model="toy", messages=HI, n=3
            )
        assert caught.value.code == PeerUnavailable.code
        assert model.open == 0


async def test_the_sampling_of_a_request_reaches_the_engine_whole(folder):
    model = ToyModel(folder, script="a")
    async with serving(model) as served:
        await served.openai.chat.completions.create(
            model="toy",
            messages=HI,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -100},
            logprobs=True,
            top_logprobs=2,
            extra_body={"repeat_penalty": 1.1},
        )
    (request,) = model.requests
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, ((7, -100.0),))
    assert request.top_logprobs == 2


async def test_an_answer_goes_on_from_the_last_message_where_it_is_a_prefix(folder):
    model = ToyModel(folder, script="c")
    async with serving(model) as served:
        begun = {"role": "assistant", "content": "hello wor", "prefix": True}
        await served.openai.chat.completions.create(model="toy", messages=[*HI, begun])
    shown = model.tokenizer.decode(list(model.requests[0].token_ids), skip_special_tokens=False)
    assert shown.endswith("<|im_start|>assistant\nhello wor")


PLACE = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}}},
        {"tools": [LOOK], "tool_choice": "required"},
        {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ],
    ids=["json", "schema", "required", "named"],
)
async def test_what_an_answer_must_be_reaches_the_engine_as_a_grammar(folder, asked):
    model = ToyModel(folder, script="{}")
    async with serving(model) as served:
        await served.openai.chat.completions.create(model="toy", messages=HI, **asked)
        await served.openai.chat.completions.create(model="toy", messages=HI, tools=[LOOK])
        more = {"parallel_tool_calls": True} if "tools" in asked else {}
        await served.openai.chat.completions.create(model="toy", messages=HI, **asked, **more)
    forced, free, several = (request.grammar for request in model.requests)
    assert (several == forced) == ("tools" not in asked)  # a forced call is one call
    assert LLMatcher.validate_grammar(forced) == ""
    assert free == ""


async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(folder):
    model = ToyModel(folder)
    schema = {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    async with serving(model) as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(
                model="toy", messages=HI, response_format=form
            )
    assert caught.value.param == "response_format.json_schema.schema"
    assert '"if"' in caught.value.message
    assert model.requests == []


async def test_a_schema_is_refused_before_its_model_loads(folder):
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"not": {}}}}
    async with serving(ToyModel(folder, state=ModelState.UNLOADED)) as served:
        with pytest.raises(openai.BadRequestError):
            await served.openai.chat.completions.create(
                model="toy", messages=HI, response_format=form
            )


async def test_tools_that_a_template_does_not_show_are_refused_where_the_owner_says_so(folder):
    model = ToyModel(folder, script="a")
    async with serving(model, limits=HttpLimits(plain_tools="refuse")) as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(model="toy", messages=HI, tools=[LOOK])
    assert caught.value.param == "tools"
    assert model.requests == []
