"""One folder per node: its lock, its identity across starts, the addresses of the running node.

    node.lock      held (flock) while a node runs; its text is the pid, and whether it leaves
    node.json      node id, incarnation, last stamp, peers (`state.py`)
    node.run.json  pid, addresses and start of the running node, for the command line
    node.live.json what PUT /api/v1/config set (`dispatch/registry.py`)
    jobs.db        jobs and their results (`dispatch/job_store.py`)
    findings/      checks and measured speeds of models, a file for each (`mlx/findings.py`)

Files are replaced whole (write aside, fsync, rename). A damaged state file is set aside as
`*.corrupt` and named in the log; the start goes on without it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.node.state import DamagedState, NodeState, decode_state, encode_state

_log = logging.getLogger(__name__)
LOCK, STATE, RUN = "node.lock", "node.json", "node.run.json"
LIVE = "node.live.json"
FINDINGS = "findings"
SERVICE_VARIABLE = "KAKEYA_SERVICE"
"""Set by the files of `kakeya service install`: the kind of the service."""
_LEAVES = "leaves"
_OURS = ("KAKEYA_", "MODEL_BOSS_", "HF_")
"""Names of the variables of which a start depends."""


def make_folder(folder: Path) -> None:
    """Make a data directory if it is missing. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise _unusable(folder, problem) from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The process id and the addresses of the running node, and how it was started.

    `service` is the kind of the system's service that keeps it (`SERVICE_VARIABLE`), "" = none;
    `log_file` "" = stderr.
    """

    pid: int
    node_id: str
    grpc: str
    http: str
    python: str = ""
    argv: tuple[str, ...] = ()
    folder: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    log_file: str = ""
    service: str = ""


def run_of_this_process(node_id: str, grpc: str, http: str, log_file: Path | None) -> RunInfo:
    """The run of a node in this process, for `kakeya restart` and `kakeya logs`."""
    return RunInfo(
        pid=os.getpid(),
        node_id=node_id,
        grpc=grpc,
        http=http,
        python=sys.executable,
        argv=tuple(sys.argv[1:]),
        folder=os.getcwd(),  # noqa: PTH109 - as text
        environ={name: os.environ[name] for name in os.environ if name.startswith(_OURS)},
        log_file=str(log_file.absolute()) if log_file else "",
        service=os.environ.get(SERVICE_VARIABLE, ""),
    )


class DataDir:
    """A data directory that this process holds; a context manager that releases it."""

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        """Make the folder if needed and lock it; with `waits` once another node has left it.

        Raises Conflict if another node holds it, ConfigError if it cannot be used.
        """
        self.folder = folder
        try:
            make_folder(folder)
            folder.chmod(0o700)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise _unusable(folder, problem) from problem
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            pid = next(iter(_read_lock(self._lock)), "unknown")
            os.close(self._lock)
            raise Conflict(
                f"data directory {folder} is held by the node with pid {pid}; stop that node "
                "(kakeya drain; a service: kakeya service uninstall), or give another --data-dir"
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as problem:
            os.close(self._lock)
            raise _unusable(folder, problem) from problem

    def leave(self) -> None:
        """Note that this node leaves the folder, for another that may wait for it."""
        os.pwrite(self._lock, f"{os.getpid()} {_LEAVES}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the run file and let another node start here."""
        (self.folder / RUN).unlink(missing_ok=True)
        os.close(self._lock)

    def load_state(self) -> NodeState | None:
        """Read the state; None at the first start, and when the file was damaged.

        Raises ConfigError if the file can neither be read nor set aside.
        """
        path = self.folder / STATE
        try:
            return self._read_state(path)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise ConfigError(
                f"state file {path} cannot be used: {problem.strerror or problem}; "
                "make it readable, or name another folder with --data-dir"
            ) from problem

    def _read_state(self, path: Path) -> NodeState | None:
        try:
            return decode_state(path.read_bytes())
        except DamagedState as problem:
            aside = path.with_name(path.name + ".corrupt")
            path.replace(aside)
            event(
                _log,
                "state file was damaged and is set aside; starting without it",
                level=logging.WARNING,
                file=aside,
                problem=problem,
            )
            return None

    def save_state(self, state: NodeState) -> None:
        """Replace the state file. Raises OSError; the old file then stays."""
        write_atomically(self.folder / STATE, encode_state(state))

    def write_run(self, info: RunInfo) -> None:
        """Write this node's addresses for the command line. Raises OSError."""
        write_atomically(self.folder / RUN, json.dumps(asdict(info)).encode())


def find_running(folder: Path, *, or_killed: bool = False) -> RunInfo | None:
    """Return the node that holds `folder`, or was killed there; None if none is ready, or was."""
    return _read_run(folder / RUN) if or_killed or is_held(folder) else None


def is_held(folder: Path) -> bool:
    """Whether a node runs in `folder`, ready or not."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def is_left(folder: Path) -> bool:
    """Whether the node that runs in `folder` leaves it."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _LEAVES in _read_lock(lock)
    finally:
        os.close(lock)


def _read_lock(lock: int) -> list[str]:
    return os.pread(lock, 64, 0).decode("ascii", "replace").split()


def _read_run(path: Path) -> RunInfo | None:
    try:
        fields = json.loads(path.read_bytes())
        return RunInfo(
            pid=int(fields["pid"]),
            node_id=str(fields["node_id"]),
            grpc=str(fields["grpc"]),
            http=str(fields["http"]),
            python=str(fields.get("python", "")),
            argv=tuple(map(str, fields.get("argv", ()))),
            folder=str(fields.get("folder", "")),
            environ={str(key): str(value) for key, value in fields.get("environ", {}).items()},
            log_file=str(fields.get("log_file", "")),
            service=str(fields.get("service", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _unusable(folder: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"data directory {folder} cannot be used: {problem.strerror or problem}; name a writable "
        "folder, on a disk with room, with --data-dir"
    )
