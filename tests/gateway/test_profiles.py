"""What the profile of a client gives to its requests: a model, a priority, a mode of thinking."""

from __future__ import annotations

import pytest

from kakeya.core.errors import ConfigError
from kakeya.dispatch.profiles import ProfileSpec, check_profiles
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.tasks import TaskSpec
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import GenerationPriority
from tests.gateway.test_coordinator_fields import DIALECTS, HI
from tests.gateway.test_manifests import GIVEN, prompt_of
from tests.gateway.test_precache import Recorded
from tests.gateway.toy import ToyEmbedder, ToyModel, make_folder, serving

SAYS_ON = Manifest(template=GIVEN, thinking="on")
PROFILES = {
    "coder": ProfileSpec(
        agents=("claude-cli/",),
        model="titles",
        priority=GenerationPriority.HIGH,
        thinking="off",
    ),
    "ci": ProfileSpec(clients=("build",), model="small", priority=GenerationPriority.BATCH),
}
TASKS = {
    "titles": TaskSpec(candidates=(("small",),)),
    "slow": TaskSpec(candidates=(("small",),), priority=GenerationPriority.LOW),
}
CODER = {"user-agent": "claude-cli/2.0.1 (external)"}


@pytest.fixture
def small(tmp_path):
    return ToyModel(make_folder(tmp_path / "toy"), "small", script="hello", manifest=SAYS_ON)


def registry() -> TaskRegistry:
    return TaskRegistry(TASKS, profiles=PROFILES)


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_name_that_is_not_served_is_that_of_the_profile(small, path):
    body = {**DIALECTS[path], "model": "claude-sonnet-4-5", "stream": False}
    async with serving(small, tasks=registry()) as served:
        answer = await served.http.post(path, json=body, headers=CODER)
        refused = await served.http.post(path, json=body)
        found = await served.http.get(f"/api/v1/requests/{answer.headers['x-request-id']}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "small"
    assert refused.status_code == 404
    assert small.requests[0].priority is GenerationPriority.HIGH
    told = found.json()
    assert told["task"]["name"] == "titles"
    assert told["defaults"]["model"] == {"value": "titles", "from": "profiles.coder"}
    assert told["defaults"]["priority"] == {"value": "high", "from": "profiles.coder"}


async def test_a_request_wins_over_its_task_and_that_over_the_profile_and_the_model(small):
    async def ask(body: dict, headers: dict) -> tuple[GenerationPriority, str]:
        chat = {"model": "small", "messages": HI, **body}
        answer = await served.http.post("/v1/chat/completions", json=chat, headers=headers)
        assert answer.status_code == 200, answer.text
        return small.requests[-1].priority, prompt_of(small).rpartition("\n")[2]

    async with serving(small, tasks=registry()) as served:
        assert await ask({}, {}) == (GenerationPriority.NORMAL, "aloud")
        assert await ask({}, CODER) == (GenerationPriority.HIGH, "at once")
        assert await ask({"model": "slow"}, CODER) == (GenerationPriority.LOW, "at once")
        own = {"model": "slow", "x_priority": "urgent", "enable_thinking": True}
        assert await ask(own, CODER) == (GenerationPriority.URGENT, "aloud")
        assert await ask({"x_client_id": "build"}, {}) == (GenerationPriority.BATCH, "aloud")
        named = {"x-kakeya-client": "build", "x-priority": "low"}
        assert await ask({}, named) == (GenerationPriority.LOW, "aloud")


async def test_tokens_are_counted_as_the_profile_has_them_written(small):
    body = {"model": "claude-haiku", "messages": HI, "max_tokens": 4}
    async with serving(small, tasks=registry()) as served:
        counted = await served.http.post("/v1/messages/count_tokens", json=body, headers=CODER)
        answer = await served.http.post("/v1/messages", json=body, headers=CODER)
    assert counted.status_code == answer.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == len(small.requests[0].token_ids)


async def test_an_adapter_that_is_missing_is_not_taken_for_another_model(small):
    body = {"model": "small:style", "messages": HI}
    async with serving(small, tasks=registry()) as served:
        refused = await served.http.post("/v1/chat/completions", json=body, headers=CODER)
    assert refused.status_code == 404


@pytest.mark.parametrize("headers", [CODER, {}])
async def test_a_prefix_is_warmed_as_the_requests_of_the_profile_have_it_written(small, headers):
    kept = Recorded()
    name = "claude-sonnet-4-5" if headers else "small"
    body = {"model": name, "messages": HI}
    async with serving(small, tasks=registry(), precache=kept) as served:
        warmed = await served.http.post("/v1/precache", json=body, headers=headers)
        answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        unknown = await served.http.post("/v1/precache", json={**body, "model": "gpt-9"})
    assert (warmed.status_code, answer.status_code, unknown.status_code) == (200, 200, 404)
    assert warmed.json()["model"] == "small"
    ((claim, token_ids, _),) = kept.warmed
    assert claim.model_id == "small"
    assert token_ids == list(small.requests[0].token_ids)
    assert prompt_of(small).endswith("at once" if headers else "aloud")


async def test_a_prefix_takes_the_fields_of_the_node_and_leaves_out_what_means_nothing(small):
    kept = Recorded()
    body = {"model": "small", "messages": HI, "x_client_id": "ann", "x_stay_warm": 5, "x_other": 1}
    async with serving(small, tasks=registry(), precache=kept) as served:
        warmed = await served.http.post("/v1/precache", json=body)
    assert warmed.status_code == 200, warmed.text
    assert warmed.headers["x-kakeya-ignored"] == "x_other, x_stay_warm"
    assert kept.warmed[0][0].client == "ann"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_embeddings_are_made_by_the_embedder_of_the_profile_at_its_priority(small, path):
    first, second = (ToyEmbedder(small.folder, model_id) for model_id in ("first", "second"))
    profile = ProfileSpec(clients=("ide",), embedder="second", priority=GenerationPriority.LOW)
    tasks = TaskRegistry({}, profiles={"ide": profile})

    async def ask(model: str, **more: object) -> tuple[object, ...]:
        body = {"model": model, "input": "hi", **more}
        answer = await served.http.post(path, json=body)
        asked = [*first.priorities, *second.priorities]
        first.priorities, second.priorities = [], []
        return answer.status_code, answer.json().get("model"), *asked

    async with serving(small, tasks=tasks, embedders=[first, second]) as served:
        ide = {"x_client_id": "ide"}
        assert await ask("text-embedding-3", **ide) == (200, "second", GenerationPriority.LOW)
        assert await ask("first", **ide) == (200, "first", GenerationPriority.LOW)
        urgent = {"x_priority": "urgent", **ide}
        assert await ask("first", **urgent) == (200, "first", GenerationPriority.URGENT)
        assert await ask("first") == (200, "first", GenerationPriority.NORMAL)
        assert (await ask("text-embedding-3"))[0] == 404


def test_a_profile_names_an_embedder_of_the_node() -> None:
    wrong = {"ide": ProfileSpec(clients=("ide",), embedder="bgee")}
    with pytest.raises(ConfigError, match=r"bgee is none of the embedders.*did you mean bge"):
        check_profiles(wrong, ["small"], ["bge"], "node.toml")
