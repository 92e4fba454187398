"""Chat templates: what they find, what they refuse, and in which form they take content."""

from __future__ import annotations

import pytest

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.text.template import ChatTemplate
from tests.text.texts import NOW, chat_of

SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"
HEAD = "{% for m in messages %}<{{ m['role'] }}>"
PARTS = {
    "loop": HEAD
    + "{% for c in m['content'] %}{% if c.type == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}"
    + "{% endfor %}",
    "first": HEAD + "{{ m['content'][0]['text'] }}{% endfor %}",
    "macro": "{% macro r(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + HEAD
    + "{{ r(m.content) }}{% endfor %}",
    "strict": HEAD + "{{ '' + m['content'][0]['text'] }}{% endfor %}",
}
MIXED = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content[0].text }}"
    "{% set ms = messages[1:] %}{% else %}{% set ms = messages %}{% endif %}"
    "{% for m in ms %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
EITHER = (
    HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "PART {{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, lambda: NOW)


@pytest.mark.parametrize("source", [*PARTS.values(), MIXED, EITHER])
def test_content_is_given_in_the_form_in_which_it_is_shown(source):
    assert template(source).render(chat_of(*CHAT)) == "<system>be brief<user>hello"


def test_a_role_whose_content_is_left_out_is_refused():
    silent = template("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert silent.render(chat_of(*CHAT[1:])) == "hello"
    with pytest.raises(Unsupported, match="content of system messages"):
        silent.render(chat_of(*CHAT))
    with pytest.raises(Unsupported, match="content of user messages"):
        template("{{ messages[0].content.words }}").render(chat_of(*CHAT[1:]))


def test_a_template_that_refuses_a_role_says_so_itself():
    refusing = template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SAY
    )
    with pytest.raises(InvalidArgument, match="no system"):
        refusing.render(chat_of(*CHAT))


def test_templates_find_what_they_expect():
    chat = [{"role": "user", "content": "é<"}]
    assert template("{{ messages | tojson }}").render(chat_of(*chat)) == (
        '[{"role": "user", "content": "é<"}]'
    )
    assert template("{{ strftime_now('%Y') }}" + SAY).render(chat_of(*chat)) == "2023é<"
    loop = "{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert template(loop + SAY).render(chat_of(*chat)) == "é<"
    assert template("{% generation %}a{% endgeneration %}" + SAY).render(chat_of(*chat)) == "aé<"
    assert (
        template("{% if tools is none %}none{% endif %}" + SAY).render(chat_of(*chat)) == "noneé<"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no thanks') }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' + nothing }}",
        "{{ nothing + 'a' }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_the_callers_error_and_nothing_leaks(source):
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        template(source).render(chat_of({"role": "user", "content": "a"}))


