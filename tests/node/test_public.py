"""The package's promises that no floor can test alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kakeya

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT_NAMES = "kakeya kakeya-node test real_model soak bench gen venv.sh ../.ci/run"


@pytest.mark.parametrize("name", kakeya.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kakeya, name) is not None


def test_the_agent_loads_no_model_framework() -> None:
    code = (
        "import sys, kakeya.node.agent, kakeya.backends.engines\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_nothing_sets_how_much_metal_keeps_wired() -> None:
    """Too high a limit panics the machine. Our own code does not, nor does it use the part of
    mlx_lm that would."""
    package = Path(kakeya.__file__).parent
    called = re.compile(r"set_\w*wired_limit\(|\bwired_limit\(")
    sources = [*package.rglob("*.py")]
    assert sources
    assert [str(one) for one in sources if called.search(one.read_text())] == []


def test_the_command_line_answers_without_grpc() -> None:
    code = "import sys, kakeya.cli.main; print(sorted({'grpc', 'rich'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("script", SCRIPT_NAMES.split())
def test_every_script_is_well_formed(script: str) -> None:
    path = SCRIPTS / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.suffix == ".sh" or path.stat().st_mode & 0o100


def test_a_mac_with_pythons_for_intel_alone_is_told_so(tmp_path: Path) -> None:
    """Each `python3` of this folder says that it runs on an Intel Mac."""
    as_intel = "import platform, sys; sys.platform, platform.machine = 'darwin', lambda: 'x86_64'"
    stubs = {
        "uname": "echo Darwin",
        "xcode-select": "exit 0",
        **dict.fromkeys(
            ("python3.11", "python3.12", "python3.13", "python3.14", "python3"),
            f'exec {sys.executable} -c "{as_intel}\n$2"',
        ),
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(kakeya.__file__).parents[1] / "scripts" / "venv.sh"
    found = subprocess.run(
        ["bash", "-c", f". {script}; find_python"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "is a Python for Intel, for which there is no mlx" in found.stderr
