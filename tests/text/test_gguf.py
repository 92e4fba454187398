"""The text folder that is made of a GGUF file's metadata."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.text.chat import Chat
from kakeya.text.gguf import gguf_tokenizer, make_text_folder, text_folder
from kakeya.text.text import TextModel
from tests.gguf_files import tiny_meta, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text_of(path: Path) -> TextModel:
    return TextModel(make_text_folder(path), wall=lambda: 0.0)


@pytest.fixture
def text(tmp_path: Path) -> TextModel:
    return text_of(write_gguf(tmp_path / "tiny.gguf", tiny_meta()))


async def test_the_folder_has_all_that_text_needs(text: TextModel) -> None:
    hello = await text.encode("hello", at_most=100)
    assert text.tokenizer.decode(hello) == "hello"
    assert len(hello) == 3  # hel, l, o
    chat = Chat(messages=[{"role": "user", "content": "hello"}])
    assert await text.encode_chat(chat, at_most=100) == hello
    assert text.stop_token_ids == {tiny_meta()["tokenizer.ggml.eos_token_id"]}


def test_the_folder_is_made_once_for_each_state_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_meta())
    first = make_text_folder(path)
    (first / "mark").touch()
    assert make_text_folder(path) == first == text_folder(path)
    assert (first / "mark").exists()
    os.utime(path, ns=(1, 1))
    assert make_text_folder(path) != first


def test_a_begin_token_is_put_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    meta = tiny_meta(**{"tokenizer.ggml.add_bos_token": True})
    begin = meta["tokenizer.ggml.bos_token_id"]
    assert gguf_tokenizer(meta).encode("hel").ids[0] == begin
    assert gguf_tokenizer(tiny_meta()).encode("hel").ids[0] != begin


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.pre"])
def test_another_tokenizer_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", tiny_meta(**{key: "strange"}))
    with pytest.raises(Unsupported, match="'strange'"):
        make_text_folder(path)


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path, cache: Path) -> None:
    meta = tiny_meta()
    del meta["tokenizer.ggml.tokens"]
    with pytest.raises(InvalidArgument, match="describes no text"):
        make_text_folder(write_gguf(tmp_path / "empty.gguf", meta))
    assert not list(cache.rglob("*.json"))
