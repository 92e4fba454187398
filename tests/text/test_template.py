"""Chat templates: what they find, what they refuse, and in which form they take content."""

from __future__ import annotations

import pytest

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.text.template import ChatTemplate
from tests.text.texts import NOW

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
    assert template(source).render(CHAT) == "<system>be brief<user>hello"


def test_a_role_whose_content_is_left_out_is_refused():
    silent = template("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert silent.render(CHAT[1:]) == "hello"
    with pytest.raises(Unsupported, match="content of system messages"):
        silent.render(CHAT)
    with pytest.raises(Unsupported, match="content of user messages"):
        template("{{ messages[0].content.words }}").render(CHAT[1:])


def test_a_template_that_refuses_a_role_says_so_itself():
    refusing = template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SAY
    )
    with pytest.raises(InvalidArgument, match="no system"):
        refusing.render(CHAT)


def test_templates_find_what_they_expect():
    chat = [{"role": "user", "content": "é<"}]
    assert template("{{ messages | tojson }}").render(chat) == (
        '[{"role": "user", "content": "é<"}]'
    )
    assert template("{{ strftime_now('%Y') }}" + SAY).render(chat) == "2023é<"
    loop = "{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert template(loop + SAY).render(chat) == "é<"
    assert template("{% generation %}a{% endgeneration %}" + SAY).render(chat) == "aé<"
    assert template("{% if tools is none %}none{% endif %}" + SAY).render(chat) == "noneé<"


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
        template(source).render([{"role": "user", "content": "a"}])


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
    prompt = template(SHOWING).render(CALLS)
    assert prompt == '<user>sum?<assistant>[add {"a": 1}]<tool>42'


@pytest.mark.parametrize("source", [PLAIN, STRICT])
def test_calls_are_said_as_text_where_a_template_shows_none(source: str) -> None:
    prompt = template(source).render(CALLS)
    assert prompt == (
        '<user>sum?<assistant>Call of a tool: {"name": "add", "arguments": {"a": 1}}'
        "<user>Answer of the tool: 42"
    )
