"""Starts the ranks of a group on loopback as mlx.launch does, by forks; ends all with the first.

python -m tests.mlx.ring.child_launch RANKS FIRST_PORT -- python -m MODULE ...
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    ranks, port, _, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        hosts = Path(folder) / "hosts.json"
        addresses = [[f"127.0.0.1:{int(port) + rank}"] for rank in range(int(ranks))]
        hosts.write_text(json.dumps(addresses))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(int(ranks)):
                of_rank = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
                environ = {**os.environ, **of_rank}
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environ))
            ended, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            next(rank for rank in started if rank.pid == ended).returncode = code
            if not code:
                for rank in started:
                    rank.wait()
            print(f"a rank exited with code {code}", flush=True)
            return abs(code)
        finally:
            for rank in started:
                rank.terminate()
            for rank in started:
                rank.wait()


if __name__ == "__main__":
    sys.exit(main())
