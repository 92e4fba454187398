"""A task in the place of a model, in every dialect; and the settings that change at run time."""

from __future__ import annotations

import pytest

from kakeya.core.clock import SystemClock
from kakeya.dispatch.registry import LiveSettings, TaskRegistry
from kakeya.dispatch.tasks import TaskSpec
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.keys import KeyRing, KeyRole, add_key
from kakeya.generation.facts import ModelState
from kakeya.generation.request import GenerationPriority
from tests.gateway.test_coordinator_fields import DIALECTS, HI
from tests.gateway.toy import ToyModel, make_folder, serving

SPEC = TaskSpec(
    candidates=(("big",), ("small",)),
    budget_s=9.0,
    keep_alive_s=60.0,
    priority=GenerationPriority.LOW,
)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@pytest.fixture
def keys(tmp_path):
    """Of a client and of an admin."""
    return [add_key(tmp_path, role.value, role, 0.0) for role in KeyRole]


def two(folder) -> tuple[ToyModel, ToyModel]:
    """One that is not loaded, and one that is."""
    big = ToyModel(folder, "big", script="hello", state=ModelState.UNLOADED)
    return big, ToyModel(folder, "small", script="hello world", context_tokens=400)


@pytest.mark.parametrize("path", DIALECTS)
async def test_each_dialect_takes_a_task_as_its_model(folder, path):
    big, small = two(folder)
    async with serving(big, small, tasks=TaskRegistry({"titles": SPEC})) as served:
        body = {"model": "titles", "stream": False, **DIALECTS[path]}
        answer = await served.http.post(path, json=body)
        found = await served.http.get(f"/api/v1/requests/{answer.headers['x-request-id']}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "small"
    assert answer.headers["x-kakeya-task"] == (
        "titles; model=small; step=1; loaded=1; tokens_per_second=0.0; "
        "reason=it is loaded, and big is not"
    )
    (request,) = small.requests
    assert request.priority is GenerationPriority.LOW
    assert 0 < request.deadline_s <= 9
    assert request.stay_warm_s == 60
    told = found.json()["task"]
    assert [one["model"] for one in told["candidates"]] == ["small", "big"]
    if not path.startswith("/api/"):  # Ollama's account has no room for ours
        assert answer.json()["usage"]["kakeya"]["task"] == told


async def test_what_a_request_says_wins_over_its_task(folder):
    own = {"x_priority": "high", "deadline_s": 3, "x_stay_warm": 90}
    big, small = two(folder)
    async with serving(big, small, tasks=TaskRegistry({"titles": SPEC})) as served:
        for said, headers in ((own, {}), ({}, {"x-priority": "batch"}), ({"priority": 1}, {})):
            body = {"model": "titles", "messages": HI, **said}
            answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    first, second, third = small.requests
    assert (first.priority, first.stay_warm_s) == (GenerationPriority.HIGH, 90)
    assert first.deadline_s <= 3
    assert second.priority is GenerationPriority.BATCH
    assert third.priority is GenerationPriority.NORMAL


async def test_a_model_by_its_own_name_is_not_chosen(folder):
    async with serving(*two(folder), tasks=TaskRegistry({"titles": SPEC})) as served:
        body = {"model": "small", "messages": HI}
        answer = await served.http.post("/v1/chat/completions", json=body)
        missing = await served.http.post("/v1/chat/completions", json=body | {"model": "tittles"})
    assert "x-kakeya-task" not in answer.headers
    assert "task" not in answer.json()["usage"]["kakeya"]
    assert "big, small, titles; did you mean titles?" in missing.json()["error"]["message"]


async def test_tasks_are_listed_beside_models(folder):
    async with serving(*two(folder), tasks=TaskRegistry({"titles": SPEC})) as served:
        listed = [one async for one in await served.openai.models.list()]
        one = await served.openai.models.retrieve("titles")
        tags = (await served.http.get("/api/tags")).json()["models"]
        shown = await served.http.post("/api/show", json={"model": "titles"})
    assert [model.id for model in listed] == ["big", "small", "titles"]
    for body in (listed[2].model_dump(), one.model_dump()):
        assert (body["kind"], body["owned_by"]) == ("task", "kakeya")
        assert (body["candidates"], body["context_length"]) == (["big", "small"], 400)
    assert [tag["name"] for tag in tags] == ["big", "small", "titles"]
    assert shown.status_code == 200


async def test_settings_change_at_run_time(folder, tmp_path):
    renewed = LiveSettings(tasks={"later": SPEC}, needs_restart=("memory.budget_mb",))
    tasks = TaskRegistry({"titles": SPEC}, reread=lambda: renewed, file=tmp_path / "live.json")
    async with serving(*two(folder), tasks=tasks) as served:
        before = (await served.http.get("/api/v1/config")).json()
        put = await served.http.put("/api/v1/config", json={"allowCloudFallback": False})
        again = await served.http.put("/api/v1/config", json={"reload": True})
        wrong = await served.http.put("/api/v1/config", json={"allowCloudFallback": "no"})
        empty = await served.http.put("/api/v1/config", json={})
        paths = (await served.http.get("/openapi.json")).json()["paths"]
    assert before["allowCloudFallback"] is True
    assert before["tasks"]["titles"]["budget_s"] == 9
    assert put.json()["allowCloudFallback"] is False
    assert list(again.json()["tasks"]) == ["later"]
    assert again.json()["needs_restart"] == ["memory.budget_mb"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "allowCloudFallback")
    assert empty.status_code == 400
    assert sorted(paths["/api/v1/config"]) == ["get", "put"]


async def test_a_caller_elsewhere_needs_the_key_of_an_admin(folder, keys, tmp_path):
    user, admin = keys
    far = {"x-forwarded-for": "192.0.2.7"}
    async with serving(
        *two(folder), keys=KeyCheck(ring=KeyRing(tmp_path, SystemClock().mono))
    ) as served:

        async def put(**headers: str) -> int:
            body = {"allowCloudFallback": False}
            sent = await served.http.put("/api/v1/config", json=body, headers=far | headers)
            return sent.status_code

        assert await put() == 401
        assert await put(authorization=f"Bearer {user}") == 403
        assert await put(authorization=f"Bearer {admin}") == 200
