"""The programs that `kakeya connect` knows: where each keeps its configuration, and what it needs.

Claude Code speaks Anthropic's Messages, codex OpenAI's Responses, and all others OpenAI's chat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.cli.connect.edit import Edit, JsonEdit, MakeEdit, TomlEdit, Values, YamlEdit

NO_KEY = "none"
"""The key where a node needs none: most clients refuse to start without one."""
_CLAUDE_WINDOW = 32_768
"""The smallest context of which Claude Code is told: with a smaller one it refuses its own first
prompt of some 17,000 tokens, which may fit all the same. Tried with 2.1.332."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTarget:
    """What a client is connected to; `context_tokens` is 0 where nobody knows it yet."""

    url: str
    """Of the node, without a path."""
    model: str
    key: str
    context_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """A program with a configuration file."""

    name: str
    program: str
    """The command that a person starts."""
    file: str
    """Below the home folder."""
    folder_variable: str = ""
    """The variable that names another folder for the file; "" = there is none."""
    make_edit: MakeEdit
    values: Callable[[NodeTarget], Values]
    defaults: Values = field(default_factory=dict)

    def config_file(self, home: Path, environ: Mapping[str, str]) -> Path:
        """The file, in the folder that the program would take."""
        named = environ.get(self.folder_variable, "")
        return Path(named).expanduser() / Path(self.file).name if named else home / self.file

    def edit(self, target: NodeTarget) -> Edit:
        """The edit that connects the program."""
        return self.make_edit(self.values(target), self.defaults)


def _claude_code(target: NodeTarget) -> Values:
    env = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "ANTHROPIC_SMALL_FAST_MODEL": target.model,
    }
    if target.context_tokens >= _CLAUDE_WINDOW:
        # It takes an unknown model for one of a million tokens, and would shorten chats too late.
        env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context_tokens)
    return {"env": env}


def _codex(target: NodeTarget) -> Values:
    provider = {
        "name": "Kakeya",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "experimental_bearer_token": target.key,
    }
    window = {"model_context_window": target.context_tokens} if target.context_tokens else {}
    return {
        "model": target.model,
        "model_provider": "kakeya",
        **window,
        "model_providers": {"kakeya": provider},
    }


def _opencode(target: NodeTarget) -> Values:
    limit = {"context": target.context_tokens, "output": target.context_tokens // 4}
    model = {"name": target.model, **({"limit": limit} if target.context_tokens else {})}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Kakeya",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: model},
    }
    named = f"kakeya/{target.model}"
    return {"model": named, "small_model": named, "provider": {"kakeya": provider}}


def _continue(target: NodeTarget) -> Values:
    context = {"contextLength": target.context_tokens}
    model = {
        "name": f"Kakeya {target.model}",
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": target.key,
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
        **({"defaultCompletionOptions": context} if target.context_tokens else {}),
    }
    return {"models": [model]}


def _aider(target: NodeTarget) -> Values:
    return {
        "openai-api-base": f"{target.url}/v1",
        "openai-api-key": target.key,
        "model": f"openai/{target.model}",
        # Else it asks at each start whether to open a page about models that it does not know.
        "show-model-warnings": False,
    }


CLIENTS: Mapping[str, AgentProgram] = {
    client.name: client
    for client in (
        AgentProgram(
            name="claude-code",
            program="claude",
            file=".claude/settings.json",
            folder_variable="CLAUDE_CONFIG_DIR",
            make_edit=JsonEdit,
            values=_claude_code,
        ),
        AgentProgram(
            name="codex",
            program="codex",
            file=".codex/config.toml",
            folder_variable="CODEX_HOME",
            make_edit=TomlEdit,
            values=_codex,
        ),
        AgentProgram(
            name="opencode",
            program="opencode",
            file=".config/opencode/opencode.json",
            folder_variable="OPENCODE_CONFIG_DIR",
            make_edit=JsonEdit,
            values=_opencode,
            defaults={"$schema": "https://opencode.ai/config.json"},
        ),
        AgentProgram(
            name="continue",
            program="cn",
            file=".continue/config.yaml",
            folder_variable="CONTINUE_GLOBAL_DIR",
            make_edit=YamlEdit,
            values=_continue,
            defaults={"name": "Local models", "version": "1.0.0", "schema": "v1"},
        ),
        AgentProgram(
            name="aider",
            program="aider",
            file=".aider.conf.yml",
            make_edit=YamlEdit,
            values=_aider,
        ),
    )
}


def openai_variables(target: NodeTarget) -> dict[str, str]:
    """The variables by which OpenAI's SDKs, and most programs made with them, find a node."""
    return {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
