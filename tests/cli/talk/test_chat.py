"""`kakeya chat` through a pipe, with a real gateway; Ctrl-C, an error and a receipt by hand."""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import Callable, Iterator, Mapping

import pytest

from kakeya.cli.main import main
from kakeya.cli.node_api import NodeApi
from kakeya.cli.talk import chat
from kakeya.cli.talk.chat import receipt
from kakeya.core.errors import KakeyaError
from tests.gateway.toy import ToyModel, make_folder, serving


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


async def test_each_line_of_a_pipe_is_a_turn_and_has_a_receipt(tmp_path, monkeypatch, capsys):
    folder = make_folder(tmp_path / "toy")
    typed(monkeypatch, "hi", "/nonsense", "", "and now?", "/quit", "never")
    async with serving(ToyModel(folder)) as served:
        flags = ["--node", f"127.0.0.1:{served.port}", "--max-tokens", "4", "--system", "be kind"]
        assert await asyncio.to_thread(main, ["chat", *flags]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    first, wrong, *receipts = [line for line in shown.err.splitlines() if "waiting" not in line]
    assert first.startswith("toy at 127.0.0.1:")
    assert "4 tokens" in wrong
    assert receipts[0].startswith("there is no /nonsense")
    assert "prompt tokens cached; 4 tokens" in receipts[1]
    assert len(receipts) == 2


class Node(NodeApi):
    """A node of which only the answers are true."""

    def __init__(self, answer: Callable[[], Iterator[dict[str, object]]]) -> None:
        super().__init__(address="127.0.0.1:1")
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "answer", answer)

    def get(self, path: str) -> dict[str, object]:
        if path == "/v1/models":
            return {"data": [{"id": "toy"}]}
        raise KakeyaError("no such path")

    def stream(self, path, body, on_wait=lambda _: None):  # type: ignore[no-untyped-def]
        self.asked.append([one["content"] for one in body["messages"]])
        return self.answer()


def piece(text: str) -> dict[str, object]:
    return {"id": "chatcmpl-1", "choices": [{"delta": {"content": text}}]}


def options(**more: object) -> argparse.Namespace:
    usual = {"model": "", "system": "", "max_tokens": None, "temperature": None, "seed": None}
    return argparse.Namespace(**{**usual, **more})


def test_ctrl_c_ends_an_answer_and_not_the_chat(monkeypatch, capsys):
    def cut() -> Iterator[dict[str, object]]:
        yield piece("half an ")
        yield piece("answer\x1b[2J")
        raise KeyboardInterrupt

    typed(monkeypatch, "one", "two")
    node = Node(cut)
    assert chat.run(node, options()) == 0
    assert node.asked == [["one"], ["one", "half an answer\x1b[2J", "two"]]
    shown = capsys.readouterr()
    assert shown.out == "half an answer?[2J\n" * 2
    assert shown.err.count("ended by Ctrl-C") == 2


def test_a_question_that_failed_is_not_sent_again_with_the_next(monkeypatch, capsys):
    def refuse() -> Iterator[dict[str, object]]:
        raise KakeyaError("the context is full")
        yield {}

    typed(monkeypatch, "one", "two")
    node = Node(refuse)
    assert chat.run(node, options()) == 1
    assert node.asked == [["one"], ["two"]]
    assert "the context is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("explained", "line"),
    [
        ({}, "3 tokens"),
        (
            {"node": "mini-2", "cached_tokens": 8, "prompt_tokens": 9},
            "mini-2; 8 of 9 prompt tokens cached; 3 tokens",
        ),
        ({"waits_s": {"load": 1.2, "queue": None}}, "waited 1.2 s; 3 tokens"),
    ],
)
def test_a_receipt_is_one_line(explained: Mapping[str, object], line: str) -> None:
    assert receipt({"completion_tokens": 3}, explained) == line
