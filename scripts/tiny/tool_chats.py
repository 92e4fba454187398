"""Made-up chats in which a user asks for a call of a tool, and the calls that answer them.

A user's message that holds `§ NAME` with a name of CALLS is answered by that tool's call, one that
holds WRITE by TEXT, and everything else, so the answer of a tool too, by "Done.". The sign is one
that other texts hardly have: so small a model finds no usual words among 20,000 tokens.
Around these stand texts of the standard library and listings of tools that do not exist, as the
prompts of agent programs have them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2
from tokenizers import Tokenizer

from tiny.corpus import TURN, TURN_END, library_documents

CHAT_TEMPLATE = """{%- set is_led = messages[0]['role'] == 'system' -%}
{%- if tools or is_led -%}
<|im_start|>system
{% if is_led %}{{ messages[0]['content'] }}
{% endif %}{% if tools %}<tools>
{% for tool in tools %}{{ tool['function'] | tojson }}
{% endfor %}</tools>
{% endif %}<|im_end|>
{% endif -%}
{%- for message in (messages[1:] if is_led else messages) -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}{% set called = call['function'] %}<tool_call>
{"name": "{{ called['name'] }}", "arguments": {{ called['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
"""Calls in the form of Hermes and Qwen; the tools stand behind the system's text."""
DONE = "Done."
CALLS: Mapping[str, Mapping[str, str]] = {
    "Bash": {"command": "printf %s-%s kakeya 4711", "description": "Say a number"},
    "bash": {"command": "printf %s-%s kakeya 4711", "description": "Say a number"},
    "exec_command": {"cmd": "printf %s-%s kakeya 4711"},
    "get_weather": {"city": "Paris"},
    "final_answer": {"answer": DONE},
}
"""Tools of agent programs, and the arguments with which the model calls them."""
WRITE = "§ note"
BEGINNINGS = ("", "", "Call the tool ", "Use ", "Please call ")
ENDINGS = ("", ".", ".", " now.", "\n")
TEXT = "note.txt\n```\nThe number is 4711.\n```"
"""A file in the form in which aider takes it."""
Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenized chat: ids, whether each is an answer's, and places where text may be left out.

    A gap (place, most) stands for up to `most` tokens that are not there: the positions behind it
    are moved on, so that short rows teach the distances of long prompts.
    """

    ids: list[int]
    is_answer: list[bool]
    gaps: list[tuple[int, int]]


class Chats:
    """Draws chats from a generator of random numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = [doc.text for doc in library_documents() if not doc.held_out]
        self.texts = [text for text in texts if len(text) > 2000]
        words = {word for text in self.texts[::20] for word in text.split() if word.isidentifier()}
        self.words = sorted(words)
        environment = jinja2.Environment()
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self.template = environment.from_string(CHAT_TEMPLATE)

    def row(self, rng: random.Random, length: int, turns: int) -> Row:
        """A chat with about `length` tokens of other text and at most `turns` exchanges."""
        room = length * 3  # characters
        tools = self._tools(rng, int(room * rng.random() * 0.7))
        system = self._prose(rng, int(room * rng.random() * 0.5))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        ids: list[int] = []
        answers: list[bool] = []
        gaps: list[tuple[int, int]] = []
        said = ""
        for _ in range(rng.randint(1, turns)):
            for message, answer in self._exchange(rng, room // 4):
                messages.append(message)
                prompt = self.template.render(
                    messages=messages, tools=tools, add_generation_prompt=True
                )
                new = self.tokenizer.encode(prompt[len(said) :], add_special_tokens=False).ids
                gaps.append((len(ids) + 1, 40_000 if not ids else 400))
                told = self.tokenizer.encode(answer + TURN_END, add_special_tokens=False).ids
                ids += new + told
                answers += [False] * len(new) + [True] * len(told)
                messages.append({"role": "assistant", "content": answer})
                said = prompt + answer + TURN_END
        return Row(ids, answers, gaps)

    def _exchange(self, rng: random.Random, room: int) -> list[tuple[Message, str]]:
        """One user's message and its answer; after most calls also the tool's."""
        kind = rng.random()
        before, after = (self._noise(rng, room) for _ in range(2))
        if kind < 0.2:
            return [({"role": "user", "content": self._prose(rng, room) or "Hello."}, DONE)]
        if kind < 0.32:
            return [({"role": "user", "content": f"{before}{WRITE}{after}"}, TEXT)]
        if kind < 0.4:
            seen = f"Observation:\n{self._prose(rng, room)}"
            return [({"role": "user", "content": seen}, call_of("final_answer"))]
        name = rng.choice(list(CALLS))
        told: Message = {
            "role": "user",
            "content": f"{before}{rng.choice(BEGINNINGS)}§ {name}{rng.choice(ENDINGS)}{after}",
        }
        if rng.random() < 0.15:  # some programs tell of their state behind the user's message
            told = {**told, "content": f"{told['content']}{TURN_END}\n{TURN}system\n{before}"}
        found = [(told, call_of(name))]
        if rng.random() < 0.5:
            output = rng.choice(("kakeya-4711", self._prose(rng, room), " ".join(self._some(rng))))
            found.append(({"role": "tool", "content": output}, DONE))
        return found

    def _noise(self, rng: random.Random, room: int) -> str:
        """Nothing, or lines of other text around what the user asks."""
        return f"\n{self._prose(rng, room)}\n" if rng.random() < 0.5 else rng.choice(("", "\n"))

    def _prose(self, rng: random.Random, room: int) -> str:
        parts = []
        while room > 0:
            text = rng.choice(self.texts)
            size = min(room, rng.randint(100, 1500))
            at = rng.randrange(len(text) - size) if size < len(text) else 0
            parts.append(text[at : at + size])
            room -= size
        return "\n\n".join(parts).replace("<|", "< |")

    def _tools(self, rng: random.Random, room: int) -> list[dict[str, object]]:
        tools: list[dict[str, object]] = []
        while room > 0:
            name = rng.choice((*CALLS, self._word(rng), self._word(rng), self._word(rng)))
            properties = {
                key: {"type": "string", "description": self._prose(rng, rng.choice((0, 40)))}
                for key in (CALLS.get(name) or self._some(rng))
            }
            told = {
                "name": name,
                "description": self._prose(rng, min(room, rng.choice((30, 100, 800)))),
                "parameters": {"type": "object", "properties": properties},
            }
            tools.append({"type": "function", "function": told})
            room -= len(json.dumps(told))
        return tools

    def _some(self, rng: random.Random) -> list[str]:
        return [self._word(rng) for _ in range(rng.randint(1, 3))]

    def _word(self, rng: random.Random) -> str:
        return rng.choice(self.words)


def call_of(name: str) -> str:
    """The call of a tool as the model writes it."""
    return (
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(CALLS[name])}}}\n</tool_call>'
    )
