"""The OpenAPI document: what it tells is what the gateway does."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kakeya.gateway.http.connection import HttpLimits
from tests.gateway.toy import ToyEmbedder, ToyModel, make_folder, serving

FEW = settings(
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MODELS = {"/v1/embeddings": "encoder"}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


def exercise(port: int, mode: str) -> dict[str, set[int]]:
    """Send what the document allows, or what it forbids; returns the statuses of each operation."""
    import schemathesis  # here: it costs each worker of xdist time to collect

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_bodies = [one for one in operations if one.body]
    chosen = with_bodies if mode == "negative" else operations
    return {one.label: statuses(one, mode) for one in chosen}


def statuses(operation, mode: str) -> set[int]:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as of_document

    checks = [
        not_a_server_error,
        of_document.status_code_conformance,
        of_document.content_type_conformance,
        of_document.response_schema_conformance,
        *[of_document.negative_data_rejection] * (mode == "negative"),
    ]
    found = set()

    @FEW
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case) -> None:
        if mode == "positive" and isinstance(case.body, dict):
            case.body["model"] = MODELS.get(operation.path, "toy")
            case.body.pop("draft_policy", None)  # its words are the node's own
        reply = case.call(timeout=20)
        case.validate_response(reply, checks=checks)
        found.add(reply.status_code)

    ask()
    return found


@pytest.mark.parametrize("mode", ["positive", "negative"])
async def test_requests_by_the_document_are_answered_as_it_says(folder, mode):
    embedders = [ToyEmbedder(folder)]
    async with serving(ToyModel(folder), embedders=embedders) as served:
        answered = await asyncio.to_thread(exercise, served.port, mode)
    posts = [found for label, found in answered.items() if label.startswith("POST")]
    assert len(posts) >= 7
    if mode == "positive":
        assert any(200 in found for found in posts), answered
        gets = {label for label in answered if label.startswith("GET") and "{" not in label}
        assert {label: answered[label] for label in gets} == {label: {200} for label in gets}
        assert {"GET /v1/models", "GET /healthz", "GET /metrics"} <= gets


async def test_the_document_names_the_parameters_that_are_read(folder):
    documents = []
    for limits in (HttpLimits(), HttpLimits(unknown="warn")):
        async with serving(ToyModel(folder), limits=limits) as served:
            documents.append((await served.http.get("/openapi.json")).json())
    bodies = []
    for document in documents:
        chat = document["paths"]["/v1/chat/completions"]["post"]
        bodies.append(chat["requestBody"]["content"]["application/json"]["schema"])
        assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    strict, lax = bodies
    assert strict["required"] == ["model", "messages"]
    temperature = {"type": "number", "minimum": 0, "maximum": 2}
    assert strict["properties"]["temperature"] == {"anyOf": [temperature, {"type": "null"}]}
    assert strict["properties"]["echo"] == {"anyOf": [{"enum": [False]}, {"type": "null"}]}
    assert (strict["additionalProperties"], lax["additionalProperties"]) == ({"type": "null"}, True)
    assert strict["properties"] == lax["properties"]
