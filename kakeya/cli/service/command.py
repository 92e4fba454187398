"""`kakeya service`: have the system start the node with the machine, and again whenever it ends.

It touches the files that it lists and no others: one file of the service and one folder of logs. No
setting of the network is changed. Only the system's service needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.logs import last_lines
from kakeya.cli.service.files import (
    ServiceKind,
    ServicePlan,
    ServiceUser,
    plan_service,
    why_ended,
)
from kakeya.cli.service.start import until_ready
from kakeya.config.config import SETTINGS, load
from kakeya.config.reader import CONFIG_FLAG
from kakeya.core.errors import ConfigError, Conflict, KakeyaError
from kakeya.core.folders import default_folder
from kakeya.core.settings import folder as path_of
from kakeya.node.datadir import find_running, is_held

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
Program = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
_TEXT = "have the system start the node with the machine, and again whenever it ends"


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    service = commands.add_parser("service", help=_TEXT, description=_TEXT, allow_abbrev=False)
    actions = service.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = _action(actions, "install", "install the service, and start the node")
    install.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- FLAG ...",
        help="flags of kakeya-node, behind --: `kakeya service install -- --model ID`",
    )
    _action(actions, "uninstall", "stop the node, and remove what install made")
    _action(actions, "status", "show whether a service is installed, and what the system says")


def _action(actions: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    action.add_argument(
        "--as",
        dest="kind",
        default=ServiceKind.SYSTEM,
        choices=list(ServiceKind),
        help="system: from the start of the machine, needs sudo (default); user: while its user "
        "is logged in",
    )
    action.add_argument("--user", default="", metavar="NAME", help="as whom it runs (you)")
    action.add_argument("--dry-run", action="store_true", help="tell what would be done")
    add_data_dir(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    return action


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other. Raises KakeyaError."""
    if options.command != "service":
        return None
    given = getattr(options, "flags", [])
    flags = given[1:] if given[:1] == ["--"] else given
    kind = ServiceKind(options.kind)
    own = pwd.getpwuid(os.geteuid()).pw_name if kind is ServiceKind.USER else ""
    user = find_user(options.user or own, os.environ, os.geteuid())
    folder = _folder(options.data_dir, user)
    plan = plan_service(
        kind,
        user,
        python=sys.executable,
        flags=absolute(flags),
        folder=folder,
        platform=_platform(),
        systemd=systemd_version(program),
    )
    if options.dry_run:
        show_plan(plan, options.action, as_json=options.json)
        return 0
    service = Service(plan, folder, program)
    match options.action:
        case "install":
            load(["--data-dir", str(folder), *flags], {})
            said = service.install()
        case "uninstall":
            said = service.uninstall()
        case _:
            said = service.status()
    print(json.dumps(said) if options.json else said["says"])
    return 0 if said.get("is_installed") or options.action != "status" else 1


