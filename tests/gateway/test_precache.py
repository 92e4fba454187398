"""POST /v1/precache, and what chat and completions say of their prefix."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.openai.requests import parse_chat
from kakeya.generation.cuts import marked, unmarked
from kakeya.generation.facts import ModelState
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import (
    CacheUse,
    NoPrecache,
    PrefixClaim,
    TokenSource,
    Warmed,
    WarmOutcome,
    WarmReport,
)
from kakeya.text.prefix import encode_prefix
from kakeya.text.template import ChatTemplate
from kakeya.text.text import TextModel
from tests.gateway.toy import ToyModel, make_folder, serving
from tests.text.texts import chat_of

SAID = "hello world, 日本語 😀"
HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "Be kind."}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('/think')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + THINKING


@dataclass
class Recorded(NoPrecache):
    """A `Precache` that has no time for anything but to write it down."""

    ended: list[tuple[PrefixClaim, TokenSource]] = field(default_factory=list)
    warmed: list[tuple[PrefixClaim, list[int], bool]] = field(default_factory=list)
    outcome: WarmOutcome = WarmOutcome.WARM

    def kv_key(self, claim: PrefixClaim) -> str:
        return f"slot:{claim.use.keys.conversation_id}" if not claim.use.is_empty else ""

    def opened(self, claim: PrefixClaim) -> asyncio.Future[WarmReport] | None:
        if claim.use.keys.conversation_id != "known":
            return None
        report = asyncio.get_running_loop().create_future()
        report.set_result(WarmReport(outcome=WarmOutcome.WARM, warmed=Warmed(tokens=9, cached=8)))
        return report

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        self.ended.append((claim, tokens))

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        ids = list(await tokens())
        self.warmed.append((claim, ids, is_pinned))
        reason = "" if self.outcome is WarmOutcome.WARM else "not now"
        warmed = Warmed(tokens=len(ids), cached=3, computed=len(ids) - 4)
        is_held = is_pinned and self.outcome is WarmOutcome.WARM
        return WarmReport(outcome=self.outcome, warmed=warmed, reason=reason, is_pinned=is_held)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


@pytest.fixture
def text(folder):
    return TextModel(folder, lambda: 0.0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_chat_of_a_conversation_continues_its_slot_and_prepares_its_next_turn(
    folder, text, is_stream
):
    model, precache = ToyModel(folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        extra = {"conversation_id": "7", "prompt_cache_retention": "24h"}
        reply = await served.openai.chat.completions.create(
            model="toy", messages=[SYSTEM, *HI], stream=is_stream, extra_body=extra
        )
        if is_stream:
            [chunk async for chunk in reply]
    assert model.requests[0].kv_key == "slot:7"
    ((claim, tokens),) = precache.ended
    assert claim.use == CacheUse(keys=CacheKeys(conversation_id="7"), retention=Retention.EXTENDED)
    turn = [SYSTEM, *HI, {"role": "assistant", "content": SAID}]
    following_chat = chat_of(*turn, {"role": "user", "content": "go on"})
    following = await text.encode_chat(following_chat, at_most=999)
    *prefix, _ = ahead = list(await tokens())
    assert following[: len(prefix)] == unmarked(prefix)[0]
    shown = text.tokenizer.decode(following[: len(prefix)], skip_special_tokens=False)
    assert shown.endswith(f"{SAID}<|im_end|>\n<|im_start|>user\n")
    # Its KV ends where one of the cuts of what comes is.
    later = await text.cuts_of(following, following_chat, at_most=999)
    assert len(prefix) in later
    assert [cut for cut in later if cut <= len(prefix)] == list(unmarked(ahead)[1])


@pytest.fixture
def thinking_folder(tmp_path):
    return make_folder(tmp_path / "thinking", template=THINKING)


async def test_the_next_turn_is_rendered_as_it_will_be_and_not_as_this_one_was(thinking_folder):
    model, precache = ToyModel(thinking_folder, script="aa bb/think hello"), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post(
            "/v1/chat/completions",
            json={"model": "toy", "messages": HI, "conversation_id": "7"},
        )
    ((_, tokens),) = precache.ended
    shown = model.tokenizer.decode(list(await tokens()), skip_special_tokens=False)
    assert "aa bb" not in shown
    assert " hello<|im_end|>" in shown


async def test_a_request_that_names_nothing_leaves_everything_to_content(folder):
    model, precache = ToyModel(folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        await served.openai.chat.completions.create(model="toy", messages=HI)
    assert model.requests[0].kv_key == ""
    assert precache.ended == []


async def test_a_client_is_told_to_the_engine_for_its_fair_share(folder):
    model, precache = ToyModel(folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post(
            "/v1/chat/completions",
            json={"model": "toy", "messages": HI, "conversation_id": "7"},
            headers={"x-kakeya-client": "alice"},
        )
    assert model.requests[0].client == "alice"
    assert precache.ended[0][0].client == "alice"


@pytest.mark.parametrize(
    ("body", "priority", "user"),
    [
        ({}, GenerationPriority.NORMAL, ""),
        ({"service_tier": "auto", "user": "bob"}, GenerationPriority.NORMAL, "bob"),
        ({"service_tier": "priority"}, GenerationPriority.URGENT, ""),
        ({"service_tier": "flex", "priority": 2}, GenerationPriority.BATCH, ""),
        ({"priority": 0, "service_tier": "auto"}, GenerationPriority.URGENT, ""),
        ({"priority": "high"}, GenerationPriority.HIGH, ""),
        ({"x_priority": "low", "priority": "high", "x_other": [1]}, GenerationPriority.LOW, ""),
        ({"user": "b", "safety_identifier": "c"}, GenerationPriority.NORMAL, "c"),
        ({"user": "long " * 13}, GenerationPriority.NORMAL, sha256(b"long " * 13).hexdigest()),
    ],
)
async def test_who_asks_and_how_urgently_is_told_to_the_engine(folder, body, priority, user):
    model = ToyModel(folder, script=SAID)
    async with serving(model) as served:
        asked = {"model": "toy", "messages": HI} | body
        assert (await served.http.post("/v1/chat/completions", json=asked)).status_code == 200
    (request,) = model.requests
    assert (request.priority, request.client, request.user) == (priority, "127.0.0.1", user)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"priority": 3}, "priority"),
        ({"priority": "speculative"}, "priority"),
        ({"priority": True}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"service_tier": "flex", "priority": 0}, "priority"),
        ({"user": 7}, "user"),
    ],
)
def test_an_urgency_that_cannot_be_meant_is_named(body, param):
    with pytest.raises(InvalidArgument) as caught:
        parse_chat({"model": "toy", "messages": HI} | body)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7]])
async def test_a_completion_of_a_conversation_goes_on_behind_its_text(folder, prompt):
    model, precache = ToyModel(folder, script=" world"), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post(
            "/v1/completions", json={"model": "toy", "prompt": prompt, "conversation_id": "7"}
        )
    ((_, tokens),) = precache.ended
    said = model.tokenizer.encode(" world").ids
    whole = (
        model.tokenizer.encode("hello world").ids
        if isinstance(prompt, str)
        else [*prompt, *said, 2]
    )
    assert list(await tokens()) == whole


async def test_a_cache_key_without_a_conversation_keeps_the_prompt_itself(folder):
    model, precache = ToyModel(folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        await served.openai.chat.completions.create(
            model="toy", messages=HI, prompt_cache_key="agent"
        )
    ((claim, tokens),) = precache.ended
    assert claim.use.keys == CacheKeys(prompt_cache_key="agent")
    assert list(await tokens()) == list(model.requests[0].token_ids)


async def test_a_turn_that_fills_the_context_prepares_nothing(folder):
    model, precache = ToyModel(folder, context_tokens=40), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post(
            "/v1/chat/completions",
            json={"model": "toy", "messages": HI, "conversation_id": "7", "seed": 1},
        )
    ((_, tokens),) = precache.ended
    assert list(await tokens()) == []


async def test_an_answer_that_nobody_waited_for_prepares_nothing(folder):
    model, precache = ToyModel(folder, script=SAID, fail_after=1), Recorded()
    async with serving(model, precache=precache) as served:
        answer = await served.http.post(
            "/v1/chat/completions",
            json={"model": "toy", "messages": HI, "conversation_id": "7"},
        )
    assert answer.status_code == 503
    assert precache.ended == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation_id": 7}, "conversation_id"),
        ({"prompt_cache_key": {}}, "prompt_cache_key"),
        ({"prompt_cache_retention": "week"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": 5}, "prompt_cache_retention"),
    ],
)
async def test_keys_that_cannot_be_meant_are_named(folder, body, param):
    async with serving(ToyModel(folder), precache=Recorded()) as served:
        answer = await served.http.post(
            "/v1/chat/completions", json={"model": "toy", "messages": HI} | body
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_prefix_is_warmed_as_far_as_the_users_message(folder, text):
    precache = Recorded()
    async with serving(ToyModel(folder), precache=precache) as served:
        answer = await served.http.post(
            "/v1/precache",
            json={
                "model": "toy",
                "messages": [SYSTEM],
                "conversation_id": "room/7",
                "retention": "long",
                "pin": True,
            },
        )
    ((claim, ids, is_pinned),) = precache.warmed
    shown = text.tokenizer.decode(unmarked(ids)[0][:-1], skip_special_tokens=False)
    assert shown == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert (claim.use.retention, is_pinned) == (Retention.LONG, True)
    body = answer.json()
    assert body.pop("key").startswith("conv:room-7~")
    assert body == {
        "object": "precache",
        "model": "toy",
        "status": "warm",
        "reason": "",
        "retention": "long",
        "pinned": True,
        "usage": {
            "prompt_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 3},
            "computed_tokens": len(ids) - 4,
        },
    }


@pytest.mark.parametrize(
    ("body", "label"),
    [({}, "short"), ({"pin": True}, "extended"), ({"pin": True, "retention": "long"}, "long")],
)
async def test_the_answer_says_for_how_long_it_is_of_use(folder, body, label):
    async with serving(ToyModel(folder), precache=Recorded()) as served:
        asked = {"model": "toy", "messages": HI} | body
        assert (await served.http.post("/v1/precache", json=asked)).json()["retention"] == label


async def test_messages_that_end_with_the_users_are_warmed_as_the_request_itself(folder):
    model, precache = ToyModel(folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post("/v1/precache", json={"model": "toy", "messages": [SYSTEM, *HI]})
        await served.openai.chat.completions.create(model="toy", messages=[SYSTEM, *HI])
    asked = model.requests[0]
    assert precache.warmed[0][1] == marked(asked.token_ids, asked.cuts)
    assert asked.cuts


@pytest.mark.parametrize("prompt", ["hello world", [5, 6, 7, 8, 9]])
async def test_a_raw_prompt_is_warmed_as_it_stands(folder, prompt):
    model, precache = ToyModel(folder), Recorded()
    async with serving(model, precache=precache) as served:
        await served.http.post("/v1/precache", json={"model": "toy", "prompt": prompt})
    wanted = model.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    assert precache.warmed[0][1] == wanted


async def test_without_a_key_a_prefix_is_filed_under_its_content(folder):
    precache = Recorded()
    async with serving(ToyModel(folder), precache=precache) as served:
        for content in ("one", "one", "two"):
            messages = [{"role": "system", "content": content}]
            await served.http.post("/v1/precache", json={"model": "toy", "messages": messages})
    one, same, other = (claim.use.keys.segment_hash for claim, _, _ in precache.warmed)
    assert one == same != other


@pytest.fixture
def tools_folder(tmp_path):
    return make_folder(tmp_path / "tools", template=TOOLS)


async def test_tools_are_part_of_the_prefix_and_cannot_forge_its_roles(tools_folder, text):
    precache = Recorded()
    function = {"name": "look", "description": "<|im_end|>", "parameters": {"x": ["<|im_start|>"]}}
    tools = [{"type": "function", "function": function}]
    async with serving(ToyModel(tools_folder), precache=precache) as served:
        answer = await served.http.post(
            "/v1/precache", json={"model": "toy", "messages": [SYSTEM], "tools": tools}
        )
        assert answer.status_code == 200
    ids = precache.warmed[0][1]
    shown = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert '"description": "<|im_end|>"' in shown
    assert ids.count(text.tokenizer.token_to_id("<|im_end|>")) == 1
    assert ids.count(text.tokenizer.token_to_id("<|im_start|>")) == 2


TOOL = {"type": "function", "function": {"name": "look"}}
SHOWN = {"tools": [TOOL], "tool_choice": "none"}


async def test_a_chat_shows_tools_as_what_is_warmed_for_it_did(tools_folder, text):
    model, precache = ToyModel(tools_folder, script=SAID), Recorded()
    async with serving(model, precache=precache) as served:
        warmed = {"model": "toy", "messages": [SYSTEM], "tools": [TOOL]}
        assert (await served.http.post("/v1/precache", json=warmed)).status_code == 200
        await served.openai.chat.completions.create(
            model="toy", messages=[SYSTEM, *HI], **SHOWN, extra_body={"conversation_id": "7"}
        )
    warmed_ids, cuts = unmarked(precache.warmed[0][1])
    prefix = warmed_ids[:-1]
    (asked,) = model.requests
    shown = text.tokenizer.decode(prefix, skip_special_tokens=False)
    assert shown.startswith('[{"type": "function", "function": {"name": "look"}}]<|im_start|>')
    assert list(asked.token_ids[: len(prefix)]) == list(prefix)
    assert [cut for cut in asked.cuts if cut <= len(prefix)] == [*cuts] == [len(prefix)]
    ((_, tokens),) = precache.ended
    *following, _ = await tokens()
    assert list(unmarked(following)[0][: len(prefix)]) == list(prefix)


@pytest.mark.parametrize("path", ["/v1/precache", "/v1/chat/completions"])
async def test_tools_that_a_template_does_not_show_are_written_as_plain_text(folder, text, path):
    model, precache = ToyModel(folder), Recorded()
    async with serving(model, precache=precache) as served:
        more = SHOWN if "chat" in path else {"tools": [TOOL]}
        answer = await served.http.post(path, json={"model": "toy", "messages": HI} | more)
    assert answer.status_code == 200
    prompt = model.requests[0].token_ids if "chat" in path else precache.warmed[0][1]
    shown = text.tokenizer.decode(unmarked(list(prompt))[0], skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "look"}}' in shown


async def test_a_prefix_that_could_not_be_warmed_is_no_error(folder):
    precache = Recorded(outcome=WarmOutcome.PRESSURE)
    async with serving(ToyModel(folder), precache=precache) as served:
        answer = await served.http.post(
            "/v1/precache", json={"model": "toy", "messages": [SYSTEM], "pin": True}
        )
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["reason"]) == ("skipped_pressure", "not now")
    assert answer.json()["pinned"] is False


async def test_a_model_that_is_away_is_not_loaded_for_a_prefix(folder):
    model, precache = ToyModel(folder, state=ModelState.LOADING), Recorded()
    async with serving(model, precache=precache) as served:
        answer = await served.http.post("/v1/precache", json={"model": "toy", "messages": HI})
    assert answer.json()["status"] == "skipped_away"
    assert precache.warmed == []


async def test_a_node_that_keeps_nothing_says_so(folder):
    async with serving(ToyModel(folder)) as served:
        answer = await served.http.post("/v1/precache", json={"model": "toy", "messages": HI})
    assert answer.json()["reason"] == "this node keeps no prefixes"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HI, "max_tokens": 3}, "max_tokens"),
        ({"messages": HI, "prompt": "x"}, "messages"),
        ({}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": [320]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": HI, "tools": {}}, "tools"),
        ({"messages": HI, "tools": ["x"]}, "tools[0]"),
        ({"prompt": "x", "tools": [{"type": "function", "function": {"name": "y"}}]}, "tools"),
        ({"messages": HI, "pin": "yes"}, "pin"),
        ({"messages": HI, "retention": "week"}, "retention"),
        ({"messages": HI, "conversation_id": []}, "conversation_id"),
        ({"messages": HI, "model": None}, "model"),
    ],
)
async def test_what_cannot_be_meant_is_a_400_that_names_it(folder, body, param):
    precache = Recorded()
    async with serving(ToyModel(folder), precache=precache) as served:
        answer = await served.http.post("/v1/precache", json={"model": "toy"} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert precache.warmed == []


async def test_tools_that_lie_too_deep_in_each_other_to_be_written_are_refused(tools_folder):
    """Python reads more levels than what writes and renders them can take."""

    def tools(levels: int) -> bytes:
        deep = b"[" * levels + b"]" * levels
        return b'[{"type":"function","function":{"name":"a","parameters":{"a":%b}}}]' % deep

    async with serving(ToyModel(tools_folder), precache=Recorded()) as served:
        for levels, status in ((100, 200), (127, 400), (900, 400), (5000, 400)):
            body = b'{"model":"toy","messages":[{"role":"user","content":"hi"}],"tools":%b}'
            reply = await served.http.post("/v1/precache", content=body % tools(levels))
            assert reply.status_code == status, (levels, reply.text)


async def test_a_prefix_beyond_the_context_and_an_unknown_model_are_refused(folder):
    async with serving(ToyModel(folder), precache=Recorded()) as served:
        messages = [{"role": "system", "content": "word " * 600}]
        answer = await served.http.post("/v1/precache", json={"model": "toy", "messages": messages})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await served.http.post("/v1/precache", json={"model": "x", "messages": HI})
        assert answer.status_code == 404
        assert (await served.http.get("/v1/precache")).status_code == 405


async def test_a_prefix_ends_where_two_continuations_part(text):
    messages = [SYSTEM, *HI, {"role": "assistant", "content": "hello"}]
    prefix = await encode_prefix(text, chat_of(*messages), at_most=999)
    for said in ("", "hello", "日本語", "<|im_end|>", "0", "x"):
        whole = await text.encode_chat(
            chat_of(*messages, {"role": "user", "content": said}), at_most=999
        )
        assert whole[: len(prefix)] == prefix


def test_a_template_sees_tools_only_where_there_are_any():
    template = ChatTemplate("{{ tools is none }}{{ tools }}", {}, lambda: 0.0)
    assert template.render(chat_of()) == "TrueNone"
    assert template.render(chat_of(tools=[{"name": "x"}])) == "False[{'name': 'x'}]"


def test_a_template_that_wants_tools_shows_them():
    template = ChatTemplate(
        "{{ raise_exception('none') if not tools else tools[0].name }}", {}, lambda: 0.0
    )
    assert template.render(chat_of(tools=[{"name": "x"}])) == "x"
    with pytest.raises(InvalidArgument, match="none"):
        template.render(chat_of())


async def test_a_key_alone_warms_what_is_known_of_it(folder):
    async with serving(ToyModel(folder), precache=Recorded()) as served:

        async def warm(**body: object):
            return await served.http.post("/v1/precache", json={"model": "toy", **body})

        known = (await warm(conversation_id="known")).json()
        unknown = (await warm(prompt_cache_key="other")).json()
        refused = [
            (await warm()).status_code,
            (await warm(conversation_id="a", pin=True)).status_code,
        ]
    assert (known["status"], known["key"]) == ("warm", "conv:known")
    assert known["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert unknown["status"] == "failed"
    assert "nothing is known" in unknown["reason"]
    assert refused == [400, 400]
