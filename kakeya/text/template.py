"""Chat templates of model folders: messages in, one prompt text out, in a jinja2 sandbox.

Templates get here the functions and variables that they expect: tojson that keeps UTF-8,
raise_exception, strftime_now, loop controls, the generation tag, the special tokens; nothing else.

Some templates take the content of a message as a text, others as a list of parts, and either kind
drops the other without a word. `ChatTemplate` finds out, by a conversation of its own, in which
form each role's content is shown. So too whether it shows messages in any order: a template that
does not gets them in turns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum

import jinja2

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.core.settings import Illegal
from kakeya.text.chat import Chat, Message, in_turns
from kakeya.text.origin import Traced, TracingEnvironment
from kakeya.text.tools.calls import functions_of
from kakeya.text.tools.plain import with_tools, without_calls

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_WRITTEN = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that come from the conversation itself."""
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
        self.shows_tools = True
        """Whether a model sees tools as the template writes them; the trials below ask for that."""
        self._forms = self._find_forms()
        self._shows_calls = self._is_showing_calls()
        self._takes_any_order = self._is_taking_any_order()
        self.shows_tools = any(map(self._is_showing_tools, TRIALS))

    def render(self, chat: Chat) -> Traced:
        """Write the prompt that asks for the assistant's next message, or for the rest of its last.

        Tools that the template does not show are written as plain text, if the chat says so.

        Raises InvalidArgument with the template's own words when it refuses the messages, and for
        variables that no caller may set; Unsupported for tools that it does not show, for messages
        of a role that it leaves out, and for a last message that it does not end with.
        """
        self._check(chat)
        messages = list(chat.messages if self._shows_calls else without_calls(chat.messages))
        if not self._takes_any_order:
            messages = in_turns(messages)
        if chat.tools and not self.shows_tools:
            shows_system = self._forms.get("system", ContentForm.NONE) is not ContentForm.NONE
            messages = with_tools(messages, chat.tools, shows_system=shows_system)
        for role in dict.fromkeys(role_of(message) for message in messages):
            if self._forms.get(role) is ContentForm.NONE:
                raise Unsupported(
                    f"the model's chat template does not show the content of {role} messages, so "
                    "the model would not see it; leave them out, or ask /v1/completions with a "
                    "plain prompt",
                    param="messages",
                )
        prompt = self._prompt(replace(chat, messages=tuple(messages)))
        names = [one.name for one in functions_of(chat.tools)]
        if self.shows_tools and names and not any(name in prompt for name in names):
            raise Unsupported(
                "the model's chat template shows tools, but none with these messages; begin with a "
                "system message, or leave tools out",
                param="tools",
            )
        return prompt

    def _prompt(self, chat: Chat) -> Traced:
        if not chat.continues_last:
            return self._write(chat, self._forms)
        *messages, last = chat.messages
        end = trial_word("end")
        longer = {**last, "content": f"{last['content']}{end}"}
        prompt = self._write(replace(chat, messages=(*messages, longer)), self._forms)
        at = prompt.rfind(end)
        if at < 0:
            raise Unsupported(
                "the model's chat template does not end with the last message, so no answer can go "
                "on from it; leave prefix out",
                param="messages",
            )
        return prompt[:at]

    def _check(self, chat: Chat) -> None:
        fixed = sorted((_WRITTEN | self._special_tokens.keys()) & chat.kwargs.keys())
        if fixed:
            raise InvalidArgument(
                f"{fixed[0]} is no variable to set: a prompt gets it from the messages and the "
                "model; leave it out",
                param=f"chat_template_kwargs.{fixed[0]}",
            )
        if chat.tools and not self.shows_tools and not chat.plain_tools:
            raise Unsupported(
                "the model's chat template shows no tools, so it cannot know of them; leave tools "
                "out",
                param="tools",
            )
        if chat.continues_last and (not chat.messages or chat.messages[-1]["role"] != "assistant"):
            raise InvalidArgument(
                "only a last message of the assistant's can be continued; leave prefix out",
                param="messages",
            )

    def _write(self, chat: Chat, forms: Mapping[str, ContentForm]) -> Traced:
        try:
            return Traced.given(
                self._template.render(
                    {
                        "documents": None,
                        **_switched(chat.kwargs),
                        **self._special_tokens,
                        "messages": [_given(message, forms) for message in chat.messages],
                        "add_generation_prompt": not chat.continues_last,
                        "tools": [dict(tool) for tool in chat.tools]
                        if chat.tools and self.shows_tools
                        else None,
                    }
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
            prompt = self._write(Chat(messages=tuple(messages)), self._forms)
        except InvalidArgument:
            return False
        return trial_word("call") in prompt and trial_word("tool") in prompt

    def _is_taking_any_order(self) -> bool:
        """Whether the template shows neighbours of one role, and a system message behind others."""
        roles = ("system", "system", "user", "user", "assistant", "system", "user")
        said = [trial_word(str(index)) for index in range(len(roles))]
        messages = tuple(
            {"role": role, "content": word} for role, word in zip(roles, said, strict=True)
        )
        try:
            prompt = self._write(Chat(messages=messages), self._forms)
        except InvalidArgument:
            return False
        return all(word in prompt for word in said)

    def _is_showing_tools(self, roles: Sequence[str]) -> bool:
        name = trial_word("function")
        told = {"name": name, "description": name, "parameters": {"type": "object"}}
        messages = tuple({"role": role, "content": trial_word(role)} for role in roles)
        tool = {"type": "function", "function": told, **told}
        try:
            return name in self._write(Chat(messages=messages, tools=(tool,)), self._forms)
        except InvalidArgument:
            return False

    def _best_forms(self, roles: Sequence[str]) -> dict[str, ContentForm]:
        """The forms with which most of these roles are shown; {} where none is rendered."""
        best: dict[str, ContentForm] = {}
        messages = tuple({"role": role, "content": trial_word(role)} for role in roles)
        for system, others in itertools.product((ContentForm.TEXT, ContentForm.PARTS), repeat=2):
            forms = {role: system if role == "system" else others for role in roles}
            try:
                prompt = self._write(Chat(messages=messages), forms)
            except InvalidArgument:
                continue
            shown = {
                role: form if _is_shown(prompt, role, form) else ContentForm.NONE
                for role, form in forms.items()
            }
            if not best or _count(shown.values()) > _count(best.values()):
                best = shown
        return best


def check_template(source: str) -> None:
    """Raise Illegal for a text that is no template."""
    try:
        TracingEnvironment().parse(source)
    except jinja2.TemplateSyntaxError as fault:
        raise Illegal(
            f"line {fault.lineno}: {fault.message}; give a jinja2 template of a chat"
        ) from fault


def role_of(message: Message) -> str:
    """The role of a message."""
    return str(message["role"])


def _switched(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """The variables of a caller; the switch of thoughts under both of its names."""
    switch = kwargs.get("enable_thinking", kwargs.get("thinking"))
    return kwargs if switch is None else {"enable_thinking": switch, "thinking": switch, **kwargs}


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
