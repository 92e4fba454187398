"""`kakeya completion`: a script that a real shell completes by."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kakeya.cli.main import main

ASK = """
source "$1"
COMP_WORDS=(kakeya service install --dr) COMP_CWORD=3
_shtab_kakeya
echo "${COMPREPLY[@]}"
"""


def test_a_shell_completes_commands_and_flags(tmp_path: Path, capsys) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "kakeya.bash"
    script.write_text(capsys.readouterr().out)
    asked = ["bash", "-c", ASK, "bash", str(script)]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["--dry-run"]