class Service:
    """A service of this machine: its file, and the program that keeps it."""

    def __init__(self, plan: ServicePlan, folder: Path, program: Program) -> None:
        self._plan = plan
        self._folder = folder
        self._program = program
        self._began_unix = 0
        self._at_start = ""

    def install(self) -> dict[str, object]:
        """Write the file and start the node; a failure changes nothing. Raises KakeyaError."""
        plan = self._plan
        self.check_root(_OR_USER)
        before = find_running(self._folder)
        kept = before.service if before is not None else ""
        if is_held(self._folder) and kept != plan.kind:
            how = f"service uninstall --as {kept}" if kept else "drain"
            told = f"a node runs in {self._folder} that this service does not keep"
            raise Conflict(f"{told}; stop it with kakeya {how}, and install then")
        is_there = plan.file.exists()
        earlier = plan.file.read_bytes() if is_there else b""
        if is_there:
            self._all(plan.unload, must=False)
        try:
            self._make_logs()
            plan.file.parent.mkdir(parents=True, exist_ok=True)
            plan.file.write_bytes(plan.content)
            plan.file.chmod(0o644)
            self.start()
            run = until_ready(self._folder, before.pid if before else 0, self.why_ended)
        except (OSError, KakeyaError) as problem:
            message = problem.message if isinstance(problem, KakeyaError) else str(problem)
            with contextlib.suppress(OSError):
                message += "".join(f"; {line}" for line in last_lines(plan.logs / "node.log", 1))
            if earlier:
                self._all(plan.unload, must=False)
                plan.file.write_bytes(earlier)
                self._all(plan.load, must=False)
                message += "; the service of before is back"
            else:
                self._remove()
            raise ConfigError(f"the service is not installed: {message}") from problem
        said = f"the node runs: pid {run.pid}, http {run.http}; its log is in {run.log_file}"
        note = f"\nnote: {plan.condition}" if plan.condition else ""
        return {"is_installed": True, "pid": run.pid, "says": f"{_files(plan)}\n{said}{note}"}

    def uninstall(self) -> dict[str, object]:
        """Stop the node and remove the files. Raises KakeyaError."""
        if not self._plan.file.exists():
            nothing = f"nothing is installed at {self._plan.file}"
            return {"is_installed": False, "says": nothing + self._other()}
        self.check_root(_OR_USER)
        self._remove()
        says = f"removed {_files(self._plan)}\nthe node's files stay: models, keys and state in "
        return {"is_installed": False, "says": f"{says}{self._folder}"}

    def status(self) -> dict[str, object]:
        """What is installed, what the system says of it, and the node that runs."""
        plan, run = self._plan, find_running(self._folder)
        if not plan.file.exists():
            says = f"not installed: there is no {plan.file}{self._other()}"
            return {"is_installed": False, "says": says, "pid": run.pid if run else None}
        asked = self._program(plan.look)
        lines = [line.strip() for line in asked.stdout.splitlines() if _TELLING.match(line)]
        told = [_files(plan), *lines[:6], *([asked.stderr.strip()] if asked.returncode else [])]
        if run is not None:
            told.append(f"the node runs: pid {run.pid}, http {run.http}")
        else:
            told.append(f"no node serves in {self._folder}")
        pid = run.pid if run else None
        return {"is_installed": True, "pid": pid, "system": lines, "says": "\n".join(told)}

    def _other(self) -> str:
        """What is said of a node here that a service of the other kind keeps."""
        found = find_running(self._folder)
        kept = found.service if found is not None else ""
        return f"; the node here is kept --as {kept}" if kept not in ("", self._plan.kind) else ""

    def stop(self) -> None:
        """Stop the node until `start`. Raises ConfigError."""
        self.check_root()
        self._all(self._plan.unload)

    def start(self) -> None:
        """Start the node again. Raises ConfigError."""
        began_unix = int(time.time())
        self._all(self._plan.load)
        self.look()
        self._began_unix = began_unix

    def look(self) -> None:
        """Count the ends of `why_ended` from here, and the lines of `last_lines`."""
        self._began_unix = int(time.time())
        self._at_start = self._program(self._plan.look).stdout

    def why_ended(self, ends: int = 0) -> str:
        """Why the node has ended more than `ends` times since `start` or `look`; "" = it has not.
        The system starts it again."""
        return why_ended(self._at_start, self._program(self._plan.look).stdout, ends)

    def last_lines(self, count: int) -> list[str]:
        """What the node said last outside its log, and the end of its log."""
        lines: list[str] = []
        if journal := self._plan.journal:
            since = (f"--lines={count}", f"--since=@{self._began_unix}")
            lines += self._program((*journal, *since)).stdout.splitlines()
        for name in ("launchd.log", "node.log"):
            with contextlib.suppress(OSError):
                lines += last_lines(self._plan.logs / name, count)
        return lines

    def _remove(self) -> None:
        self._all(self._plan.unload, must=False)
        said = self._plan.file.read_bytes() if self._plan.file.exists() else self._plan.content
        self._plan.file.unlink(missing_ok=True)
        self._all(self._plan.forget, must=False)
        logs = self._plan.logs
        if os.fsencode(logs) in said:  # else it kept the node of another folder
            for one in (*logs.glob("node.log*"), logs / "launchd.log"):
                one.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                logs.rmdir()
        for folder in self._plan.emptied:
            with contextlib.suppress(OSError):  # it has files of others, or is not there
                folder.rmdir()

    def _make_logs(self) -> None:
        user, logs = self._plan.user, self._plan.logs
        made = [one for one in (logs, *logs.parents) if not one.exists()]
        logs.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            for one in made:
                os.chown(one, user.uid, user.gid)

    def check_root(self, otherwise: str = "") -> None:
        """Raise ConfigError for a caller that may not change this service; it says `otherwise`."""
        user = self._plan.user
        if not self._plan.needs_root and os.geteuid() != user.uid:
            raise ConfigError(f"--as user is for yourself: run this as {user.name}, without sudo")
        if self._plan.needs_root and os.geteuid() != 0:
            again = shlex.join(["sudo", sys.executable, "-m", "kakeya.cli.main", *sys.argv[1:]])
            raise ConfigError(f"the system's service needs root: {again}{otherwise}")

    def _all(self, commands: Sequence[Sequence[str]], *, must: bool = True) -> None:
        for command in commands:
            done = self._program(command)
            if must and done.returncode:
                reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
                raise ConfigError(f"{shlex.join(command)}: {reason}")


_OR_USER = "; or give --as user, without root"
_TELLING = re.compile(
    r"\s*(ActiveState|SubState|MainPID|NRestarts|state|pid|runs|last exit code)\b"
)


