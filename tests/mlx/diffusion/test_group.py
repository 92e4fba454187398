"""A verifier and its drafter in two processes of a real mlx.distributed group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError
from kakeya.mlx.library import mlx_pair
from tests.mlx.diffusion.rig import write_drafter
from tests.mlx.random_models import write_model
from tests.mlx.ring.rig import LAUNCH, START_S, free_ports, launch
from tests.test_docs import programs


@pytest.mark.slow
def test_states_and_drafts_travel_by_send_and_recv_and_change_no_token(tmp_path: Path) -> None:
    verifier = write_model(tmp_path / "v", "llama")
    drafter = write_drafter(tmp_path / "d", verifier_hidden_size=64, vocab_size=96)
    program = (sys.executable, "-m", "tests.mlx.diffusion.child_pair")
    command = [*launch(2), *program, str(verifier), str(drafter)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    said = ended.stdout + ended.stderr
    line = next((one for one in said.splitlines() if "found {" in one), "")
    assert line, said
    found = json.loads(line[line.index("{") :])
    assert found.pop("differing") == 0
    assert found.pop("sent_bytes") > 0
    assert found.pop("draft_ms") > 0
    assert all(run["is_equal"] and not run["problem"] for run in found.values()), found
    assert "drafted" in said


@pytest.mark.slow
def test_the_program_of_the_page_decodes(tmp_path: Path) -> None:
    (program,) = [one for one in programs("library.md") if "mlx_pair" in one]
    (tmp_path / "pair.py").write_text(program)
    command = [
        *(str(LAUNCH), "-n", "2", "--backend", "ring", "-p", str(free_ports(2)), "--"),
        *(sys.executable, str(tmp_path / "pair.py")),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    tokens = next(line for line in said.splitlines() if "[" in line and "," in line)
    assert len(json.loads(tokens[tokens.index("[") :])) == 32


def test_a_process_in_no_group_is_told_how_to_start_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"started by mlx.launch -n 2: no mlx ring: not started"):
        with mlx_pair("kakeya-tiny", "kakeya-tiny-dlm"):
            pass
    with pytest.raises(ConfigError, match="is not known"):
        with mlx_pair("kakeya-tiny", "none-such"):
            pass
