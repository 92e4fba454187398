"""What of a request's prompt was cached, and why; and who may ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.cli.explain import explanation
from kakeya.core.clock import SystemClock
from kakeya.gateway.explain import explained
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.keys import KeyRing, KeyRole, add_key
from kakeya.gateway.recent import MOST_RECORDS, MOST_TOKENS, RecentRequests, RequestRecord
from kakeya.generation.facts import ModelState
from kakeya.generation.frames import Usage
from tests.gateway.toy import ToyModel, make_folder, serving

FAR = {"x-forwarded-for": "192.0.2.7"}


def record(number: int, *, cached: int = 0, owner: str = "a", **more: object) -> RequestRecord:
    return RequestRecord(
        request_id=f"chatcmpl-{number:024}",
        owner=owner,
        model_id="toy",
        model_path="",
        block_tokens=64,
        conversation=str(more.get("conversation", "")),
        moved=(),
        ready_s=0.5,
        prepared_s=0.6,
        first_token_s=2.0,
        prefill_s=1.0,
        cached_tokens=cached,
    )


def recent(*asked: tuple[RequestRecord, list[int], list[int]]) -> RecentRequests:
    found = RecentRequests()
    for one, prompt, answer in asked:
        one.ended_s = 5.0
        found.add(one, prompt, answer)
    return found


def told(found: RecentRequests, one: RequestRecord) -> dict:
    return explained(one, found.nearest(one))


def test_the_first_token_at_which_a_prompt_left_the_turn_before_is_named():
    turn, other = record(1, conversation="conv:a"), record(2)
    later = record(3, conversation="conv:a", cached=4)
    prompt = [1, 2, 3, 4, 9, 9]
    found = recent((turn, [1, 2, 3, 4, 5], [6]), (other, prompt, []), (later, prompt, []))
    body = told(found, later)
    assert body["parted_at_token"] == 4
    assert body["compared_with"] == {
        "id": turn.request_id,
        "is_same_conversation": True,
        "common_tokens": 4,
    }
    assert (body["cached_tokens"], body["computed_tokens"]) == (4, 2)
    assert body["waits_s"] == {
        "load": 0.5,
        "render": 0.1,
        "queue": 0.4,
        "prefill": 1.0,
        "decode": 3.0,
        "total": 5.0,
    }


def test_the_speed_of_an_answer_that_came_in_one_piece_is_its_engines():
    one = record(1)
    found = recent((one, [1, 2], [3] * 31))
    assert found.brief()[0]["tokens_per_second"] == 10.0
    one.first_token_s = one.ended_s - 0.001
    one.usage = Usage(prefill_s=1.0, total_s=4.0)
    assert found.brief()[0]["tokens_per_second"] == 10.0


@pytest.mark.parametrize(
    ("cached", "prompt", "parted", "why"),
    [
        (6, [1, 2, 3, 4, 5, 6, 7], None, "all of it was cached"),
        (6, [1, 2, 3, 4, 5, 6, 7, 8], 6, "goes on from"),
        (2, [1, 2, 3, 4, 5, 6, 7, 8], 2, "pieces, which end each 64"),
        (4, [1, 2, 9, 9, 9, 9, 9, 9], 4, "computed ahead, or other requests"),
        (2, [1, 2, 9, 9, 9, 9, 9, 9], 2, "another text stands there"),
    ],
)
def test_a_reason_is_given_for_each_case(cached, prompt, parted, why):
    later = record(2, cached=cached)
    body = told(recent((record(1), [1, 2, 3, 4, 5], [6]), (later, prompt, [])), later)
    assert body["parted_at_token"] == parted
    assert why in str(body["reason"])


def test_kv_that_is_gone_is_told_and_a_first_request_has_nothing_before_it():
    text = list(range(200))
    later = record(2, cached=64)
    found = recent((record(1), text, []), (later, [*text, 7, 8], []))
    assert "no longer kept" in str(told(found, later)["reason"])
    first = found.find("req_" + "0" * 23 + "1")
    assert first is not None
    assert told(found, first)["compared_with"] is None
    assert told(found, first)["parted_at_token"] == 0


def test_prompts_of_other_clients_are_not_compared_with():
    later = record(2, owner="b")
    found = recent((record(1), [1, 2, 3], []), (later, [1, 2, 4], []))
    assert found.nearest(later) is None


@given(st.lists(st.integers(0, MOST_TOKENS // 3), max_size=8))
def test_records_are_bounded(sizes: list[int]):
    found, asked = RecentRequests(), [record(number) for number in range(len(sizes))]
    for one, size in zip(asked, sizes, strict=True):
        found.add(one, range(size), [])
    kept = [one for one in asked if found.find(one.request_id) is not None]
    assert kept == asked[len(asked) - len(kept) :]
    assert sum(one.prompt_tokens for one in kept) <= MOST_TOKENS
    assert not sizes or kept


def test_no_more_records_are_kept_than_the_bound():
    found = recent(*((record(number), [1], []) for number in range(MOST_RECORDS + 3)))
    kept = [number for number in range(MOST_RECORDS + 3) if found.find(f"{number:024}")]
    assert kept == list(range(3, MOST_RECORDS + 3))


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@pytest.fixture
def keys(tmp_path):
    roles = {"laptop": KeyRole.INFER, "phone": KeyRole.INFER, "owner": KeyRole.ADMIN}
    return {name: add_key(tmp_path, name, role, 0.0) for name, role in roles.items()}


async def test_over_http_with_the_text_around_the_token(folder):
    model = ToyModel(folder, script="ok")
    async with serving(model) as served:
        for said in ("hello world of text", "hello world of cats"):
            body = {"model": "toy", "messages": [{"role": "user", "content": said}]}
            reply = await served.http.post("/v1/chat/completions", json=body)
        found = await served.http.get(f"/api/v1/requests/{reply.headers['x-request-id']}")
        unknown = await served.http.get("/api/v1/requests/req_nothing")
    body = found.json()
    assert body["id"] == reply.json()["id"]
    assert body["cached_tokens"] == reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    text = body["text"]
    whole = model.tokenizer.decode(model.requests[1].token_ids, skip_special_tokens=False)
    assert text["before"] + text["behind"] in whole
    lines = list(explanation(body))
    assert any("is the first that was not cached" in line for line in lines)
    assert any(line.startswith("  waits    load") for line in lines)


async def test_a_request_that_waits_tells_for_what(folder):
    model = ToyModel(folder, state=ModelState.LOADING, loads="41 %", script="hello")
    async with serving(model, limits=HttpLimits(progress_s=0.05)) as served:
        body = {"model": "toy", "prompt": "a", "max_tokens": 1, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            path = f"/api/v1/requests/{answer.headers['x-request-id']}"
            told = (await served.http.get(path)).json()
            assert told["state"] == "waiting"
            assert told["waits_for"]["reason"] == "load"
            assert "loading toy, 41 %" in "\n".join(explanation(told))
            model.loads = ""
            model.loaded.set()
            await answer.aread()
        assert "state" not in (await served.http.get(path)).json()


async def test_a_client_sees_its_own_requests_and_the_owner_all(tmp_path, folder, keys):
    check = KeyCheck(ring=KeyRing(tmp_path, SystemClock().mono), needed="remote")
    async with serving(ToyModel(folder, script="ok"), keys=check) as served:

        def key_of(name: str) -> dict[str, str]:
            return {**FAR, "authorization": f"Bearer {keys[name]}"}

        body = {"model": "toy", "prompt": "hello"}
        reply = await served.http.post("/v1/completions", json=body, headers=key_of("laptop"))
        path = f"/api/v1/requests/{reply.headers['x-request-id']}"
        statuses = [
            (await served.http.get(path, headers=headers)).status_code
            for headers in (
                key_of("laptop"),
                key_of("owner"),
                {},
                key_of("phone"),
                {**key_of("phone"), "x-kakeya-client": "laptop"},
                FAR,
            )
        ]
    assert statuses == [200, 200, 200, 404, 404, 401]
