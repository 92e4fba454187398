"""What `kakeya generate` and `kakeya chat` read from a pipe, and write to a terminal."""

from __future__ import annotations

import asyncio
import io

import pytest

from kakeya.cli.main import main
from kakeya.cli.node_api import NodeApi
from kakeya.cli.talk.generate import on_terminal
from tests.gateway.toy import ToyModel, make_folder, serving


def test_a_model_moves_no_cursor_and_its_words_stay_whole() -> None:
    assert on_terminal("a\x1b[2J\x9b1A\r\x7f\u202eb\n\tc") == "a?[2J?1A???b\n\tc"
    whole = "Bonjour\u202f! 你好\u3000世界 👩\u200d💻 می\u200cخواهم\xa0"
    assert on_terminal(whole) == whole


def test_an_answer_is_raw_in_a_pipe_and_plain_in_a_terminal(monkeypatch, capsys) -> None:
    def answer(*_: object) -> list[dict[str, object]]:
        return [{"choices": [{"text": "\x1b[2J"}]}]

    monkeypatch.setattr(NodeApi, "stream", answer)
    for is_terminal, shown in ((False, "\x1b[2J\n"), (True, "?[2J\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda told=is_terminal: told)
        arguments = ["generate", "--node", "127.0.0.1:1", "--model", "toy", "--prompt", "x"]
        assert main(arguments) == 0
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command", ["chat", "generate"])
async def test_bytes_that_are_no_utf_8_are_refused_with_words(
    command, tmp_path, monkeypatch, capsys
) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(b"hello \xff\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", pipe)
    async with serving(ToyModel(make_folder(tmp_path / "toy"))) as served:
        await asyncio.to_thread(main, [command, "--node", f"127.0.0.1:{served.port}"])
    assert "is not UTF-8" in capsys.readouterr().err
