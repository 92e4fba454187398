"""Two turns of agent programs, in the shapes that the real ones were seen to send.

Texts and tools are made up, and smaller than theirs: the embedded model holds 8,192 tokens. A tool
is forced in the first turn, and the second turn is made of its answer, as the program makes it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
OUTPUT = "README.md"
"""The output of the tool."""
_WORDS = """
    the a file of folder read write tool call user answer code line test run path error never always
    before after each name list patch shell command value result only first last keep
    """


def prose(name: str, words: int) -> str:
    """A long text, the same for the same name."""
    rng, words_known = random.Random(name), _WORDS.split()
    said = [rng.choice(words_known) for _ in range(words)]
    return "\n".join(" ".join(said[at : at + 12]) for at in range(0, words, 12))


def schema() -> Body:
    command = {"type": "string", "enum": ["ls", "pwd"]}
    return {
        "type": "object",
        "properties": {"command": command},
        "required": ["command"],
        "additionalProperties": False,
    }


@dataclass(frozen=True, kw_only=True)
class Recording:
    """`first` and `second` make a body for the `number`-th request; `second` has the answer to the
    first. `between` is another request of the same session; None = there is none."""

    program: str
    path: str
    first: Callable[[], Body]
    second: Callable[[Body, Body], Body]
    headers: dict[str, str] = field(default_factory=dict)
    between: Body | None = None
    moved: tuple[str, ...] = ()


def _chat_tool(name: str) -> Body:
    text = prose(name, 60)
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema()},
    }


def _chat(program: str, words: int, **more: object) -> Body:
    return {
        "model": "kakeya-tiny",
        "messages": [
            {"role": "system", "content": f"You are {program}.\n{prose(program, words)}"},
            {"role": "user", "content": "List the files of this folder."},
        ],
        "tools": [_chat_tool(name) for name in ("bash", "read", "edit")],
        "tool_choice": {"type": "function", "function": {"name": "bash"}},
        "temperature": 0,
        "max_tokens": 64,
        **more,
    }


def _chat_second(content: str | None) -> Callable[[Body, Body], Body]:
    def second(body: Body, answer: Body) -> Body:
        calls = answer["choices"][0]["message"]["tool_calls"]
        said = {"role": "assistant", "content": content, "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": OUTPUT}
        return {**body, "messages": [*body["messages"], said, result]}

    return second


def opencode() -> Recording:
    session = "ses_5f2c81e4dffe0ab3J9rkQZ1xWm"
    title = {
        "model": "kakeya-tiny",
        "messages": [
            {"role": "system", "content": f"You write titles.\n{prose('title', 200)}"},
            {"role": "user", "content": "List the files of this folder."},
        ],
        "temperature": 0,
        "max_tokens": 16,
    }
    return Recording(
        program="opencode",
        path="/v1/chat/completions",
        headers={"x-session-affinity": session, "x-session-id": session},
        first=lambda: _chat("opencode", 2600, max_tokens=64),
        second=_chat_second(""),
        between=title,
    )


def cn() -> Recording:
    return Recording(
        program="cn",
        path="/v1/chat/completions",
        first=lambda: _chat("Continue", 2600, parallel_tool_calls=False),
        second=_chat_second(""),
    )


def llm() -> Recording:
    return Recording(
        program="llm",
        path="/v1/chat/completions",
        first=lambda: _chat("llm", 2600),
        second=_chat_second(None),
    )


def codex() -> Recording:
    session = "0192f0c1-7d5e-7cc3-98c4-dc0c0c07398f"

    def first() -> Body:
        def message(role: str, text: str) -> Body:
            part = {"type": "input_text", "text": text}
            return {"type": "message", "role": role, "content": [part]}

        def tool(name: str) -> Body:
            described = {"name": name, "description": prose(name, 60), "parameters": schema()}
            return {"type": "function", "strict": False, **described}

        return {
            "model": "kakeya-tiny",
            "instructions": f"You are a coding agent.\n{prose('codex', 2500)}",
            "input": [
                message("developer", f"<permissions>\n{prose('permissions', 60)}\n</permissions>"),
                message("user", "<environment_context>\n<cwd>/tmp</cwd>\n</environment_context>"),
                message("user", "List the files of this folder."),
            ],
            "tools": [
                tool("shell"),
                {"type": "namespace", "name": "apps", "description": "", "tools": [tool("open")]},
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "function", "name": "shell"},
            "parallel_tool_calls": False,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": session,
            "client_metadata": {"x-codex-installation-id": session},
            "max_output_tokens": 64,
            "temperature": 0,
        }

    def second(body: Body, answer: Body) -> Body:
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        names = ("type", "name", "arguments", "call_id")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": OUTPUT}
        return {**body, "input": [*body["input"], {one: call[one] for one in names}, output]}

    return Recording(
        program="codex",
        path="/v1/responses",
        headers={"session-id": session, "thread-id": session},
        first=first,
        second=second,
    )


def claude_code() -> Recording:
    session = str(uuid.UUID(int=7))
    user_id = f'{{"device_id":"d1","account_uuid":"","session_id":"{session}"}}'

    def system(cch: str) -> list[Body]:
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=sdk-cli; cch={cch};"
        )
        long = f"You are an agent for coding.\n{prose('claude', 2300)}"
        cached = {"cache_control": {"type": "ephemeral"}}
        return [
            {"type": "text", "text": billing},
            {"type": "text", "text": long, **cached},
        ]

    def first() -> Body:
        def tool(name: str) -> Body:
            return {"name": name, "description": prose(name, 60), "input_schema": schema()}

        reminder = f"<system-reminder>\n{prose('reminder', 60)}\n</system-reminder>"
        question = [
            {"type": "text", "text": reminder},
            {
                "type": "text",
                "text": "List the files of this folder.",
                "cache_control": {"type": "ephemeral"},
            },
        ]
        return {
            "model": "kakeya-tiny",
            "system": system("0f3a9"),
            "messages": [{"role": "user", "content": question}],
            "tools": [tool(name) for name in ("Bash", "Read", "Edit")],
            "tool_choice": {"type": "tool", "name": "Bash"},
            "metadata": {"user_id": user_id},
            "max_tokens": 64,
            "temperature": 0,
        }

    def second(body: Body, answer: Body) -> Body:
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": OUTPUT,
            "is_error": False,
            "cache_control": {"type": "ephemeral"},
        }
        turns = [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
        messages = [*body["messages"], *turns]
        return {**body, "system": system("77b01"), "messages": messages}

    return Recording(
        program="claude-code",
        path="/v1/messages?beta=true",
        headers={"x-claude-code-session-id": session, "anthropic-version": "2023-06-01"},
        first=first,
        second=second,
        moved=("billing_header",),
    )
