"""Texts of a toy tokenizer, and ways to cut them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from kakeya.text.chat import Chat
from kakeya.text.text import TextModel
from tests.gateway.toy import make_folder

NOW = 1_700_000_000.0
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@functools.cache
def text_model() -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return TextModel(make_folder(Path(folder)), lambda: NOW)


def chat_of(*messages, tools=(), **said) -> Chat:
    return Chat(messages=messages, tools=tuple(tools), **said)


def cut(items, sizes):
    """Cut a sequence into pieces of these sizes, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(items):
        pieces.append(items[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    return pieces