CALLS = [
    {"role": "user", "content": "sum?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHOWING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_calls_are_shown_as_the_template_shows_them() -> None:
    prompt = template(SHOWING).render(chat_of(*CALLS))
    assert prompt == '<user>sum?<assistant>[add {"a": 1}]<tool>42'


@pytest.mark.parametrize("source", [PLAIN, STRICT])
def test_calls_are_said_as_text_where_a_template_shows_none(source: str) -> None:
    prompt = template(source).render(chat_of(*CALLS))
    assert prompt == (
        '<user>sum?<assistant><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<user>Answer of the tool: 42"
    )


def test_answers_of_tools_that_follow_each_other_are_one_message() -> None:
    asked = [*CALLS, {"role": "tool", "tool_call_id": "c2", "content": "43"}]
    prompt = template(STRICT).render(chat_of(*asked))
    assert prompt.endswith("<user>Answer of the tool: 42\nAnswer of the tool: 43")


QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + (c.function | tojson) +"
    " '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""Written as Qwen3's is: thoughts stay until the user's next message, and may be turned off."""


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_caller_sets_variables_of_the_template(name: str) -> None:
    hi = {"role": "user", "content": "hi"}
    prompts = [template(QWEN3).render(chat_of(hi, kwargs=k)) for k in ({}, {name: False})]
    assert prompts[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[1] == prompts[0] + "<think>\n\n</think>\n\n"
    effort = template("{{ reasoning_effort }}" + SAY)
    assert effort.render(chat_of(hi, kwargs={"reasoning_effort": "low"})) == "lowhi"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_what_a_conversation_says_itself_is_no_variable(name: str) -> None:
    made = ChatTemplate(SAY, {"bos_token": "<s>"}, lambda: NOW)
    with pytest.raises(InvalidArgument) as refused:
        made.render(chat_of({"role": "user", "content": "a"}, kwargs={name: "x"}))
    assert refused.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("source", [QWEN3, *PARTS.values(), MIXED, EITHER, PLAIN])
@pytest.mark.parametrize("said", ["", "It is ", "a\n\n", "{{ x }}"])
def test_an_answer_that_goes_on_ends_the_prompt(source: str, said: str) -> None:
    messages = {"role": "user", "content": "hello"}, {"role": "assistant", "content": said}
    prompt = template(source).render(chat_of(*messages, continues_last=True))
    assert prompt.endswith(said)
    assert len(prompt.origin) == len(prompt)
    asking = template(source).render(chat_of(*messages[:1]))
    assert prompt.startswith(asking.removesuffix("<|im_start|>assistant\n"))


def test_only_an_answer_goes_on() -> None:
    for messages in ((), ({"role": "user", "content": "hello"},)):
        with pytest.raises(InvalidArgument, match="last message of the assistant"):
            template(PLAIN).render(chat_of(*messages, continues_last=True))
    hiding = template("{% for m in messages %}{{ m.content[:14] }}{% endfor %}")
    said = {"role": "assistant", "content": "hello world, and more"}
    with pytest.raises(Unsupported, match="does not end with the last message"):
        hiding.render(chat_of(said, continues_last=True))


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("source", [PLAIN, STRICT, SAY])
def test_tools_are_written_as_plain_text_where_a_template_shows_none(source: str) -> None:
    made = template(source)
    assert not made.shows_tools
    prompt = made.render(chat_of(*CALLS[:1], tools=[TOOL]))
    assert '{"type": "function", "function": {"name": "look"' in prompt
    assert prompt.index("<tool_call>") < prompt.index("sum?")
    assert prompt.endswith("sum?")
    with pytest.raises(Unsupported, match="shows no tools"):
        made.render(chat_of(*CALLS[:1], tools=[TOOL], plain_tools=False))


def test_plain_tools_stand_behind_the_text_of_the_system() -> None:
    prompt = template(PLAIN).render(chat_of(*CHAT, tools=[TOOL]))
    assert prompt.startswith("<system>be brief\n\nYou may call tools.")
    assert prompt.endswith("</tool_call><user>hello")


def test_a_template_that_shows_tools_gets_them_itself() -> None:
    made = template(QWEN3)
    assert made.shows_tools
    prompt = made.render(chat_of(*CHAT, tools=[TOOL]))
    assert prompt.startswith('<|im_start|>system\n{"type": "function"')
    assert "You may call tools" not in prompt


def test_tools_that_a_template_shows_with_other_messages_only_are_refused() -> None:
    source = "{% if messages[0].role == 'system' %}{{ tools | tojson if tools }}{% endif %}" + PLAIN
    assert '"look"' in template(source).render(chat_of(*CHAT, tools=[TOOL]))
    with pytest.raises(Unsupported, match="none with these messages"):
        template(source).render(chat_of(*CHAT[1:], tools=[TOOL]))


ALTERNATING = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% set ms = messages[1:] %}{% else %}{% set ms = messages %}{% endif %}"
    "{% for m in ms %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LATE_LEFT_OUT = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
UNORDERED = [
    {"role": "system", "content": "be brief"},
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "system", "content": "be loud"},
    {"role": "user", "content": "go on"},
]


@pytest.mark.parametrize("source", [ALTERNATING, LATE_LEFT_OUT])
def test_messages_take_turns_for_a_template_that_does_not_show_them_in_any_order(source):
    assert template(source).render(chat_of(*UNORDERED)) == (
        "<system>be brief\n\nbe kind<user>hello<assistant>hi"
        "<user><system-reminder>\nbe loud\n</system-reminder>\n\ngo on"
    )


def test_messages_stay_as_they_are_where_a_template_shows_them():
    assert template(HEAD + "{{ m.content }}{% endfor %}").render(chat_of(*UNORDERED)) == (
        "<system>be brief<system>be kind<user>hello<assistant>hi<system>be loud<user>go on"
    )
