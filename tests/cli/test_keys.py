"""`kakeya key`: what it prints, and what it leaves in the data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kakeya.cli.main import main
from kakeya.gateway.http.keys import read_keys


def test_a_key_is_added_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--data-dir", str(tmp_path))
    assert main(["key", "add", "laptop", "--role", "admin", *at]) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert key.startswith("kakeya-")
    assert "once" in said.err
    assert key not in said.err
    assert main(["key", "list", *at]) == 0
    listed = capsys.readouterr().out
    assert listed.split()[:2] == ["laptop", "admin"]
    assert key not in listed
    assert main(["key", "remove", "laptop", *at]) == 0
    assert read_keys(tmp_path) == ()
    assert main(["key", "remove", "laptop", *at]) == 1
    assert "there is no key of 'laptop'" in capsys.readouterr().err


def test_json_has_the_key_once_and_the_list_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--data-dir", str(tmp_path), "--json")
    assert main(["key", "add", "ci", *at]) == 0
    added = json.loads(capsys.readouterr().out)
    assert (added["name"], added["role"]) == ("ci", "infer")
    assert main(["key", "list", *at]) == 0
    listed = capsys.readouterr().out
    assert [one["name"] for one in json.loads(listed)["keys"]] == ["ci"]
    assert added["key"] not in listed


def test_without_a_key_the_list_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "list", "--data-dir", str(tmp_path)]) == 0
    assert "kakeya key add NAME" in capsys.readouterr().out
