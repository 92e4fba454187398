"""The conversation of a request that names none, and lines that are moved: over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from starlette.datastructures import Headers

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.openai.requests import parse_chat, parse_completion
from kakeya.gateway.session_hint import cache_use, session_of
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys, PromptSegment, hash_stable_prefix
from kakeya.prefix.seam import NoPrecache, PrefixClaim
from tests.gateway.toy import ToyModel, make_folder, serving

SESSION = "0192f0c1-7d5e-7cc3-98c4-dc0c0c07398f"
BILLING = "x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={};"
HI = {"role": "user", "content": "hi"}


def hinted(*messages: dict[str, str], headers: dict[str, str], **body: object) -> CacheKeys:
    asked = parse_chat({"model": "toy", "messages": list(messages), **body}).asked
    return cache_use(asked, Headers(headers), session_of(body, Headers(headers))).keys


@pytest.mark.parametrize(
    "name",
    ["X-Claude-Code-Session-Id", "session-id", "thread-id", "x-session-id", "x-session-affinity"],
)
def test_a_header_of_an_agent_program_names_a_session(name: str):
    assert session_of({}, Headers({name: SESSION})) == SESSION
    assert session_of({}, Headers({name: "x" * 300})) == ""


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION}), SESSION),
        (f"user_3f2a_account__session_{SESSION}", SESSION),
        ("alice@example.org", ""),
        ("{not json", ""),
        ('{"session_id": 7}', ""),
        ("[" * 500, ""),
        (7, ""),
    ],
)
def test_claude_codes_user_id_names_a_session_and_a_persons_does_not(user_id, session):
    assert session_of({"metadata": {"user_id": user_id}}, Headers({})) == session


def test_turns_of_a_conversation_have_one_key_and_other_requests_of_the_session_another():
    headers = {"x-session-id": SESSION}
    system = {"role": "system", "content": "You are an agent."}
    answer = {"role": "assistant", "content": "hello"}
    first = hinted(system, HI, headers=headers)
    assert first.conversation_id.startswith(SESSION[:16])
    assert hinted(system, HI, answer, HI, headers=headers) == first
    title = {"role": "system", "content": "You write titles."}
    others = [
        hinted(title, HI, headers=headers),
        hinted(system, {"role": "user", "content": "ho"}, headers=headers),
        hinted(system, HI, headers={"x-session-id": "another"}),
        hinted(system, HI, headers={}),
    ]
    assert others[-1] == CacheKeys()
    assert len({one.conversation_id for one in (first, *others)}) == 5


def test_a_chat_with_tools_is_a_conversation_without_a_session():
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    first = hinted(HI, headers={}, tools=tools)
    assert first.conversation_id.startswith("tools/")
    assert hinted(HI, {"role": "assistant", "content": "a"}, HI, headers={}, tools=tools) == first


def test_a_line_that_changes_is_no_part_of_the_key():
    headers = {"x-session-id": SESSION}
    systems = [
        {"role": "system", "content": f"{BILLING.format(cch)}\nYou are an agent."}
        for cch in ("0f3a9", "77b01")
    ]
    one, other = (hinted(system, HI, headers=headers) for system in systems)
    assert one == other


def test_keys_of_the_body_win_over_headers_and_headers_over_sessions():
    headers = {"x-session-id": SESSION, "x-kakeya-conversation": "room"}
    assert hinted(HI, headers=headers) == CacheKeys(conversation_id="room")
    given = {"prompt_cache_key": "mine"}
    assert hinted(HI, headers=headers, **given) == CacheKeys(prompt_cache_key="mine")


def test_headers_give_each_key_and_the_retention_to_any_request():
    headers = Headers({"x-kakeya-prefix": "beef", "x-kakeya-retention": "24h"})
    asked = parse_completion({"model": "toy", "prompt": "hi"}).asked
    use = cache_use(asked, headers, SESSION)
    assert (use.keys, use.retention) == (CacheKeys(prefix_hash="beef"), Retention.EXTENDED)
    with pytest.raises(InvalidArgument, match="x-kakeya-retention"):
        cache_use(asked, Headers({"x-kakeya-retention": "ever"}), "")


def test_segments_and_prefix_hashes_of_a_body_are_keys():
    segments = [{"content": "rules", "stable": True}, {"content": "now", "stable": False}]
    digest = hash_stable_prefix([PromptSegment(content="rules", stable=True)])
    keys = hinted(HI, headers={}, prompt_segments=segments, prefix_hash="beef")
    assert keys == CacheKeys(segment_hash=digest, prefix_hash="beef")
    unstable = [{"content": "now", "stable": False}]
    assert hinted(HI, headers={}, prompt_segments=unstable) == CacheKeys()
    for wrong in ({}, [7], [{"content": "x"}], [{"content": 7, "stable": True}]):
        with pytest.raises(InvalidArgument, match="prompt_segments"):
            hinted(HI, headers={}, prompt_segments=wrong)


def test_stable_tokens_are_of_prompts_that_are_token_ids():
    body = {"model": "toy", "prompt": [1, 2, 3], "stable_tokens": 2}
    use = cache_use(parse_completion(body).asked, Headers({}), "")
    assert (use.cuts(3), use.cuts(2), use.cuts(1), use.is_empty) == ((1,), (1,), (), True)
    header = {"x-kakeya-stable-tokens": "3"}
    asked = parse_completion({**body, "stable_tokens": None}).asked
    assert cache_use(asked, Headers(header), "").stable_tokens == 3
    with pytest.raises(InvalidArgument, match="stable-tokens"):
        cache_use(asked, Headers({"x-kakeya-stable-tokens": "-1"}), "")
    for prompt in ("text", [1], [[1, 2, 3], [1]]):
        with pytest.raises(InvalidArgument, match="stable_tokens is 2"):
            parse_completion({**body, "prompt": prompt})
    with pytest.raises(Unsupported):
        parse_chat({"model": "toy", "messages": [HI], "stable_tokens": 2})


class Claims(NoPrecache):
    def __init__(self) -> None:
        self.claims: list[PrefixClaim] = []

    def kv_key(self, claim: PrefixClaim) -> str:
        self.claims.append(claim)
        return ""


@pytest.mark.parametrize("is_stream", [False, True])
async def test_moved_lines_are_told_in_the_account_and_the_headers(tmp_path, is_stream):
    model, precache = ToyModel(make_folder(tmp_path / "toy"), script="ok"), Claims()
    said = "Time: 2026-11-25T19:25:33Z"
    body = {"model": "toy", "messages": [{"role": "system", "content": "Be kind."}, HI]}
    changed = {"role": "system", "content": f"{BILLING.format('1')}\n{said}\nBe kind."}
    moved = body | {"messages": [changed, HI]}
    if is_stream:
        moved |= {"stream": True, "stream_options": {"include_usage": True}}
    async with serving(model, precache=precache) as served:
        headers = {"x-session-id": SESSION}
        plain = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        told = await served.http.post("/v1/chat/completions", json=moved, headers=headers)
    assert "x-kakeya-moved" not in plain.headers
    assert "moved" not in plain.json()["usage"]["kakeya"]
    assert told.headers["x-kakeya-moved"] == "billing_header, date"
    usage = (
        json.loads(told.text.split("data: ")[-2])["usage"] if is_stream else told.json()["usage"]
    )
    assert usage["kakeya"]["moved"] == ["billing_header", "date"]
    assert usage["kakeya"]["forwards"] > 0
    one, other = (model.tokenizer.decode(asked.token_ids) for asked in model.requests)
    assert other == one.replace("user\nhi", f"user\n{said}\n\nhi")
    first, second = (replace(claim, facts=model.facts) for claim in precache.claims)
    assert first == second
    assert first.use.keys.conversation_id
