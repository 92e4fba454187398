"""Looking through the process's own connections leaves its files alone."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

from kakeya.wire.server.sockets import open_peers

TRY = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def is_locked(path: Path) -> bool:
    """As another process sees it."""
    ran = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, check=False)
    return ran.returncode != 0


def test_locks_of_this_process_on_files_survive(tmp_path: Path) -> None:
    """POSIX ends a process's locks on a file when any of its descriptors of that file is closed,
    a duplicate too; without them, SQLite in another process takes the file for its own."""
    path = tmp_path / "leases.db"
    path.write_bytes(b"")
    with path.open("r+") as file, socket.create_server(("127.0.0.1", 0)) as server:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with socket.create_connection(server.getsockname()) as client:
            found = open_peers()
            assert f"127.0.0.1:{server.getsockname()[1]}" in found
            assert client.fileno() >= 0
        assert is_locked(path)
        assert os.fstat(file.fileno()).st_size == 0
