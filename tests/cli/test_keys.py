"""`kakeya key`: what it prints, and what it leaves in the data folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kakeya.cli.main import main
from kakeya.fleet.identity.authority import create_fleet
from kakeya.gateway.http.keys import read_keys
from kakeya.node.datadir import DataDir, RunInfo


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


def test_the_authority_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--data-dir", str(tmp_path))
    assert main(["ca", *at]) == 2
    assert "kakeya init" in capsys.readouterr().err
    identity = create_fleet(tmp_path, "mini-1", 1_800_000_000.0)
    assert main(["ca", *at]) == 0
    assert capsys.readouterr().out.encode() == identity.tls.authority


@pytest.mark.parametrize(
    ("http", "words"),
    [
        ("", ("kakeya init", "--http 0.0.0.0:8210", ".local:8210/v1")),
        ("127.0.0.1:8211", ("--http 0.0.0.0:8211", ".local:8211/v1")),
        ("0.0.0.0:8211", (".local:8211/v1", "/kakeya ca", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")),
    ],
)
def test_a_new_key_comes_with_the_lines_for_the_other_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], http: str, words: tuple[str, ...]
) -> None:
    with DataDir(tmp_path) as home:
        if http:
            home.write_run(RunInfo(pid=os.getpid(), node_id="n", grpc="127.0.0.1:1", http=http))
        assert main(["key", "add", "laptop", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []


def test_without_a_key_the_list_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "list", "--data-dir", str(tmp_path)]) == 0
    assert "kakeya key add NAME" in capsys.readouterr().out
