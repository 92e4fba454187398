"""`kakeya logs`: the end of a file, what is written later, and what nodes tell of themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kakeya.cli.logs import follow, last_lines, told_lines
from kakeya.cli.main import main
from kakeya.cli.node_api import NodeApi
from kakeya.cli.service.files import log_file
from kakeya.core.errors import NotFound
from kakeya.node.datadir import DataDir, RunInfo
from tests.waiting import wait_until


def test_the_last_lines_come_from_two_files_where_the_newest_is_short(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))
    assert last_lines(log, 3) == ["line 49997", "line 49998", "line 49999"]
    assert last_lines(log, 0) == []
    log.rename(tmp_path / "node.log.1")
    log.write_text("new é\n")
    assert last_lines(log, 3) == ["line 49998", "line 49999", "new é"]
    assert len(last_lines(log, 10**6)) == 50_001


def test_lines_are_followed_into_the_next_file(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("one\ntwo\n")
    seen: list[str] = []

    def read() -> None:
        with closing(follow(log, 1)) as lines:
            for line in lines:
                seen.append(line)
                if line == "six":
                    return

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    wait_until("two is read", lambda: seen)
    with log.open("a") as file:
        file.write("three\nfo")
        file.flush()
        file.write("ur\n")
    wait_until("four is read", lambda: seen[-1] == "four")
    log.rename(tmp_path / "node.log.1")
    log.write_text("five\nsix\n")
    reading.join(60)
    assert seen == ["two", "three", "four", "five", "six"]


class Node(NodeApi):
    """A node that tells facts by hand."""

    def __init__(self, *told: dict[str, dict[str, Any]]) -> None:
        super().__init__(address="127.0.0.1:1")
        object.__setattr__(self, "told", told)

    def facts(self, for_s: float | None) -> Iterator[dict[str, dict[str, Any]]]:
        yield from self.told


def entry(at: float, what: str, **fields: object) -> dict[str, object]:
    return {"at": at, "level": "info", "room": "a.b", "what": what, "fields": fields, "times": 1}


def test_a_peer_is_chosen_by_its_label_and_its_ids_become_labels() -> None:
    own, other = "a" * 52, "b" * 52
    first = {
        own: {"card": {"label": "mini-1", "is_self": True}, "events": [entry(1.0, "own")]},
        other: {"card": {"label": "mini-2"}},
    }
    news = [entry(3.0, "late", node=own, s=0.12345), entry(2.0, "early", empty="")]
    then = {**first, other: {**first[other], "events": news}}
    node = Node(first, then)
    lines = [*told_lines(node, "mini-2", 10, is_followed=False)]
    assert [line.partition(" ")[2].strip() for line in lines] == [
        'info    a.b: early empty=""',
        "info    a.b: late node=mini-1 s=0.123",
    ]
    assert len([*told_lines(node, "mini-2", 1, is_followed=False)]) == 1
    (own_line,) = told_lines(node, "", 10, is_followed=False)
    assert own_line.endswith("a.b: own")
    with pytest.raises(NotFound, match=r"no node is called 'mini-3'; did you mean mini-"):
        list(told_lines(node, "mini-3", 10, is_followed=False))


def test_the_log_of_a_service_that_has_ended_is_found(tmp_path, capsys) -> None:
    log = log_file(tmp_path, Path.home(), "linux")
    log.parent.mkdir()
    log.write_text("the last words \x1b[2J\n")
    assert main(["logs", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the last words ?[2J\n"


def test_a_line_that_comes_while_the_last_ones_are_read_is_followed(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("one\ntwo\n")
    with closing(follow(log, 2)) as lines:
        assert next(lines) == "one"
        with log.open("a") as file:
            file.write("three\n")
        assert [next(lines), next(lines)] == ["two", "three"]


def test_an_unknown_peer_is_refused_at_once_when_it_is_followed() -> None:
    node = Node({"a" * 52: {"card": {"label": "mini-1", "is_self": True}}})
    with pytest.raises(NotFound, match="no node is called 'mini-9'"):
        next(told_lines(node, "mini-9", 10, is_followed=True))


def test_a_count_is_of_lines_and_a_log_that_is_gone_is_named(tmp_path, capsys) -> None:
    told = {"a" * 52: {"card": {"is_self": True}, "events": [entry(1.0, "own")]}}
    assert [*told_lines(Node(told), "", 0, is_followed=False)] == []
    with pytest.raises(SystemExit):
        main(["logs", "-n", "-5"])
    assert "'-5' is no count of lines" in capsys.readouterr().err
    with DataDir(tmp_path) as home:
        log = str(tmp_path / "gone.log")
        home.write_run(RunInfo(pid=7, node_id="n", grpc="a:1", http="a:2", log_file=log))
        assert main(["logs", "--data-dir", str(tmp_path)]) == 1
    assert f"the log {log} is gone" in capsys.readouterr().err
