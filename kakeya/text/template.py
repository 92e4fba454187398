"""Chat templates of model folders: messages in, one prompt text out, in a jinja2 sandbox.

Templates get here the functions and variables that they expect: tojson that keeps UTF-8,
raise_exception, strftime_now, loop controls, the generation tag, the special tokens; nothing else.

Some templates take the content of a message as a text, others as a list of parts, and either kind
drops the other without a word. `ChatTemplate` finds out, by a conversation of its own, in which
form each role's content is shown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from enum import StrEnum

import jinja2

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.text.origin import Traced, TracingEnvironment

Message = Mapping[str, object]
"""One chat message: the texts role and content, and what else its client gave: name; of an
assistant tool_calls and reasoning_content; of a tool tool_call_id."""

Tool = Mapping[str, object]
"""A function that a model may call, as a JSON object."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
TRIALS = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user",),
)
"""Roles of conversations with which a template is tried; some refuse the longer ones."""


class ContentForm(StrEnum):
    """The form in which a template shows the content of a role's messages."""

    TEXT = "text"
    PARTS = "parts"
    NONE = "none"
    """The template leaves the content out."""


def trial_word(role: str) -> str:
    """The content of a role's messages in a trial: no template writes it of itself."""
    return f"Qx{role}xQ"


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """One compiled template with the special tokens of its folder."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], wall: Callable[[], float]
    ) -> None:
        environment = TracingEnvironment()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (
            datetime.fromtimestamp(wall()).astimezone().strftime(form)
        )
        self._special_tokens = {name: Traced.own(text) for name, text in special_tokens.items()}
        self._template = environment.from_string(source)
        self._forms = self._find_forms()
        self._shows_calls = self._is_showing_calls()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Traced:
        """Write the prompt that asks for the assistant's next message.

        Raises InvalidArgument with the template's own words when it refuses the messages,
        Unsupported for tools that it does not show, and for messages of a role that it leaves out.
        """
        if not self._shows_calls:
            messages = [_without_calls(message) for message in messages]
        for role in dict.fromkeys(role_of(message) for message in messages):
            if self._forms.get(role) is ContentForm.NONE:
                raise Unsupported(
                    f"the model's chat template does not show the content of {role} messages, so "
                    "the model would not see it; leave them out, or ask /v1/completions with a "
                    "plain prompt",
                    param="messages",
                )
        prompt = self._write(messages, tools, self._forms)
        if tools and self._is_without_tools(prompt, messages):
            raise Unsupported(
                "the model's chat template shows no tools, so it cannot know of them; leave tools "
                "out",
                param="tools",
            )
        return prompt

    def _is_without_tools(self, prompt: str, messages: Sequence[Message]) -> bool:
        try:
            return self._write(messages, (), self._forms) == prompt
        except InvalidArgument:  # it says something else where there are none
            return False

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        forms: Mapping[str, ContentForm],
    ) -> Traced:
        try:
            return Traced.given(
                self._template.render(
                    messages=[_given(message, forms) for message in messages],
                    add_generation_prompt=True,
                    tools=[dict(tool) for tool in tools] or None,
                    documents=None,
                    **self._special_tokens,
                )
            )
        except _TEMPLATE_FAULTS as fault:
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {fault}", param="messages"
            ) from fault

    def _find_forms(self) -> dict[str, ContentForm]:
        """Find the form of each role; a role that the template refuses has none here."""
        found: dict[str, ContentForm] = {}
        for roles in TRIALS:
            for role, form in self._best_forms(roles).items():
                if found.get(role, ContentForm.NONE) is ContentForm.NONE:
                    found[role] = form
        return found

    def _is_showing_calls(self) -> bool:
        """Whether the template shows an earlier call of a tool, and the tool's answer."""
        function = {"name": trial_word("call"), "arguments": {}}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        messages: list[Message] = [
            {"role": "user", "content": trial_word("user")},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": trial_word("tool"), "tool_call_id": "call00001"},
        ]
        try:
            prompt = self._write(messages, (), self._forms)
        except InvalidArgument:
            return False
        return trial_word("call") in prompt and trial_word("tool") in prompt

    def _best_forms(self, roles: Sequence[str]) -> dict[str, ContentForm]:
        """The forms with which most of these roles are shown; {} where none is rendered."""
        best: dict[str, ContentForm] = {}
        messages: list[Message] = [{"role": role, "content": trial_word(role)} for role in roles]
        for system, others in itertools.product((ContentForm.TEXT, ContentForm.PARTS), repeat=2):
            forms = {role: system if role == "system" else others for role in roles}
            try:
                prompt = self._write(messages, (), forms)
            except InvalidArgument:
                continue
            shown = {
                role: form if _is_shown(prompt, role, form) else ContentForm.NONE
                for role, form in forms.items()
            }
            if not best or _count(shown.values()) > _count(best.values()):
                best = shown
        return best


def role_of(message: Message) -> str:
    """The role of a message."""
    return str(message["role"])


def _without_calls(message: Message) -> Message:
    """Say as text what a template does not show: calls, and the answers of tools."""
    content = str(message["content"])
    if message["role"] == "tool":
        return {"role": "user", "content": f"Answer of the tool: {content}"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    said = [f"Call of a tool: {_tojson(call['function'])}" for call in calls]
    return {"role": message["role"], "content": "\n".join([*[content] * bool(content), *said])}


def _given(message: Message, forms: Mapping[str, ContentForm]) -> dict[str, object]:
    """A message as a template gets it. Its role was checked, so it may be part of a mark."""
    role, content = role_of(message), message["content"]
    form = forms.get(role, forms.get("user"))
    parts = [{"type": "text", "text": content}]
    return {
        **message,
        "role": Traced.own(role),
        "content": parts if form is ContentForm.PARTS else content,
    }


def _is_shown(prompt: str, role: str, form: ContentForm) -> bool:
    """Whether a prompt shows a trial's content; a list that was written as Python does not."""
    word = trial_word(role)
    is_quoted = f"'{word}'" in prompt or f'"{word}"' in prompt
    return word in prompt and not (form is ContentForm.PARTS and is_quoted)


def _count(forms: Collection[ContentForm]) -> int:
    return sum(form is not ContentForm.NONE for form in forms)
