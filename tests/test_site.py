"""The site of docs/, and its tutorial as a reader types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import netns
from tests.test_docs import DOCS, shell_blocks, shell_lines
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def test_the_site_is_built_without_a_warning_and_needs_no_internet(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    styles = [style.read_text() for style in tmp_path.rglob("*.css")]
    assert len(pages) > 40
    assert not [page for page in pages if "```" in page], "a block that is indented is none there"
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?://[^>]+", "".join(pages))
    assert not re.findall(r"url\(.?(?:https?:)?//[^)]+", "".join(styles))
    reference = (tmp_path / "reference/http.html").read_text()
    assert "/v1/chat/completions" in reference
    assert "max_tokens" in reference


class Mini:
    """A machine with a reader before it, who types commands and leaves nodes running."""

    def __init__(self, machine: netns.Machine, home: Path) -> None:
        self.machine, self.home = machine, home
        self.nodes: list[netns.Spawned] = []
        (home / "bin").mkdir(parents=True)
        for name, module in (("kakeya", "cli.main"), ("kakeya-node", "node.daemon")):
            program = home / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kakeya.{module} "$@"\n')
            program.chmod(0o755)
        path = f"{home}/bin:{os.environ['PATH']}"
        self.shell = ("env", f"HOME={home}", f"PATH={path}", f"PYTHONPATH={ROOT}", "bash", "-c")

    def types(self, line: str) -> str:
        if line.startswith("kakeya-node"):
            log_file = self.home / "node.log"
            node = self.machine.spawn(*self.shell, f"exec {line}", log_file=log_file, limit_s=90)
            assert "ready" in node.first_line, node.log
            self.nodes.append(node)
            return ""
        done = self.machine.run(*self.shell, line, limit_s=150)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sees(self, nodes: int) -> bool:
        return len(json.loads(self.types("kakeya status --json"))["fleet"]["nodes"]) == nodes


@netns.needs_netns()
def test_the_tutorial_brings_up_two_minis_and_takes_one_away(tmp_path: Path) -> None:
    (first, *chapters) = (DOCS / "tutorial.md").read_text().split("\n## ")
    assert not shell_blocks(first)
    typed: dict[str, str] = {}
    with netns.network(2) as machines:
        minis = {
            f"mini {number}": Mini(machine, tmp_path / str(number))
            for number, machine in enumerate(machines, 1)
        }
        for chapter in chapters:
            if chapter.startswith("6."):
                assert minis["mini 2"].nodes.pop().stop(number=signal.SIGINT) == 0
            for block in shell_blocks(chapter):
                where, *lines = shell_lines(block)
                if where == "# both":  # the installation: `tests/test_wheel.py`
                    continue
                for line in lines:
                    token = re.search(r"kakeya-\S+", typed.get("kakeya invite", ""))
                    asked = line.replace("kakeya-TOKEN", token[0] if token else "none")
                    typed[line] = minis[where.removeprefix("# ")].types(asked)
            if chapter.startswith("3."):
                wait_until("the minis see each other", lambda: minis["mini 1"].sees(2))
        for node in minis["mini 1"].nodes:
            assert node.stop() == 0
    (answer,) = (said for line, said in typed.items() if line.startswith("curl"))
    assert json.loads(answer)["choices"][0]["text"]
    assert "all is well" in typed["kakeya doctor"]
