"""`kakeya chat`: talk with a model in a terminal. Ctrl-C ends an answer, Ctrl-D the chat.

After each answer a line says which node gave it and what it cost. A pipe works too: each of its
lines is a message.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from kakeya.cli.node_api import NodeApi
from kakeya.cli.show.labels import labels_of
from kakeya.cli.talk.conversation import TerminalChat
from kakeya.cli.talk.generate import (
    account,
    add_sampling,
    check_text,
    models_of,
    on_terminal,
    stdin,
)
from kakeya.cli.talk.waiting import WaitLine
from kakeya.core.errors import KakeyaError

_DIM, _PLAIN = "\033[2m", "\033[0m"


def add_options(chat: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    chat.add_argument("--system", default="", metavar="TEXT", help="instructions to the model")
    add_sampling(chat, max_tokens=None)


def run(node: NodeApi, options: argparse.Namespace) -> int:
    """Talk until the user ends it; returns the exit status. Raises KakeyaError."""
    models = models_of(node)
    talk = TerminalChat(base=models[0], models=models, system=options.system)
    if options.model:
        talk.take(f"/model {options.model}")
    chat = _Chat(node, talk, options)
    chat.tell(f"{talk.model} at {node.address}; /help shows what can be asked for")
    return chat.run()


class _Chat:
    """One chat in a terminal."""

    def __init__(self, node: NodeApi, talk: TerminalChat, options: argparse.Namespace) -> None:
        self._node = node
        self._talk = talk
        wishes = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
        }
        self._wishes = {name: value for name, value in wishes.items() if value is not None}
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False

    def run(self) -> int:
        """Talk until the user ends it. It is 1 where a message of a pipe got no answer."""
        for line in self._lines():
            try:
                check_text(line, "the message")
                said = self._talk.take(line)
            except KakeyaError as wrong:
                self.tell(wrong.message)
                continue
            if said.ends:
                break
            if said.text:
                self.tell(said.text)
            if said.asks:
                self._answer()
        return int(self._failed and not self._is_terminal)

    def tell(self, text: str) -> None:
        """Say something that is no answer, on stderr, dim in a terminal."""
        dim, plain = (_DIM, _PLAIN) if sys.stderr.isatty() else ("", "")
        print(f"{dim}{on_terminal(text)}{plain}", file=sys.stderr, flush=True)

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from (line.rstrip("\n") for line in stdin())
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and called back
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                self.tell("\n/quit or Ctrl-D ends the chat")
            except EOFError:
                print()
                return

    def _answer(self) -> None:
        """Stream the answer to the last message; Ctrl-C keeps what came of it."""
        text: list[str] = []
        usage: dict[str, object] = {}
        waiting = WaitLine()
        note = ""
        try:
            for event in self._events(waiting):
                usage |= {"id": event.get("id")}
                found = event.get("usage")
                usage |= found if isinstance(found, dict) else {}
                if piece := _delta(event):
                    waiting.end()
                    text.append(piece)
                    print(on_terminal(piece), end="", flush=True)
        except KeyboardInterrupt:
            note = "ended by Ctrl-C"
        except KakeyaError as failure:
            note, self._failed = failure.message, True
        waiting.end()
        if text:
            print(flush=True)
        self._talk.answered("".join(text))
        self.tell(note or receipt(usage, self._explained(usage)))

    def _events(self, waiting: WaitLine) -> Iterator[Mapping[str, object]]:
        body = {
            "model": self._talk.model,
            "messages": self._talk.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._wishes,
        }
        return self._node.stream("/v1/chat/completions", body, waiting.show)

    def _explained(self, usage: Mapping[str, object]) -> Mapping[str, object]:
        """What the node tells of a request; empty where it tells nothing."""
        try:
            found = self._node.get(f"/api/v1/requests/{quote(str(usage.get('id')), safe='')}")
        except KakeyaError:
            return {}
        routes = found.get("routes")
        if isinstance(routes, list) and routes:
            label = labels_of(self._node).of(str(routes[-1].get("node")))
            found["node"] = label
        return found


def receipt(usage: Mapping[str, object], explained: Mapping[str, object]) -> str:
    """One line on an answer: its node, its wait, what was cached, tokens, speed, drafts."""
    parts = [f"{explained['node']}"] if explained.get("node") else []
    waits = explained.get("waits_s")
    if isinstance(waits, dict):
        waited = sum(waits.get(name) or 0.0 for name in ("load", "queue"))
        parts += [f"waited {waited:.1f} s"] if waited >= 0.05 else []
    if cached := explained.get("cached_tokens"):
        parts.append(f"{cached} of {explained.get('prompt_tokens')} prompt tokens cached")
    return "; ".join([*parts, account(usage)])


def _delta(event: Mapping[str, object]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    delta = choices[0].get("delta") or {}
    return str(delta.get("content") or "")
