"""`kakeya update`: drain the node, bring a newer version, start the node again, and look whether it
serves; where it does not, go back to the version before.

git   the clone from which `./scripts/kakeya` runs: what its upstream branch has
pip   an environment into which kakeya was installed: the newest package of the index that it came
      from, or that of --to, a version or a wheel
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from zipfile import ZipFile

from kakeya.cli.data_dir import add_data_dir
from kakeya.cli.logs import last_lines
from kakeya.cli.node_api import NodeApi
from kakeya.cli.service.command import (
    Program,
    folder_behind_sudo,
    program_as_owner,
    service_of,
)
from kakeya.cli.service.drain import PATIENCE_S, ctrl_c_told, drain, hangup_ignored
from kakeya.cli.service.start import LOG, OUTPUT, check_start, start_again, until_ready
from kakeya.core.errors import ConfigError, KakeyaError
from kakeya.node.datadir import RunInfo, find_running, is_held

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_TEXT = "drain the node, bring a newer version, start it again, and go back if it does not serve"
HEALTH_S = 180.0
ENDS_S = 15.0
"""Within these a drained node ends by itself; a signal of its service would cut that short."""
_LOOK_S = 0.5
_LINES = 5


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    update = commands.add_parser("update", help=_TEXT, description=_TEXT, allow_abbrev=False)
    update.add_argument(
        "--to", default="", metavar="VERSION", help="a version, a wheel, or a git commit"
    )
    update.add_argument("--dry-run", action="store_true", help="tell what would be done")
    add_data_dir(update)


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other. Raises KakeyaError."""
    if options.command != "update":
        return None
    ask = program_as_owner(Path(sys.prefix))
    source, folder = find_source(ask), folder_behind_sudo(options)
    if options.dry_run:
        node = (
            "drain the node, and start it again at the end" if is_held(folder) else "no node runs"
        )
        print(f"{source.told}\n  {node}")
        for command in (*source.look, *source.bring(options.to)):
            print(f"  {shlex.join(command)}")
        return 0
    print(update(source, NodeKeeper(folder), ask, options.to))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSource:
    """Where this program came from, and the commands that bring another version of it.

    `look` changes nothing; `version` is what runs at this moment.
    """

    told: str
    version: str
    look: tuple[tuple[str, ...], ...]
    bring: Callable[[str], tuple[tuple[str, ...], ...]]
    coming: Callable[[str], str]
    """The version that `bring` would bring. Raises ConfigError, as of one that does not exist."""
    keep: Callable[[Path, str], tuple[tuple[str, ...], ...]]
    """Keeps `version`, in an empty folder, and returns the commands that go back to it from the
    version that `bring` would bring."""
    newest: str = "that is the newest version"


def find_source(ask: Program) -> UpdateSource:
    """How this program was installed. Raises ConfigError where no update is known for it."""
    try:
        found = metadata.distribution("kakeya")
    except metadata.PackageNotFoundError:
        raise ConfigError("this program is not installed; update the folder it runs from") from None
    said, place = _came_from(found)
    if said.get("dir_info", {}).get("editable"):
        if not (place / ".git").exists():
            raise ConfigError(f"{place} is no clone of git; put the new version there yourself")
        return git_source(place, ask)
    return pip_source(found, ask)


def _came_from(installed: metadata.Distribution) -> tuple[dict[str, Any], Path]:
    """What pip noted of a package that it took from no index (PEP 610), and the path in it."""
    said = json.loads(installed.read_text("direct_url.json") or "{}")
    return said, Path(unquote(urlsplit(str(said.get("url", ""))).path))


def pip_source(installed: metadata.Distribution, ask: Program) -> UpdateSource:
    """Packages of the environment in which this program runs."""
    version = installed.version
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # Of a wheel of the version that is there pip would install nothing.
    again = (*pip, "--force-reinstall", "--no-deps")

    def bring(to: str) -> tuple[tuple[str, ...], ...]:
        if to.endswith(".whl"):
            wheel = str(Path(to).absolute())
            return ((*pip, wheel), (*again, wheel))
        said, place = _came_from(installed)
        if said:
            # What an index has by this name may be of another author.
            raise ConfigError(
                f"kakeya {version} was installed from {place}, not from an index: name a newer "
                "wheel with --to"
            )
        return ((*pip, f"kakeya=={to}") if to else (*pip, "--upgrade", "kakeya"),)

    def coming(to: str) -> str:
        said = _said(ask, (*bring(to)[-1], "--no-deps", "--dry-run", "--report", "-"))
        found = json.loads(said)["install"]
        brought = str(found[0]["metadata"]["version"]) if found else version
        return f"{brought}, again" if found and brought == version else brought

    def keep(folder: Path, _: str) -> tuple[tuple[str, ...], ...]:
        wheel = pack_installed(installed, folder)
        if _came_from(installed)[0]:
            return ((*again, str(wheel)),)
        # By its name, so that pip notes no file that it came from.
        return ((*again, "--no-index", f"--find-links={folder}", f"kakeya=={version}"),)

    return UpdateSource(
        told=f"installed by pip, version {version}",
        version=version,
        look=(),
        bring=bring,
        coming=coming,
        keep=keep,
        newest="pip finds no newer one; --to WHEEL takes one from a file",
    )


