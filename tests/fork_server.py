"""Children of the tests that run a module of ours are forked from a process that imported it.

Imports are nine tenths of the processor time in which an engine or a node starts. So a process of
the tests has a server, which imports once what engines and nodes import and then only forks:
`python -m kakeya...` and `python -m tests...`, in an environment in which imports would end the
same. Any other command starts as it does elsewhere, and so do all in scripts/soak and on a Mac.

    process of the tests ─┬─ server ── between ── child     between ends, and the process of the
                          └─ child                          tests adopts what that one began

A child is thus the child of the process that asked for it, which waits for it and signals it. It
has the files, folder, environment, session, arguments and command line that `exec` would have given
it. A node gets a server of its own, forked before it runs, for its engines; so does what starts
nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockbuster import BlockBuster

IMPORTS = (
    *("kakeya.cli.child", "kakeya.cli.doctor", "kakeya.decoding.processors.grammar"),
    *("kakeya.engine.adapters.slots", "kakeya.engine.service", "kakeya.mlx.loader"),
    *("kakeya.mlx.model", "kakeya.node.agent", "kakeya.v1.engine_pb2_grpc"),
)
"""What nodes and engines import, but for the modules that they run as their main."""
FORKED = ("kakeya.cli.main", "kakeya.node.", "tests.")
MEASURED = ("tests.backends.images.",)
"""Not forked: tests compare the memory of such a child with what it allocates."""
HAS_CHILDREN = ("kakeya.node.daemon", "tests.cli.child_demo", "tests.mlx.ring.child_launch")
IN_NAMESPACE = ["ip", "netns", "exec"]
"""What comes before the name of a network namespace and the command that runs in it."""
SHAPES_IMPORTS = ("PYTHON", "LD_", "MALLOC_", "OPENBLAS", "OMP_", "MLX_", "HF_", "TRANSFORMERS")
SHAPES_IMPORTS += ("HOME", "XDG_", "LANG", "LC_")
READ_LATER = ("MLX_RANK", "MLX_HOSTFILE")
"""What mlx reads when a group begins."""
BEFORE_IMPORTS = "--blas-threads"
"""What an engine tells OpenBLAS before mlx is imported."""
ROOM = "-" * 8000
"""An argument of the server: it makes room for the command lines of its children."""
MAX_REQUEST_BYTES = 100_000
ADOPTS = 36  # PR_SET_CHILD_SUBREAPER in linux/prctl.h


def shaping(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables under which modules are imported."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(SHAPES_IMPORTS) and name not in READ_LATER
    }


class Client:
    """What asks for children, in the process whose children they are.

    Without a given server it starts one with the first child, and another one when that has ended.
    """

    def __init__(self, server: socket.socket | None = None) -> None:
        self._server = server
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = server is None
        self.environ = {n: text for n, text in os.environ.items() if not n.startswith("PYTEST_")}
        self._lock = threading.Lock()
        if self._starts:
            atexit.register(self.end)

    def can(self, arguments: list[str], environ: Mapping[str, str], how: dict[str, Any]) -> bool:
        """Whether a forked child does what a new process would do."""
        return (
            arguments[:2] == [sys.executable, "-m"]
            and arguments[2].startswith(FORKED)
            and not arguments[2].startswith(MEASURED)
            and not any(one.startswith(BEFORE_IMPORTS) for one in arguments)
            and shaping(environ) == shaping(self.environ)
            and not any(how[name] for name in ("executable", "shell", "preexec_fn", "pass_fds"))
            and all(how[name] in (None, -1) for name in ("gid", "gids", "uid", "umask"))
            and how["process_group"] in (None, -1)
        )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The process id of a new child. Raises OSError without a server."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            if self._server is None and self._starts:
                self._server, self.process = started(self.environ)
            if self._server is None:
                raise ChildProcessError("the fork server has ended")
            prctl(ADOPTS, 1)
            try:
                socket.send_fds(self._server, [json.dumps(request).encode()], files)
                return int(os.read(self._server.fileno(), 100))
            except (OSError, ValueError) as lost:
                self.end()
                raise ChildProcessError("the fork server has ended") from lost
            except BaseException:  # the answer may come yet, and would be read as that of the next
                self.end()
                raise
            finally:
                prctl(ADOPTS, 0)

    def end(self) -> None:
        """Close the socket to the server, which ends with it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.process is not None:
            self.process.wait()
            self.process = None


def may_block(guard: BlockBuster) -> None:
    """Let a guard of the event loop pass the start of a forked child, as it passes any other's."""
    for call in ("os.read", "os.getcwd", "socket.socket.sendmsg"):
        if guarded := guard.functions.get(call):
            guarded.can_block_in("tests/fork_server.py", {"fork", "fork_or_execute"})


installed: list[Client] = []


