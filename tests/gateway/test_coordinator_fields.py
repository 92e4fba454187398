"""Fields for the node in a body of any dialect: honoured, or left out, and seen by no model."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kakeya.generation.request import GenerationPriority
from tests.gateway.toy import ToyModel, make_folder, serving

HI = [{"role": "user", "content": "hi"}]
DIALECTS = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@pytest.mark.parametrize("path", DIALECTS)
async def test_each_dialect_takes_a_priority_and_a_client_and_leaves_out_the_rest(folder, path):
    model = ToyModel(folder, script="hello world")
    body = {"model": "toy", **DIALECTS[path], "x_priority": "low", "x_client_id": "bob", "x_y": {}}
    async with serving(model) as served:
        answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kakeya-ignored"] == "x_y"
    (request,) = model.requests
    assert (request.priority, request.client) == (GenerationPriority.LOW, "bob")


async def test_a_count_of_tokens_takes_the_client_and_leaves_out_the_rest(folder):
    body = {"model": "toy", "messages": HI, "x_client_id": "bob", "x_y": 1, "x_priority": "low"}
    async with serving(ToyModel(folder, script="hello world")) as served:
        answer = await served.http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kakeya-ignored"] == "x_y, x_priority"


@pytest.mark.parametrize("name", ["urgent", "high", "normal", "low", "batch"])
async def test_each_priority_has_a_name_in_each_place(folder, name):
    model = ToyModel(folder, script="hello world")
    async with serving(model) as served:
        for body, headers in (
            ({"x_priority": name}, {}),
            ({"priority": name}, {"x-priority": "low"}),
            ({}, {"x-priority": name}),
            ({}, {"x-priority": name, "x-kakeya-priority": "low"}),
        ):
            asked = {"model": "toy", "messages": HI, **body}
            answer = await served.http.post("/v1/chat/completions", json=asked, headers=headers)
            assert answer.status_code == 200, answer.text
            assert model.requests[-1].priority.name.lower() == name


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_cooldown_refuses_further_generations_of_its_client_alone(folder, path):
    model = ToyModel(folder, script="hello world")
    asked = {"model": "toy", **DIALECTS[path], "x_stay_warm": 90, "x_cooldown": 30}
    async with serving(model) as served:
        for client in ("bob", "eve"):
            answer = await served.http.post(path, json={**asked, "x_client_id": client})
            assert answer.status_code == 200, answer.text
            assert "x-kakeya-ignored" not in answer.headers
        refused = await served.http.post(path, json={**asked, "x_client_id": "bob"})
    assert [request.stay_warm_s for request in model.requests] == [90, 90]
    assert refused.status_code == 429
    assert 25 < int(refused.headers["retry-after"]) <= 30
    assert "bob asked for a cooldown" in refused.text


async def test_programs_without_a_name_do_not_cool_each_other_down(folder):
    asked = {"model": "toy", "messages": HI, "x_cooldown": 30}
    async with serving(ToyModel(folder, script="hello world")) as served:
        for _ in range(2):
            answer = await served.http.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kakeya-ignored"] == "x_cooldown"


@pytest.mark.parametrize(
    ("body", "headers", "priority", "client", "user"),
    [
        ({}, {"x-kakeya-priority": "batch"}, GenerationPriority.BATCH, "127.0.0.1", ""),
        ({"priority": 0}, {"x-kakeya-priority": "batch"}, GenerationPriority.URGENT, None, ""),
        ({"x_priority": 0}, {}, GenerationPriority.URGENT, None, ""),
        ({"priority": "normal"}, {"x-kakeya-priority": "batch"}, None, None, ""),
        ({"service_tier": "default"}, {"x-kakeya-priority": "batch"}, None, None, ""),
        (
            {"service_tier": "auto"},
            {"x-kakeya-priority": "batch"},
            GenerationPriority.BATCH,
            None,
            "",
        ),
        ({"x_client_id": "bob"}, {"x-kakeya-client": "desk"}, None, "desk", "bob"),
        ({"x_client_id": "bob", "user": "eve"}, {"x-kakeya-client": "desk"}, None, "desk", "eve"),
    ],
)
async def test_what_is_said_twice_counts_once(folder, body, headers, priority, client, user):
    model = ToyModel(folder, script="hello world")
    asked = {"model": "toy", "messages": HI, **body}
    async with serving(model) as served:
        answer = await served.http.post("/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    (request,) = model.requests
    assert request.priority is (GenerationPriority.NORMAL if priority is None else priority)
    assert (request.client, request.user) == (client or "127.0.0.1", user)


@pytest.mark.parametrize("name", ["日本", "a\r\nx-evil: 1", " a ", "\x7f", "a" * 65])
async def test_any_name_is_a_client_of_its_own_and_breaks_no_header(folder, name):
    model = ToyModel(folder, script="hello world")
    asked = {"model": "toy", "messages": HI, "x_client_id": name}
    async with serving(model) as served:
        answer = await served.http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert model.requests[0].client == sha256(name.encode()).hexdigest()


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"x_priority": "fast"}, {}, "x_priority"),
        ({"x_priority": True}, {}, "x_priority"),
        ({"x_stay_warm": 3601}, {}, "x_stay_warm"),
        ({"x_cooldown": -1}, {}, "x_cooldown"),
        ({"x_client_id": 7}, {}, "x_client_id"),
        ({}, {"x-kakeya-priority": "fast"}, "x-kakeya-priority"),
        ({}, {"x-priority": "fast"}, "x-priority"),
    ],
)
async def test_a_wrong_one_is_named_with_what_would_be_right(folder, body, headers, param):
    asked = {"model": "toy", "messages": HI, **body}
    async with serving(ToyModel(folder)) as served:
        answer = await served.http.post("/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    if "priority" in param:
        assert "urgent, high, normal, low, batch" in error["message"]