def pack_installed(installed: metadata.Distribution, folder: Path) -> Path:
    """Make a wheel of an installed package, since no index may have its version.

    Raises ConfigError where files of it cannot be read.
    """
    info = f"{installed.name}-{installed.version}.dist-info"
    # `installed.files` leaves out what is missing, since Python 3.12.
    rows = csv.reader((installed.read_text("RECORD") or "").splitlines())
    wheel = folder / f"{installed.name}-{installed.version}-py3-none-any.whl"
    files = [
        file
        for file in (PurePosixPath(row[0]) for row in rows if row)
        if file.parts[0] in (installed.name, info)
        and file.suffix != ".pyc"
        and file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
    ]
    if not files:
        raise ConfigError(f"not updated: pip has no list of the files of {installed.version}")
    try:
        with ZipFile(wheel, "w", strict_timestamps=False) as packed:
            for file in files:
                packed.write(str(installed.locate_file(str(file))), str(file))
            record = f"{info}/RECORD"
            packed.writestr(record, "".join(f"{file},,\n" for file in (*files, record)))
    except OSError as fault:
        raise ConfigError(f"not updated: {installed.version} cannot be kept: {fault}") from fault
    return wheel


def git_source(place: Path, ask: Program) -> UpdateSource:
    """A clone. Raises ConfigError where it cannot be read."""
    git = ("git", "-C", str(place))
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    look = ((*git, "fetch", "--quiet"),)

    version = _said(ask, (*git, "rev-parse", "HEAD"))

    def packages(to: str) -> tuple[tuple[str, ...], ...]:
        # pip asks an index also where nothing has to be brought, and a mini may be offline.
        target = to or "@{u}"
        changed = _said(ask, (*git, "diff", "--name-only", version, target, "--", "pyproject.toml"))
        return ((*pip, "--editable", str(place)),) if changed else ()

    def bring(to: str) -> tuple[tuple[str, ...], ...]:
        move = (
            ("reset", "--quiet", "--keep", to) if to else ("merge", "--quiet", "--ff-only", "@{u}")
        )
        return ((*git, *move), *packages(to))

    def coming(to: str) -> str:
        if changed := _said(ask, (*git, "status", "--porcelain", "--untracked-files=no")):
            first = changed.splitlines()[0].strip()
            raise ConfigError(
                f"{place} has changes of its own ({first}); commit them, or undo them"
            )
        return _said(ask, (*git, "rev-parse", "--verify", f"{to or '@{u}'}^{{commit}}"))

    told = f"the clone {place}, at {version[:12]}"
    return UpdateSource(
        told=told,
        version=version,
        look=look,
        bring=bring,
        coming=coming,
        keep=lambda _, to: ((*git, "reset", "--quiet", "--keep", version), *packages(to)),
    )


