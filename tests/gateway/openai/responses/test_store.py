"""Responses that are kept: bounds, age, owners."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.gateway.generation import Generations
from kakeya.gateway.openai.reply import compact
from kakeya.gateway.openai.responses.background import BackgroundResponses
from kakeya.gateway.openai.responses.kept import StoredResponses
from kakeya.gateway.openai.responses.requests import parse_response
from kakeya.gateway.openai.responses.store import (
    KEEP_S,
    PreviousResponseNotFound,
    ResponseStore,
)
from kakeya.gateway.resumable.address import AnswerAddress
from kakeya.gateway.resumable.answers import ResumableAnswers
from tests.gateway.toy import no_jobs

ITEM = {"role": "user", "content": "hi"}
ASKED = compact([ITEM])


def response(name: object) -> dict:
    return {"id": f"resp_{name}", "output": [{"type": "message", "text": "hello"}]}


def kept(store: ResponseStore, count: int) -> list[int]:
    found = []
    for name in range(count):
        try:
            store.body(f"resp_{name}", "me")
        except NotFound:
            continue
        found.append(name)
    return found


def test_a_response_gives_its_items_to_its_client_for_a_day():
    now = [0.0]
    store = ResponseStore(most_bytes=1000, mono=lambda: now[0])
    store.keep(response(1), ASKED, "me")
    assert store.items("resp_1", "me") == [ITEM, *response(1)["output"]]
    with pytest.raises(PreviousResponseNotFound):
        store.items("resp_1", "another")
    with pytest.raises(NotFound):
        store.delete("resp_1", "another")
    now[0] = KEEP_S
    with pytest.raises(NotFound):
        store.body("resp_1", "me")


@given(st.integers(1, 2000), st.integers(1, 8), st.lists(st.booleans(), max_size=20))
def test_the_newest_responses_that_fit_are_kept(most_bytes, most_responses, deletions):
    store = ResponseStore(most_bytes=most_bytes, mono=lambda: 0.0, most_responses=most_responses)
    alone = ResponseStore(most_bytes=10**6, mono=lambda: 0.0)
    alone.keep(response(10), ASKED, "me")
    expected: list[int] = []
    for name, is_deleted in enumerate(deletions, 10):
        store.keep(response(name), ASKED, "me")
        if fitting := min(most_responses, most_bytes // alone.size_bytes):
            expected = [*expected, name][-fitting:]
        if is_deleted and expected:
            store.delete(f"resp_{expected.pop(0)}", "me")
    assert kept(store, 40) == expected
    assert store.size_bytes == len(expected) * alone.size_bytes


def test_a_response_that_is_too_large_takes_no_others_place():
    store = ResponseStore(most_bytes=1000, mono=lambda: 0.0)
    store.keep(response(1), ASKED, "me")
    size_bytes = store.size_bytes
    store.keep(response(2), compact([ITEM | {"content": "x" * 1000}]), "me")
    assert kept(store, 3) == [1]
    assert store.size_bytes == size_bytes


async def test_clients_without_names_are_told_apart_by_their_machines():
    store = ResponseStore(most_bytes=1000, mono=lambda: 0.0)
    store.keep(response(1), ASKED, "192.0.2.1")

    def asked(address: str) -> Request:
        path = {"response_id": "resp_1"}
        head = {"query_string": b"", "headers": [], "client": (address, 5), "path_params": path}
        return Request({"type": "http", **head})

    unused: Generations = None  # type: ignore[assignment]
    resumable = ResumableAnswers(unused, None)
    background = BackgroundResponses(no_jobs(), unused, store, random.Random(1), resumable)
    address = AnswerAddress(
        "/v1/responses", "resp_", lambda body, share: parse_response(body, store, share), resumable
    )
    stored = StoredResponses(store, background, address, resumable)
    for act in (stored.cancel, stored.delete):
        with pytest.raises(NotFound):
            await act(asked("192.0.2.2"))
    with pytest.raises(InvalidArgument, match="made at once"):
        await stored.cancel(asked("192.0.2.1"))
    assert (await stored.delete(asked("192.0.2.1"))).status_code == 200
