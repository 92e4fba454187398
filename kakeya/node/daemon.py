"""The main of `kakeya-node`: configuration, signals and exit statuses around the agent.

Exit status: 0 after SIGTERM or SIGINT and a drain, 2 for a wrong flag, value, address or model
folder, 1 for a fault. Each refusal is one sentence on stderr. The process leaves by `os._exit`
once everything is closed and flushed, so that no interpreter teardown can hang it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from kakeya.config import config
from kakeya.core import log
from kakeya.core.errors import ConfigError, KakeyaError
from kakeya.core.garbage import spare_what_is_there, undisturbed
from kakeya.node.datadir import FINDINGS, DataDir
from kakeya.node.handover import take_place

_log = logging.getLogger("kakeya.node.daemon")  # not __name__: this may be __main__
_FILES = 8192
_HANG_S = 5.0
"""How much longer than the grace a shutdown may take before the process ends itself."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a node until it is told to stop."""
    # The lines of gRPC on stderr repeat our errors in another format.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _allow_files()
    try:
        settings = config.load(sys.argv[1:] if argv is None else argv, os.environ)
        _open_log(settings)
        # Before the slow imports: a second node is refused at once, and clients may wait.
        home, port = take_place(settings.data_dir, settings.listen.http, _load)
        with home, port:
            status = asyncio.run(_run(settings, home, port))
    except ConfigError as wrong:
        status = _refuse(2, wrong.message)
    except KakeyaError as fault:
        status = _refuse(1, fault.message)
    except Exception:  # noqa: BLE001 - the edge of the process; logged with its traceback
        _log.exception("the node ended by a fault of this program")
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _open_log(settings: config.NodeConfig) -> None:
    try:
        log.configure(settings.log_format, settings.log_level, settings.log_file)
    except OSError as problem:
        raise ConfigError(
            f"--log-file {settings.log_file}: {problem.strerror or problem}; give a file that can "
            "be written, or none for stderr"
        ) from problem


def _allow_files() -> None:
    """Raise the soft limit of open files: macOS starts programs with 256, a fleet needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _refuse(status: int, sentence: str) -> int:
    sys.stderr.write(f"kakeya-node: {sentence}\n")
    return status


def _load() -> None:
    """Import the slow libraries. After the flags: a wrong one is refused without them."""
    with undisturbed():
        import kakeya.node.agent  # noqa: F401


async def _run(settings: config.NodeConfig, home: DataDir, port: socket.socket) -> int:
    with undisturbed():
        from kakeya.backends.engines import engine_command
        from kakeya.fleet.identity.identity import FOLDER as IDENTITY
        from kakeya.node.agent import GRACE_S, Agent

    spare_what_is_there()
    stopped = asyncio.Event()
    _stop_on_signals(stopped, GRACE_S + _HANG_S)
    command = engine_command(
        settings.log_format,
        settings.data_dir / IDENTITY,
        log_level=settings.log_level,
        adapters=settings.adapters,
        findings=settings.data_dir / FINDINGS,
    )
    async with Agent(settings, command, home, port) as agent:
        for warning in settings.warnings:
            _log.warning(warning)
        ready = f"kakeya-node ready node_id={agent.node_id} grpc={agent.grpc} http={agent.http}"
        sys.stdout.write(ready + "\n")
        sys.stdout.flush()
        await stopped.wait()
        _log.info("stopping: no new requests; running ones may end within %g s", GRACE_S)
    _log.info("stopped")
    return 0


def _stop_on_signals(stopped: asyncio.Event, limit_s: float) -> None:
    """Stop at the first signal, end at the second, and end when stopping takes too long."""

    def stop() -> None:
        if stopped.is_set():
            _leave("a second signal came")
        stopped.set()
        watchdog = threading.Timer(limit_s, _leave, (f"stopping took longer than {limit_s:g} s",))
        watchdog.daemon = True
        watchdog.start()

    loop = asyncio.get_running_loop()
    keeps_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    for number in (signal.SIGTERM, signal.SIGINT, *(() if keeps_on else (signal.SIGHUP,))):
        loop.add_signal_handler(number, stop)


def _leave(why: str) -> NoReturn:
    """End at once; engine children end with their standard input."""
    sys.stderr.write(f"kakeya-node: {why}; ending at once\n")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