class NodeKeeper:
    """Stops the node of a data directory, and starts it again as it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = find_running(folder)
        self._service = service_of(folder, self._run.service) if self._run else None
        self._is_loaded = self._service is not None

    def check(self) -> None:
        """Raise ConfigError where the node could not be stopped or started again."""
        if self._run is not None and self._service is None:
            check_start(self._run)
        if self._service is not None:
            self._service.check_root()

    def stop(self) -> None:
        """Drain the node and wait for its end. Raises KakeyaError."""
        if self._run is None:
            return
        drain(self._folder, PATIENCE_S, until_replaced=False, tell=_tell)
        ends_mono = time.monotonic() + ENDS_S
        while find_running(self._folder) == self._run and time.monotonic() < ends_mono:
            time.sleep(_LOOK_S)
        if self._service is not None:  # which would start it again
            self._service.stop()
            self._is_loaded = False
        while is_held(self._folder):
            time.sleep(_LOOK_S)

    def start(self) -> None:
        """Start the node, and wait until it serves. Raises KakeyaError."""
        if self._run is None:
            return
        if self._service is not None:
            self._service.start()
            self._is_loaded = True
            run = until_ready(self._folder, 0, self._service.why_ended)
        else:
            started = start_again(self._run, self._folder)
            run = until_ready(self._folder, self._run.pid, started=started)
        until_healthy(run, self._folder)

    def last_lines(self) -> list[str]:
        """What the node said last, outside its log and in it."""
        if self._service is not None:
            return self._service.last_lines(_LINES)
        lines: list[str] = []
        if self._run is not None:
            for file in (self._folder / OUTPUT, Path(self._run.log_file or self._folder / LOG)):
                with contextlib.suppress(OSError):
                    lines += last_lines(file, _LINES)
        return lines

    def end(self) -> None:
        """End what `start` began and what does not serve."""
        if self._service is not None:
            if self._is_loaded:  # launchd refuses to stop what it does not know
                self._service.stop()
                self._is_loaded = False
        elif find_running(self._folder) is not None:
            drain(self._folder, 1.0, until_replaced=False, tell=_tell)
        while is_held(self._folder):
            time.sleep(_LOOK_S)


def update(source: UpdateSource, node: NodeKeeper, ask: Program, to: str) -> str:
    """Update, and return what came of it. Raises ConfigError with the version before in place."""
    _all(ask, source.look)
    coming = source.coming(to)
    if coming == source.version:
        return f"{source.told}: {'that is the version asked for' if to else source.newest}"
    node.check()
    _tell(source.told)
    with hangup_ignored(), tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for the owner of the environment, where root updates
        return _updated(source, node, ask, to, coming, source.keep(Path(folder), to))


def _updated(
    source: UpdateSource,
    node: NodeKeeper,
    ask: Program,
    to: str,
    coming: str,
    back: Sequence[Sequence[str]],
) -> str:
    with ctrl_c_told("not updated: the node drains already, and starts again as it was") as pressed:
        node.stop()
        if pressed:
            node.start()
            raise ConfigError(f"not updated: Ctrl-C; {source.version[:12]} runs again")
    try:
        _tell(f"{coming[:12]} is installed and started")
        _all(ask, source.bring(to))
        node.start()
    except (KakeyaError, OSError, KeyboardInterrupt) as problem:
        reason = problem.message if isinstance(problem, KakeyaError) else str(problem) or "Ctrl-C"
        _tell("\n  ".join((f"the new version does not serve: {reason}", *node.last_lines())))
        _tell("going back")
        with ctrl_c_told("the version before comes back; wait"):
            node.end()
            runs = f"{source.version[:12]} runs again"
            try:
                _all(ask, back)
            except KakeyaError as fault:
                runs = f"nor gone back ({fault.message}); what is there runs again"
            node.start()
        raise ConfigError(f"not updated: {reason}; {runs}") from problem
    return f"updated from {source.version[:12]} to {coming[:12]}"


def until_healthy(run: RunInfo, folder: Path) -> None:
    """Wait until the node of a folder answers and its models serve, or load still after
    `HEALTH_S`.

    Raises ConfigError for a model that failed, and a node that ended or does not answer.
    """
    api, ends_mono, fault = NodeApi(address=run.http), time.monotonic() + HEALTH_S, ""
    while time.monotonic() < ends_mono:
        try:
            models = api.get("/api/v1/status").get("models")
        except KakeyaError as problem:
            fault = problem.message
            at_present = find_running(folder)  # its service may have started it again
            if at_present is None or at_present.pid != run.pid:
                raise ConfigError("the node was ready, and ended") from problem
        else:
            fault = ""
            states = (
                [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
            )
            if failed := [one for one in states if one.get("state") == "failed"]:
                raise ConfigError(f"{failed[0].get('model_id')}: {failed[0].get('error')}")
            if all(one.get("state") in ("ready", "unloaded") for one in states):
                return
        time.sleep(_LOOK_S)
    if fault:
        raise ConfigError(fault)


def _all(ask: Program, commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        _said(ask, command)


def _said(ask: Program, command: Sequence[str]) -> str:
    done = ask(command)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        # pip ends with notes; git with its fault.
        faults = [line.strip() for line in lines if "ERROR: " in line] or lines
        raise ConfigError(f"{shlex.join(command)}: {faults[-1]}")
    return done.stdout.strip()


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        print(text, file=sys.stderr)
