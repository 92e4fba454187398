"""Prompts that the configuration declares, to be warm before a request: `[[precache.prompts]]`.

    model         the model that they are for; absent = the default one
    system        the system message, or system_file = where it is read from
    tools_file    a JSON list of tools, as a chat request would carry them
    messages      more messages that every conversation begins with: {role, content}

Only shapes are checked here; `read` opens the files, when a model is there to be warmed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal, nearest, text

MAX_PROMPTS = 64
MAX_FILE_BYTES = 4 << 20
_KEYS = ("model", "system", "system_file", "tools_file", "messages")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredPrompt:
    """One entry. At most one of `system` and `system_file` is given; "" = it is not."""

    model: str = ""
    system: str = ""
    system_file: str = ""
    tools_file: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content)."""

    def read(self) -> PromptText:
        """Read the files. Blocks. Raises ConfigError for one that cannot be used."""
        system = _file(self.system_file) if self.system_file else self.system
        opening = (("system", system),) if system else ()
        return PromptText(
            messages=opening + self.messages,
            tools=_tools(self.tools_file) if self.tools_file else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """The text of a declared prompt: (role, content), and tools as JSON objects."""

    messages: tuple[tuple[str, str], ...]
    tools: tuple[Mapping[str, object], ...] = ()


def parse_prompts(raw: object) -> tuple[DeclaredPrompt, ...]:
    """Read a list of tables, or the same as JSON text, from a variable. Raises Illegal."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError as problem:
            raise Illegal(f"the prompts are not JSON: {problem}") from None
    if not isinstance(raw, list) or not all(isinstance(entry, dict) for entry in raw):
        raise Illegal(
            "prompts are tables: write each below a line [[precache.prompts]] in the file, or all "
            "as a JSON list of objects"
        )
    if len(raw) > MAX_PROMPTS:
        raise Illegal(f"{len(raw)} prompts are declared; give at most {MAX_PROMPTS}")
    return tuple(_prompt(entry, index) for index, entry in enumerate(raw))


def _prompt(entry: Mapping[str, object], index: int) -> DeclaredPrompt:
    for key in entry:
        if key not in _KEYS:
            raise Illegal(f"prompt {index} has an unknown key {key}{nearest(key, _KEYS)}")
    words = {key: text(entry[key]) for key in _KEYS[:4] if key in entry}
    if "system" in entry:
        words["system"] = str(entry["system"])  # as it stands: spaces at its ends count
    if "system" in words and "system_file" in words:
        raise Illegal(f"prompt {index} has system and system_file; give one of them")
    declared = DeclaredPrompt(**words, messages=_messages(entry.get("messages", []), index))
    if not (declared.system or declared.system_file or declared.messages):
        raise Illegal(f"prompt {index} says nothing; give system, system_file or messages")
    return declared


def _messages(raw: object, index: int) -> tuple[tuple[str, str], ...]:
    wanted = f"give them as {{role = {' | '.join(_ROLES)}, content = text}}"
    if not isinstance(raw, list):
        raise Illegal(f"messages of prompt {index} are no list; {wanted}")
    found = []
    for message in raw:
        is_whole = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not is_whole or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise Illegal(f"messages of prompt {index} hold {str(message)[:80]!r}; {wanted}")
        found.append((message["role"], message["content"]))
    return tuple(found)


def _file(name: str) -> str:
    path = Path(name).expanduser()
    try:
        if path.is_fifo() or path.is_socket():  # it may block for ever
            raise ConfigError(f"{path}: the prompt cannot be read: give a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: a prompt's file may have {MAX_FILE_BYTES} bytes")
        return content.decode()
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"{path}: the prompt cannot be read: {reason}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: the prompt is not UTF-8: {problem}") from problem


def _tools(name: str) -> tuple[Mapping[str, object], ...]:
    try:
        tools = json.loads(_file(name))
    except ValueError as problem:
        raise ConfigError(f"{name}: not JSON: {problem}") from problem
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{name}: tools must be a JSON list of objects")
    return tuple(tools)
