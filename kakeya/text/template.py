"""Chat templates of model folders: messages in, one prompt text out, in a jinja2 sandbox.

A folder carries its template in chat_template.jinja, or in tokenizer_config.json as a string or
as a list of {name, template}. Templates get here the functions and variables that they expect:
tojson that keeps UTF-8, raise_exception, strftime_now, loop controls, the generation tag, the
special tokens; nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from kakeya.core.errors import InvalidArgument, Unsupported

Message = Mapping[str, str]
"""One chat message: role, content, and name when the caller gave one."""

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


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (
            datetime.fromtimestamp(wall()).astimezone().strftime(form)
        )
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Write the prompt that asks for the assistant's next message.

        Raises InvalidArgument with the template's own words when it refuses the messages,
        Unsupported for tools that it does not show.
        """
        prompt = self._write(messages, tools)
        if tools and self._is_without_tools(prompt, messages):
            raise Unsupported(
                "the model's chat template shows no tools, so it cannot know of them; leave tools "
                "out",
                param="tools",
            )
        return prompt

    def _is_without_tools(self, prompt: str, messages: Sequence[Message]) -> bool:
        try:
            return self._write(messages, ()) == prompt
        except InvalidArgument:  # it says something else where there are none
            return False

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._special_tokens,
            )
        except _TEMPLATE_FAULTS as fault:
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {fault}", param="messages"
            ) from fault


def load_template(folder: Path, wall: Callable[[], float]) -> ChatTemplate | None:
    """Read the folder's template, None if it has none. Raises Unsupported if it cannot compile."""
    config = read_config(folder / "tokenizer_config.json")
    source = _source(folder, config)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens(config), wall)
    except jinja2.TemplateError as fault:
        raise Unsupported(
            f"the chat template in {folder} is no valid jinja2 template: {fault}"
        ) from fault


def read_config(path: Path) -> dict[str, object]:
    """Read a JSON object of a model folder; a missing file is an empty object."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise Unsupported(f"{path} cannot be read: {fault}") from fault
    if not isinstance(loaded, dict):
        raise Unsupported(f"{path} holds {type(loaded).__name__}, not a JSON object")
    return loaded


def special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The `*_token` entries of a tokenizer_config.json, as text."""
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _source(folder: Path, config: Mapping[str, object]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as fault:
        raise Unsupported(f"the chat template in {folder} cannot be read: {fault}") from fault
    declared = config.get("chat_template")
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in declared
            if isinstance(entry, dict)
        }
        chosen = named.get("default")
        return chosen if isinstance(chosen, str) else None
    return None