def install(client: Client) -> None:
    """Let `subprocess` and asyncio start children of this process by a fork where they can."""
    installed.append(client)
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    named = inspect.signature(execute)

    @functools.wraps(execute)
    def fork_or_execute(self: subprocess.Popen[Any], args: Any, *others: Any) -> None:
        how = named.bind(self, args, *others).arguments
        arguments = [] if isinstance(args, str) else [os.fsdecode(one) for one in args]
        environ = os.environ if how["env"] is None else how["env"]
        environ = {os.fsdecode(name): os.fsdecode(text) for name, text in environ.items()}
        namespace = ""
        if arguments[:3] == IN_NAMESPACE:
            namespace, *arguments = arguments[3:]
        ends = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        if len(arguments) > 2 and client.can(arguments, environ, how):
            request = {
                "arguments": arguments,
                "folder": os.fsdecode(how["cwd"] or os.getcwd()),  # noqa: PTH109 - text
                "environ": environ,
                "namespace": namespace,
                "leads_session": bool(how["start_new_session"]),
                "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            }
            with contextlib.suppress(ChildProcessError):
                files = [own if given == -1 else given for own, given in enumerate(ends)]
                self.pid = client.fork(request, files)
                self._child_created = True  # type: ignore[attr-defined]
                self._close_pipe_fds(  # type: ignore[attr-defined]
                    *(how[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                    *(how[end] for end in ("errread", "errwrite")),
                )
                return
        execute(self, args, *others)

    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]


def started(environ: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A new server, and the socket to it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests.fork_server import main; main()", ROOM],
            stdin=there,
            stdout=subprocess.DEVNULL,
            env=environ,
            cwd=Path(__file__).parents[1],
        )
    return here, process


def main() -> None:
    """Import all; then serve in this process, and run what is asked for in its children."""
    from kakeya.mlx.imports import import_without_tokenizers
    from kakeya.mlx.numerics import blas

    os.environ["GRPC_VERBOSITY"] = "NONE"  # as a node asks, before gRPC is imported
    preload, is_fast = blas.preload_blas, blas.preload_blas(1)

    def preloaded(threads: int) -> bool:
        preload(threads)  # for the environment; the answer would be that mlx is there already
        return is_fast

    blas.preload_blas = preloaded
    limit, resource.setrlimit = resource.setrlimit, lambda *_: None  # mlx-lm lowers it for good
    import_without_tokenizers()
    resource.setrlimit = limit
    for module in IMPORTS:
        importlib.import_module(module)
    control = socket.socket(fileno=os.dup(0))
    _no_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run(*serve(control))


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork children until the other end is closed; returns in each child, with what it shall do."""
    while True:
        message, files, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        told, tells = os.pipe()
        waits, goes = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            request = json.loads(message)
            if request["leads_session"]:  # before its id is told: a signal may come at once
                os.setsid()
            os.write(tells, str(os.getpid()).encode())
            for file in (told, tells, goes):
                os.close(file)
            control.close()
            os.read(waits, 1)  # until it is adopted
            os.close(waits)
            return request, files
        os.waitpid(between, 0)
        for file in (tells, waits, goes, *files):
            os.close(file)
        control.send(os.read(told, 100))
        os.close(told)


def run(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for, to its end."""
    _, _, module, *arguments = request["arguments"]
    server = None
    if request["namespace"]:
        _enter(request["namespace"])
    if module in HAS_CHILDREN:
        server, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            os.setpgid(0, 0)  # a signal to the group of this process is not for its server
            server.close()
            for file in files:
                os.close(file)
            run(*serve(there))
            return
        there.close()
    for at, file in enumerate(files):
        os.dup2(file, at)
        os.close(file)
    os.chdir(request["folder"])
    if (limits := tuple(request["open_files"])) != resource.getrlimit(resource.RLIMIT_NOFILE):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.environ.clear()
    os.environ.update(request["environ"])
    _show(request["arguments"], request["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    sys.path[0] = request["folder"]
    sys.orig_argv = request["arguments"]
    sys.argv = ["-m", *arguments]
    for at, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = open(  # noqa: SIM115
            at,
            "w" if at else "r",
            buffering=1 if at == 2 else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if server is not None:
        install(Client(server))  # after the environment is there
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code or 0
    if isinstance(status, int):
        _leave(status)
    sys.exit(status)  # type: ignore[call-overload]


def _leave(status: int) -> None:
    """End as the interpreter does, but for the teardown of all that was imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


def _enter(namespace: str) -> None:
    """Enter a network namespace as `ip netns exec` does: /sys shows its interfaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_network, new_mounts, slave, recursive, detach = 0x40000000, 0x20000, 1 << 19, 1 << 14, 2
    with Path("/run/netns", namespace).open("rb") as name:
        done = [libc.setns(name.fileno(), new_network), libc.unshare(new_mounts)]
    done += [libc.mount(b"", b"/", b"none", slave | recursive, None), libc.umount2(b"/sys", detach)]
    done += [libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None)]
    if any(done):
        raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered: {done}")


def _no_files() -> None:
    """Hold nobody's files as standard ones."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for at in range(3):
        os.dup2(nothing, at)
    os.close(nothing)


def _show(arguments: list[str], environ: Mapping[str, str]) -> None:
    """Let the system name this process as if it had been executed, which tests look for."""
    places = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    first, end, first_env, end_env = (int(place) for place in places[45:49])
    lines = [f"{name}={text}" for name, text in sorted(environ.items(), key=_mark_first)]
    for start, stop, strings in ((first, end, arguments), (first_env, end_env, lines)):
        block = b"".join(os.fsencode(one) + b"\0" for one in strings)[: stop - start - 1]
        ctypes.memmove(start, block.ljust(stop - start, b"\0"), stop - start)


def _mark_first(variable: tuple[str, str]) -> bool:
    return not variable[0].startswith("PYTEST_")
