"""`kakeya bench` against a gateway with the toy model, and what it makes of its reports."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kakeya.cli.main import main
from kakeya.core.errors import PeerUnavailable
from tests.gateway.toy import Pace, ToyModel, make_folder, serving

OWN = "node-own"


def status(**model: object) -> Callable[[], dict[str, Any]]:
    nodes = [
        {"node_id": OWN, "is_self": True, "label": "my-own-mini"},
        {"node_id": "peer", "label": "her-mini", "rtt_ms": 0.5, "route": {"network": "lan"}},
    ]
    told = {
        "node": {"node_id": OWN, "label": "my-own-mini", "platform": "toy", "version": "1"},
        "models": [
            {"model_id": "toy", "context_tokens": 1024, "verify_ms": {"1": 2.0, "8": 3.0}, **model}
        ],
        "fleet": {"nodes": nodes},
    }
    return lambda: told


async def bench(*words: str) -> int:
    return await asyncio.to_thread(main, ["bench", *words])


async def test_a_report_is_shown_kept_and_compared(tmp_path: Path, capsys) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024)
    async with serving(toy, status=status(device="toy")) as served:
        at = ("--node", f"127.0.0.1:{served.port}", *data)
        assert await bench("--rounds", "2", "--tokens", "9", *at) == 0
        shown = capsys.readouterr()
        assert "one request, drafts" in shown.out
        assert " cores, " in shown.out.splitlines()[0]
        assert "L=8 3.0 ms (x1.50)" in shown.out
        assert "link to peer 1             0.50 ms, throughput not measured (lan)" in shown.out
        assert "round 2 of 2: 4 requests at once" in shown.err
        assert await bench("toy", "--rounds", "1", "--tokens", "9", "--json", "--names", *at) == 0
        named = json.loads(capsys.readouterr().out)
    assert {request.priority.name for request in toy.requests} == {"BATCH"}
    assert (named["machine"]["label"], named["links"][0]["peer"]) == ("my-own-mini", "her-mini")
    first, second = sorted((tmp_path / "data" / "bench").glob("*.json"))
    assert "mini" not in first.read_text()
    assert json.loads(second.read_text()) == named
    assert first.name in shown.err
    assert await bench("show", first.stem, *data) == 0
    assert capsys.readouterr().out == shown.out
    assert await bench("show", "--json", *data) == 0
    assert json.loads(capsys.readouterr().out) == named
    assert await bench("compare", *data, str(first), second.name) == 0
    told = capsys.readouterr().out
    assert "other settings: rounds" in told
    assert "verifying 8 tokens              3.00      3.00 ms        x 1.00" in told


async def test_requests_of_others_are_noted(tmp_path: Path, capsys) -> None:
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024)
    async with serving(toy, status=status(running=1)) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--data-dir", str(tmp_path))
        assert await bench("--rounds", "1", "--tokens", "8", *at) == 0
    assert "note: others' requests ran at the node (8 times)" in capsys.readouterr().out


async def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024, pace=Pace(step_s=0.002))
    async with serving(toy, status=status()) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--data-dir", str(tmp_path))
        child = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "kakeya.cli.main",
                "bench",
                "--rounds",
                "9999",
                "--tokens",
                "8",
                *at,
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert child.stderr is not None
        while b"round 2 of 9999: 4 requests" not in (line := await child.stderr.readline()):
            assert line, "it ended"
        child.send_signal(signal.SIGINT)
        out, _ = await child.communicate()
    assert child.returncode == 130
    assert b"the bench was ended before its last round" in out
    (kept,) = (tmp_path / "bench").glob("*.json")
    assert json.loads(kept.read_text())["results"]["decode_plain"]["count"] == 2


async def test_a_node_that_fails_at_once_leaves_no_report(tmp_path: Path, capsys) -> None:
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024, fail_after=0)
    async with serving(toy, status=status()) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--data-dir", str(tmp_path))
        assert await bench(*at) == 1
        assert "the engine is gone" in capsys.readouterr().err
        assert await bench("tox", *at) == 1
        assert "no model 'tox' is served; did you mean toy?" in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


async def test_a_report_that_cannot_be_kept_is_shown(tmp_path: Path, capsys) -> None:
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024)
    (tmp_path / "bench").write_text("no folder")
    async with serving(toy, status=status(context_tokens=400)) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--data-dir", str(tmp_path))
        assert await bench("--rounds", "1", "--tokens", "8", "--json", *at) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["settings"]["prompt_tokens"] == 200
    assert "the report cannot be kept in" in told.err


async def test_of_a_node_that_ends_meanwhile_its_status_of_before_is_told(
    tmp_path: Path, capsys
) -> None:
    toy = ToyModel(make_folder(tmp_path / "toy"), context_tokens=1024)
    told, asked = status(device="toy"), iter(range(5))

    def ends() -> dict[str, Any]:
        if next(asked, None) is None:
            raise PeerUnavailable("it ends")
        return told()

    async with serving(toy, status=ends) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--data-dir", str(tmp_path))
        assert await bench("--tokens", "8", *at) == 1
    shown = capsys.readouterr()
    assert "toy on toy, toy" in shown.out
    assert "ended before its last round" in shown.out


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["compare"], "kakeya bench compare A B", 2),
        (["compare", "a"], "kakeya bench compare A B", 2),
        (["show", "a", "b"], "kakeya bench show [FILE]", 2),
        (["show", "never"], "no report never in", 1),
        (["show"], "no report so far in", 1),
        (["--rounds", "0"], "--rounds is 0; it must be 1 or more", 2),
        (["toy"], "no node runs in", 1),
        (["show", "x" * 5000], "no report xxx", 1),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, capsys, words, said, code) -> None:
    assert main(["bench", *words, "--data-dir", str(tmp_path)]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"format": 2}', '{"format": 1, "results": 7}']
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, capsys, text) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main(["bench", "show", str(tmp_path / "x.json")]) == 2
    assert str(tmp_path / "x.json") in capsys.readouterr().err
