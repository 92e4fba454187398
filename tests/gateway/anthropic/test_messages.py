"""Messages over a real socket, by the real anthropic client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from kakeya.gateway.http.connection import HttpLimits
from kakeya.generation.facts import ModelState
from tests.gateway.toy import Pace, ToyModel, make_folder, serving

if TYPE_CHECKING:
    import anthropic  # in the tests: it costs each worker of xdist seconds to collect

HI = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "input_schema": {"properties": {"at": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
ASKED = {"model": "toy", "max_tokens": 99, "messages": [HI]}


@pytest.fixture
def folder(tmp_path):
    made = make_folder(tmp_path / "toy")
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@asynccontextmanager
async def client(
    *models: ToyModel,
    limits: HttpLimits = HttpLimits(),  # noqa: B008
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with serving(*models, limits=limits) as served:
        transport = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        base = f"http://127.0.0.1:{served.port}"
        async with anthropic.AsyncAnthropic(
            base_url=base, api_key="none", max_retries=0, http_client=transport
        ) as made:
            yield made


async def test_a_message_comes_whole(folder):
    model = ToyModel(folder, script="hello world")
    async with client(model) as one:
        raw = await one.messages.with_raw_response.create(
            **ASKED, system="Be kind.", extra_headers={"anthropic-beta": "a-2025-01-01,b"}
        )
        message = await raw.parse()
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "hello world"}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.type, message.model) == ("assistant", "message", "toy")
    assert raw.headers["request-id"] == message.id
    assert message.id.startswith("msg_")
    usage, prompt = message.usage, len(model.requests[0].token_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.cache_read_input_tokens == prompt // 2
    shown = model.tokenizer.decode(list(model.requests[0].token_ids), skip_special_tokens=False)
    assert "system\nBe kind." in shown


async def test_thoughts_text_and_a_call_are_blocks_streamed_and_whole(folder):
    model = ToyModel(folder, script=f"<think>\nhm\n</think>\n\nI look. {CALL}")
    async with client(model) as one:
        asked = {**ASKED, "tools": [LOOK], "thinking": {"type": "adaptive"}}
        whole = await one.messages.create(**asked)
        async with one.messages.stream(**asked) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        told = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "a tree"}
        await one.messages.create(
            **asked | {"messages": [HI, streamed_turn(whole), {"role": "user", "content": [told]}]}
        )
    for message in (whole, streamed):
        thought, said, use = message.content
        assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "hm", True)
        assert (said.type, said.text) == ("text", "I look.")
        assert (use.type, use.name, use.input) == ("tool_use", "look", {"at": 3})
        assert use.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
    assert text == "I look."
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert "a tree" in model.tokenizer.decode(list(model.requests[-1].token_ids))


def streamed_turn(message: anthropic.types.Message) -> dict:
    return {"role": "assistant", "content": [block.to_dict() for block in message.content]}


async def test_the_synchronous_client_streams_and_counts(folder):
    import anthropic

    model = ToyModel(folder, script="hello world")

    def ask(port: int) -> tuple[str, int]:
        with (
            anthropic.DefaultHttpxClient(trust_env=False) as transport,
            anthropic.Anthropic(
                base_url=f"http://127.0.0.1:{port}", api_key="none", http_client=transport
            ) as one,
        ):
            events = one.messages.create(**ASKED, stream=True)
            text = "".join(
                event.delta.text for event in events if event.type == "content_block_delta"
            )
            return text, one.messages.count_tokens(model="toy", messages=[HI]).input_tokens

    async with serving(model) as served:
        text, count = await asyncio.to_thread(ask, served.port)
    assert text == "hello world"
    assert count == len(model.requests[0].token_ids)


async def test_the_count_of_tokens_is_that_of_the_prompt(folder):
    model = ToyModel(folder, script="a")
    thinking = {"type": "disabled"}
    asked = {"model": "toy", "messages": [HI], "system": "Be kind.", "tools": [LOOK]}
    async with client(model) as one:
        count = await one.messages.count_tokens(**asked, thinking=thinking)
        assert model.requests == []
        message = await one.messages.create(**asked, max_tokens=5, thinking=thinking)
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_tokens_are_counted_before_the_model_loads_and_after_lines_were_moved(folder):
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    waiting = ToyModel(folder, state=ModelState.UNLOADED)
    ready = ToyModel(folder, "ready", script="a")
    dated = {"messages": [HI], "system": "Date: 2026-01-01 10:11:12\nBe kind."}
    async with client(waiting, ready) as one:
        count = await one.messages.count_tokens(model="toy", **dated)
        raw = await one.messages.with_raw_response.create(model="ready", max_tokens=5, **dated)
        message = await raw.parse()
    assert waiting.facts is None
    assert count.input_tokens == len(ready.requests[0].token_ids)
    assert raw.headers["x-kakeya-moved"] == ", ".join(message.usage.kakeya["moved"])


async def test_what_a_request_asks_of_sampling_reaches_the_engine(folder):
    model = ToyModel(folder, script="hello world")
    async with client(model) as one:
        message = await one.messages.create(
            **ASKED | {"max_tokens": 5000},
            stop_sequences=["o w"],
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            metadata={"user_id": '{"session_id": "s"}'},
            service_tier="auto",
        )
    assert (message.content[0].text, message.stop_sequence) == ("hell", "o w")
    assert message.stop_reason == "stop_sequence"
    (request,) = model.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert request.user == '{"session_id": "s"}'
    assert request.max_tokens == model.context_tokens - len(request.token_ids)


async def test_an_answer_goes_on_from_the_assistants_last_message(folder):
    model = ToyModel(folder, script="ld")
    async with client(model) as one:
        begun = {"role": "assistant", "content": "hello wor"}
        await one.messages.create(**ASKED | {"messages": [HI, begun]})
    shown = model.tokenizer.decode(list(model.requests[0].token_ids), skip_special_tokens=False)
    assert shown.endswith("<|im_start|>assistant\nhello wor")


async def test_a_tool_that_is_left_out_is_told_in_a_header(folder):
    async with client(ToyModel(folder, script="a")) as one:
        for stream in (False, True):
            raw = await one.messages.with_raw_response.create(
                **ASKED,
                stream=stream,
                tools=[{"type": "web_search_20250305", "name": "web_search"}],
            )
            assert "web_search_20250305" in raw.headers["x-kakeya-warning"]
        raw = await one.messages.with_raw_response.create(**ASKED)
        assert "x-kakeya-warning" not in raw.headers


async def test_a_client_raises_the_error_of_a_request_and_of_a_stream(folder):
    import anthropic

    model = ToyModel(folder, fail_after=3, pace=Pace(step_s=0.001))
    async with client(model) as one:
        with pytest.raises(anthropic.NotFoundError):
            await one.messages.create(**ASKED | {"model": "another"})
        image = {"type": "image", "source": {"type": "url", "url": "http://a"}}
        shown = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError, match='this model takes "text"'):
            await one.messages.create(**ASKED | {"messages": shown})
        async with one.messages.stream(**ASKED) as stream:
            with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
                await stream.get_final_message()
    assert model.open == 0


async def test_a_silent_stream_pings(folder):
    model = ToyModel(folder, script="hello", pace=Pace(prefill_s=0.2))
    async with serving(model, limits=HttpLimits(keepalive_s=0.02)) as served:
        reply = await served.http.post("/v1/messages?beta=true", json={**ASKED, "stream": True})
    events = [
        json.loads(line.removeprefix("data: "))["type"]
        for line in reply.text.splitlines()
        if line.startswith("data: ")
    ]
    assert (events[0], events[-1]) == ("ping", "message_stop")
    assert events.count("message_start") == 1
