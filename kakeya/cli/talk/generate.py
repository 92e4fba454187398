"""`kakeya generate`: continue a text, streamed to stdout."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import unicodedata
from collections.abc import Mapping
from typing import TextIO

from kakeya.cli.node_api import NodeApi
from kakeya.cli.talk.waiting import WaitLine
from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.generation.caller import PRIORITIES


def add_options(generate: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    generate.add_argument("--prompt", metavar="TEXT", help="the text to continue (else stdin)")
    add_sampling(generate, max_tokens=128)
    generate.add_argument(
        "--draft", default="auto", metavar="POLICY", help="auto, off, ngram, peer, MODEL@HOST:PORT"
    )
    generate.add_argument(
        "--priority", default="normal", choices=tuple(PRIORITIES), help="default: %(default)s"
    )


def add_sampling(command: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add what all commands that generate take."""
    command.add_argument("--model", default="", metavar="ID", help="default: the node's first")
    command.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    command.add_argument("--temperature", type=_number, default=None, metavar="T")
    command.add_argument("--seed", type=int, default=None, metavar="N")


def run(node: NodeApi, options: argparse.Namespace) -> int:
    """Run the command and return its exit status. Raises KakeyaError."""
    prompt = stdin().read() if options.prompt is None else options.prompt
    if not prompt:
        raise InvalidArgument("the prompt is empty; give a text with --prompt or on stdin")
    check_text(prompt, "the prompt")
    body = {
        "model": options.model or models_of(node)[0],
        "prompt": prompt,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature or 0.0,
        "seed": options.seed or 0,
        "draft_policy": options.draft,
        "priority": options.priority,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text: list[str] = []
    usage: Mapping[str, object] = {}
    waiting = WaitLine()
    for event in node.stream("/v1/completions", body, waiting.show):
        waiting.end()
        piece = _text_of(event)
        text.append(piece)
        if not options.json:
            print(on_terminal(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        found = event.get("usage")
        usage = found if isinstance(found, dict) else usage
    if options.json:
        print(json.dumps({"model": body["model"], "text": "".join(text), "usage": usage}))
    else:
        print()
        print(account(usage), file=sys.stderr)
    return 0


def stdin() -> TextIO:
    """Stdin, with surrogates for bytes that are not UTF-8, in every locale."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def on_terminal(text: str) -> str:
    """A text of a model without what moves a terminal's cursor, but for line breaks and tabs.

    Wide and unbroken spaces and the joiners of emoji and scripts are no control characters.
    """
    return "".join(
        char if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in _MOVES else "?"
        for char in text
    )


_MOVES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def check_text(text: str, what: str) -> None:
    """Raise InvalidArgument for a text with surrogates, as which Python reads bytes that are not
    UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidArgument(f"{what} is not UTF-8; give a text with --prompt or on stdin")


def models_of(node: NodeApi) -> list[str]:
    """The models that a node answers for, its first one first. Raises KakeyaError for none."""
    found = node.get("/v1/models").get("data")
    if not isinstance(found, list) or not found:
        raise KakeyaError(
            f"the node at {node.address} has no verifier; start one with --model ID_OR_PATH"
        )
    return [str(one["id"]) for one in found]


def account(usage: Mapping[str, object]) -> str:
    """Write one line for a person: tokens, speed, and the drafts that were accepted."""
    ours = usage.get("kakeya")
    tokens = int(str(usage.get("completion_tokens", 0)))
    if not isinstance(ours, dict) or not tokens:
        return f"{tokens} tokens"
    decode_s = max(1e-9, (ours["total_ms"] - ours["prefill_ms"]) / 1000)
    line = f"{tokens} tokens, {tokens / decode_s:.0f} tokens/s"
    line += f", prompt of {usage.get('prompt_tokens')} read in {ours['prefill_ms']:.0f} ms"
    if ours["verified"]:
        rate = ours["accepted"] / ours["verified"]
        line += f"; drafts: {ours['accepted']} of {ours['verified']} accepted ({rate:.0%})"
        line += f", {tokens / max(1, ours['forwards']):.2f} tokens per verify step"
    return line


def _number(written: str) -> float:
    try:
        number = float(written)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{written!r} is not a number; give one from 0 to 2")
    return number


def _text_of(event: Mapping[str, object]) -> str:
    choices = event.get("choices")
    return str(choices[0].get("text", "")) if isinstance(choices, list) and choices else ""
