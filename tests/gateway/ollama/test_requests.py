"""Bodies of Ollama's API to requests, and what is refused."""

from __future__ import annotations

import pytest

from kakeya.backends.request import ChatRequest, CompletionRequest
from kakeya.core.errors import KakeyaError
from kakeya.gateway.ollama.embed import parse_embed
from kakeya.gateway.ollama.requests import parse_chat, parse_generate
from tests.gateway.toy import ToyModel, make_folder, serving

HI = {"role": "user", "content": "hi"}
CHAT = {"model": "toy", "messages": [HI]}
PROMPT = {"model": "toy", "prompt": "hi"}


def test_options_are_sampling_and_the_rest_of_them_is_the_machines():
    params = parse_chat(
        CHAT
        | {
            "model": "toy:latest",
            "keep_alive": "5m",
            "options": {
                "temperature": 0.5,
                "top_k": 7,
                "top_p": 0.9,
                "min_p": 0.1,
                "seed": 3,
                "num_predict": 9,
                "stop": ["a"],
                "repeat_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "num_ctx": 4096,
                "num_gpu": 1,
                "mirostat": 0,
                "main_gpu": None,
            },
        }
    ).asked.params
    assert (params.model, params.max_tokens, params.stop) == ("toy", 9, ("a",))
    wish = params.sampling
    assert (wish.temperature, wish.top_k, wish.top_p, wish.min_p) == (0.5, 7, 0.9, 0.1)
    assert (wish.seed, wish.repetition_penalty) == (3, 1.2)
    assert (wish.presence_penalty, wish.frequency_penalty) == (0.5, 0.25)
    assert params.stream
    (said,) = params.left_out
    assert said.startswith("options.num_ctx ")


@pytest.mark.parametrize("most", [-1, -2, 0, None])
def test_without_a_count_an_answer_goes_on_to_the_end_of_the_context(most):
    asked = parse_chat(CHAT | {"options": {"num_predict": most}, "stream": False}).asked
    assert asked.params.max_tokens is None
    assert not asked.params.stream


def test_messages_of_agents_are_read_with_ollamas_names():
    call = {"function": {"name": "look", "arguments": {"at": 3}}}
    turn = {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [call]}
    told = {"role": "tool", "tool_name": "look", "content": "a tree", "images": []}
    tool = {"type": "function", "function": {"name": "look"}}
    chat = parse_chat(CHAT | {"messages": [HI, turn, told], "tools": [tool]}).asked.chat
    function = {"name": "look", "arguments": {"at": 3}}
    assert chat.messages == (
        HI,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "a tree", "name": "look"},
    )
    assert not chat.continues_last
    begun = parse_chat(CHAT | {"messages": [HI, {"role": "assistant", "content": "hel"}]})
    assert begun.asked.chat.continues_last


@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (None, {}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("max", {"reasoning_effort": "xhigh", "enable_thinking": True, "thinking": True}),
    ],
)
def test_think_reaches_the_template(think, kwargs):
    assert parse_chat(CHAT | {"think": think}).asked.chat.kwargs == kwargs
    assert parse_generate(PROMPT | {"think": think}).asked.chat.kwargs == kwargs


@pytest.mark.parametrize(
    ("form", "schema"),
    [("", None), (None, None), ("json", {"type": "object"}), ({"type": "array"},) * 2],
)
def test_the_format_is_the_schema_of_the_answer(form, schema):
    assert parse_chat(CHAT | {"format": form}).asked.answer_schema == schema
    assert parse_generate(PROMPT | {"format": form}).asked.answer_schema == schema


def test_a_prompt_is_the_users_message_unless_it_is_raw():
    asked = parse_generate(PROMPT | {"system": "Be kind.", "context": [], "template": ""}).asked
    assert isinstance(asked, ChatRequest)
    assert asked.chat.messages == ({"role": "system", "content": "Be kind."}, HI)
    raw = parse_generate(PROMPT | {"raw": True}).asked
    assert isinstance(raw, CompletionRequest)
    assert raw.prompts == ("hi",)


ROWS = [
    (parse_chat, {"model": 5}, "model"),
    (parse_chat, {"messages": "hi"}, "messages"),
    (parse_chat, {"messages": ["hi"]}, "messages[0]"),
    (parse_chat, {"messages": [HI | {"images": ["aa"]}]}, "messages[0].images"),
    (parse_chat, {"messages": [], "keep_alive": 0}, "keep_alive=0"),
    (parse_chat, {"keep_alive": []}, "keep_alive"),
    (parse_chat, {"tools": 5}, "tools"),
    (parse_chat, {"stream": 5}, "stream"),
    (parse_chat, {"format": "yaml"}, "format"),
    (parse_chat, {"think": "much"}, "think"),
    (parse_chat, {"options": []}, "options"),
    (parse_chat, {"options": {"stop": 5}}, "options.stop"),
    (parse_chat, {"options": {"mirostat": 1}}, "options.mirostat=1"),
    (parse_chat, {"options": {"speed": 1}}, '"options.speed"'),
    (parse_chat, {"options": {"num_predict": -3}}, "num_predict"),
    (parse_chat, {"options": {"temperature": "hot"}}, "temperature"),
    (parse_chat, {"top_logprobs": 99}, "top_logprobs"),
    (parse_chat, {"prompt": "hi"}, '"prompt"'),
    (parse_generate, {"prompt": 5}, "prompt"),
    (parse_generate, {"template": "{{ .Prompt }}"}, "template"),
    (parse_generate, {"suffix": "}"}, "suffix"),
    (parse_generate, {"context": [1]}, "context"),
    (parse_generate, {"images": ["aa"]}, "images"),
    (parse_generate, {"raw": True, "system": "a"}, "raw"),
    (parse_generate, {"raw": True, "format": "json"}, "raw"),
    (parse_embed, {"input": None}, "input"),
    (parse_embed, {"input": "a", "truncate": 5}, "truncate"),
    (parse_embed, {"input": "a", "dimensions": 0}, "dimensions"),
]


@pytest.mark.parametrize(("parse", "change", "named"), ROWS)
def test_what_is_wrong_is_named(parse, change, named):
    body = {parse_chat: CHAT, parse_generate: PROMPT, parse_embed: {"model": "toy"}}[parse]
    with pytest.raises(KakeyaError) as caught:
        parse(body | change)
    assert caught.value.message.startswith((f"{named} ", f"{named}="))


async def test_errors_have_ollamas_form(tmp_path):
    async with serving(ToyModel(make_folder(tmp_path / "toy"))) as served:
        for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show"):
            for body, status in (("{", 400), ('{"model": "b", "input": "a"}', 404)):
                if path in ("/api/chat", "/api/generate"):
                    body = body.replace(', "input": "a"', "")
                reply = await served.http.post(path, content=body)
                assert (reply.status_code, list(reply.json())) == (status, ["error"])
