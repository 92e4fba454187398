"""Says what it is, for tests/test_fork_server.py; `wait` as an argument waits for a signal."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

if "wait" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(os.getpid(), flush=True)
    signal.pause()
own = Path("/proc/self")
environ = own.joinpath("environ").read_bytes().split(b"\0")
print(
    json.dumps(
        {
            "arguments": sys.argv,
            "shown": own.joinpath("cmdline").read_text().rstrip("\0").split("\0"),
            "environ": dict(os.environ),
            "shown_environ": b"PYTEST_CURRENT_TEST=this (call)" in environ,
            "folder": str(Path.cwd()),
            "path": sys.path,
            "files": sorted(os.listdir("/proc/self/fd"))[:3],  # noqa: PTH208 - names
            "parent": os.getppid(),
            "leads": os.getsid(0) == os.getpid(),
            "signals": [repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGPIPE)],
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
            "streams": [(one.encoding, one.errors) for one in (sys.stdin, sys.stdout, sys.stderr)],
            "given": sys.stdin.read(),
            "main": __name__,
            "has_mlx": "mlx.core" in sys.modules,
        }
    )
)
print("an error", file=sys.stderr)
sys.exit(7)
