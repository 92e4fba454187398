"""What the table of a model says reaches its requests, in every dialect, where they say nothing."""

from __future__ import annotations

import pytest

from kakeya.cli.explain import explanation
from kakeya.generation.manifest import GivenTemplate, Manifest
from tests.gateway.test_coordinator_fields import DIALECTS, HI
from tests.gateway.test_precache import Recorded
from tests.gateway.toy import TEMPLATE, ToyModel, make_folder, serving

GIVEN = GivenTemplate(
    "{% for one in messages %}[{{ one.role }}] {{ one.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}{{ 'aloud' if enable_thinking else 'at once' }}{% endif %}",
    "",
)
OFF = Manifest(template=GIVEN, thinking="off", temperature=0.25, top_p=0.5, max_tokens=3)
CHATS = [path for path, body in DIALECTS.items() if "prompt" not in body]


@pytest.fixture
def bare(tmp_path):
    """A folder without a chat template."""
    return make_folder(tmp_path / "bare", template=None)


def prompt_of(model: ToyModel) -> str:
    text: str = model.tokenizer.decode(model.requests[-1].token_ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("path", CHATS)
async def test_each_dialect_writes_with_the_template_of_the_table(bare, path):
    model = ToyModel(bare, "m", script="hello", manifest=OFF)
    body = {**DIALECTS[path], "model": "m", "stream": False}
    async with serving(model) as served:
        answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert prompt_of(model).startswith("[user] ")
    assert prompt_of(model).endswith("at once")
    (request,) = model.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)


async def test_without_the_table_the_folder_alone_answers_no_chat(bare):
    async with serving(ToyModel(bare, "m")) as served:
        chat = {"model": "m", "messages": HI}
        refused = await served.http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert "has no chat template" in refused.json()["error"]["message"]


async def test_what_a_request_says_wins_and_explain_tells_what_it_left_open(bare):
    model = ToyModel(bare, "m", script="hello world", manifest=OFF)
    chat = {"model": "m", "messages": HI}
    said = {"temperature": 1.5, "max_tokens": 7, "enable_thinking": True}
    async with serving(model) as served:
        told = []
        for body in (chat, {**chat, **said}, {**chat, "reasoning_effort": "low"}):
            answer = await served.http.post("/v1/chat/completions", json=body)
            where = f"/api/v1/requests/{answer.headers['x-request-id']}"
            told.append((await served.http.get(where)).json())
    silent, full, _ = model.requests
    assert (silent.sampling.temperature, silent.sampling.top_p, silent.max_tokens) == (0.25, 0.5, 3)
    assert (full.sampling.temperature, full.sampling.top_p, full.max_tokens) == (1.5, 0.5, 7)
    assert prompt_of(model).endswith("hi\n")  # its effort is a word on its thoughts
    found = [{name: one["value"] for name, one in body["defaults"].items()} for body in told]
    assert found == [
        {"temperature": 0.25, "top_p": 0.5, "max_tokens": 3, "thinking": "off"},
        {"top_p": 0.5},
        {"temperature": 0.25, "top_p": 0.5, "max_tokens": 3},
    ]
    assert "  defaults top_p 0.5 (models.m)" in list(explanation(told[1]))


async def test_tokens_are_counted_as_requests_are_written(bare):
    model = ToyModel(bare, "m", script="hello", manifest=OFF)
    body = {"model": "m", "messages": HI, "max_tokens": 4}
    async with serving(model) as served:
        counted = await served.http.post("/v1/messages/count_tokens", json=body)
        answer = await served.http.post("/v1/messages", json=body)
    assert counted.status_code == answer.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == len(model.requests[0].token_ids)


async def test_prefixes_are_warmed_as_requests_are_written(bare):
    front = "{% if not enable_thinking | default(true) %}/no_think {% endif %}" + GIVEN.source
    said = Manifest(template=GivenTemplate(front, ""), thinking="off")
    model, precache = ToyModel(bare, "m", script="hello", manifest=said), Recorded()
    prefix = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}]}
    async with serving(model, precache=precache) as served:
        warmed = await served.http.post("/v1/precache", json=prefix)
        chat = {"model": "m", "messages": HI, "conversation_id": "c"}
        answer = await served.http.post("/v1/chat/completions", json=chat)
    assert warmed.status_code == answer.status_code == 200, warmed.text
    decode = model.tokenizer.decode
    assert decode(precache.warmed[0][1]).startswith("/no_think [system] Be kind.")
    next_turn = await precache.ended[0][1]()
    assert decode(list(next_turn)).startswith("/no_think [user] hi\n[assistant] hello")


async def test_another_table_counts_from_the_next_request_on(tmp_path):
    model = ToyModel(make_folder(tmp_path / "toy"), "m", script="hello")
    chat = {"model": "m", "messages": HI}
    async with serving(model) as served:
        prompts = []
        for manifest in (Manifest(), OFF, Manifest(thinking="on", template=GIVEN), Manifest()):
            model.manifest = manifest
            answer = await served.http.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            prompts.append(prompt_of(model))
    assert prompts[0] == prompts[3]
    assert prompts[0].startswith(TEMPLATE[TEMPLATE.index("<|im") :][: len("<|im_start|>")])
    assert prompts[1].endswith("at once")
    assert prompts[2].endswith("aloud")


async def test_models_are_listed_with_category_backend_and_defaults(bare):
    models = (ToyModel(bare, "m", manifest=OFF), ToyModel(bare, "plain"))
    async with serving(*models) as served:
        first, second = (await served.http.get("/v1/models")).json()["data"]
    assert (first["category"], first["backend"]) == ("text", "mlx")
    assert "chat" in first["capabilities"]
    assert "chat" not in second["capabilities"]
    assert first["default_parameters"] == {
        **second["default_parameters"],
        "temperature": 0.25,
        "top_p": 0.5,
        "max_tokens": 3,
        "enable_thinking": False,
    }