def find_user(name: str, environ: Mapping[str, str], uid: int) -> ServiceUser:
    """The user as which the node runs: the one that is named, or the caller, also behind sudo.

    Raises ConfigError for an unknown one, and for root without a name.
    """
    name = name or (environ.get("SUDO_USER", "") if uid == 0 else pwd.getpwuid(uid).pw_name)
    if not name:
        raise ConfigError("root runs no node unless you say so: give --user NAME")
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"there is no user {name!r} on this machine") from None
    return ServiceUser(name=name, uid=found.pw_uid, gid=found.pw_gid, home=Path(found.pw_dir))


def folder_behind_sudo(options: argparse.Namespace) -> Path:
    """The data directory that the caller means, also behind sudo, which has another home."""
    name = os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else ""
    if not name or options.data_dir:
        return data_dir_of(options)
    return _folder("", find_user(name, {}, 0))


def _folder(given: str, user: ServiceUser) -> Path:
    if given:
        return Path(given).expanduser().absolute()
    return default_folder({}, platform=sys.platform, home=user.home)


def absolute(flags: Sequence[str]) -> list[str]:
    """Flags with whole paths: the service starts in the home folder."""
    of_paths = {CONFIG_FLAG, *(one.flag for one in SETTINGS.values() if one.parse is path_of)}
    return [
        _whole(one, is_path=before in of_paths or one.partition("=")[0] in of_paths)
        for before, one in zip(("", *flags), flags, strict=False)
    ]


def _whole(word: str, *, is_path: bool) -> str:
    """A word whose path is whole: PATH, NAME=PATH:ROLE of a model, or --FLAG= and one of these."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    name, named, path = ("", "", value) if is_path else value.rpartition("=")
    path, colon, role = (path, "", "") if is_path else path.partition(":")
    if path and (is_path or (os.sep in path and Path(path).exists())):
        path = str(Path(path).expanduser().absolute())
    return f"{flag}{equals}{name}{named}{path}{colon}{role}"


def _platform() -> str:
    if sys.platform not in ("darwin", "linux"):
        raise ConfigError(f"no service is known for {sys.platform}; macOS and Linux have one")
    return sys.platform


def service_of(folder: Path, kind: str) -> Service | None:
    """The service that keeps the node of a folder, of which the node tells the kind; "" = none."""
    if not kind:
        return None
    is_own = kind == ServiceKind.USER
    uid = os.geteuid() if is_own else folder.stat().st_uid
    user = find_user(pwd.getpwuid(uid).pw_name, os.environ, uid)
    plan = plan_service(
        ServiceKind(kind),
        user,
        python=sys.executable,
        flags=(),
        folder=folder,
        platform=_platform(),
    )
    return Service(plan, folder, program)


def program_as_owner(folder: Path) -> Program:
    """`program` as the owner of a folder, for root: a file of root would lock the owner out."""
    uid = folder.stat().st_uid
    if os.geteuid() != 0 or uid == 0:
        return program
    return partial(program, user=pwd.getpwuid(uid))


def systemd_version(ask: Program) -> int:
    """The version of systemd here; 0 = there is none."""
    if shutil.which("systemctl") is None:
        return 0
    found = re.match(r"systemd (\d+)", ask(("systemctl", "--version")).stdout)
    return int(found[1]) if found else 0


def program(
    command: Sequence[str], user: pwd.struct_passwd | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of the system, as a user or as this one, and return what it said."""
    try:
        if user is None:
            return subprocess.run(command, capture_output=True, text=True, check=False)
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
            env={**os.environ, "HOME": user.pw_dir, "USER": user.pw_name},
        )
    except OSError as problem:
        reason = problem.strerror or str(problem)
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {reason}")


def show_plan(plan: ServicePlan, action: str, *, as_json: bool) -> None:
    """Tell what an action would do, and do nothing."""
    commands = {"install": plan.load, "uninstall": (*plan.unload, *plan.forget)}.get(
        action, (plan.look,)
    )
    if as_json:
        told = {
            "files": [str(one) for one in (plan.file, *plan.links, plan.logs)],
            "commands": commands,
            "needs_root": plan.needs_root,
        }
        print(
            json.dumps(told | ({"content": plan.content.decode()} if action == "install" else {}))
        )
        return
    print(f"{_files(plan)}\n{'needs root' if plan.needs_root else 'needs no root'}")
    for command in commands:
        print(f"  {shlex.join(command)}")
    if action == "install":
        print(plan.content.decode())
        if plan.condition:
            print(f"note: {plan.condition}")


def _files(plan: ServicePlan) -> str:
    links = "".join(f", {link} (a link to it)" for link in plan.links)
    return f"{plan.file} (the service){links}, {plan.logs} (its logs)"
