"""The ring probe under the real mlx.launch: two ranks are two seats of one ring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.fleet.placement.ring import ring_path_available

LAUNCH = Path(sys.executable).parent / "mlx.launch"
SCRIPT = """#!{python}
import json, sys
sys.path.insert(0, {top!r})
import mlx.core as mx
from kakeya.fleet.placement.ring import probe_ring_environment
joined = probe_ring_environment(init=lambda: mx.distributed.init(strict=True))
found = probe_ring_environment()
print("RING " + json.dumps([found.is_available, found.rank, found.world_size, found.ring_address(),
                            joined.rank, joined.world_size]), flush=True)
"""


def launch(folder: Path, ranks: int) -> list[list[object]]:
    script = folder / "probe.py"
    script.write_text(SCRIPT.format(python=sys.executable, top=str(Path.cwd())))
    script.chmod(0o755)
    run = subprocess.run(
        [str(LAUNCH), "-n", str(ranks), "--backend", "ring", str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if "RING " in line]
    assert lines, run.stdout + run.stderr
    return [json.loads(line.partition("RING ")[2]) for line in lines]


@pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")
def test_two_launched_ranks_advertise_two_seats_of_one_ring(tmp_path: Path) -> None:
    seats = sorted(launch(tmp_path, 2), key=lambda seat: str(seat[1]))
    assert [(seat[0], seat[1], seat[2]) for seat in seats] == [(True, 0, 2), (True, 1, 2)]
    assert [(seat[4], seat[5]) for seat in seats] == [(0, 2), (1, 2)]
    assert ring_path_available(str(seats[0][3]), str(seats[1][3]))
    assert not ring_path_available(str(seats[0][3]), str(seats[0][3]))
