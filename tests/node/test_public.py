"""The package's promises that no floor can test alone."""

from __future__ import annotations

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
