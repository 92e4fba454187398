"""The file of a service and the commands around it, for launchd and systemd. Pure.

system, macOS   LaunchDaemon with UserName: from the start of the machine, without a login
user, macOS     LaunchAgent: while its user is logged in at the screen
system, Linux   unit of systemd, with User=
user, Linux     unit of the user's systemd: while its user is logged in, or lingers
"""

from __future__ import annotations

import plistlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kakeya.node.datadir import SERVICE_VARIABLE

LABEL, UNIT = "dev.kakeya.node", "kakeya.service"
_PATHS = {
    # launchd's own PATH lacks Homebrew.
    "darwin": "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "linux": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
_STOP_S = 20
"""The node drains for a few seconds; what is left after so many is killed."""
_AGAIN_S, _LONGEST_S = 2, 60
"""Between an end and the next start, and the longest such pause of systemd, which grows."""
_THROTTLE_S = 30
_GROWS_SINCE = 254
"""The version of systemd from which pauses can grow."""
_OWN_SHM = "\nTemporaryFileSystem=/dev/shm:mode=1777,size=50%"
"""systemd-logind removes all of a user's shared memory once the last session of the user ends
(RemoveIPC), also that of services; the pages of KV and adapters lie in it."""
_LOOKS_AT = "ActiveState,SubState,MainPID,NRestarts,Result,ExecMainStatus"
_NEVER = "(never exited)"
"""launchd, of a node that runs for the first time."""
Command = tuple[str, ...]


class ServiceKind(StrEnum):
    """The keeper of the node: the machine's, or that of a logged-in user."""

    SYSTEM = "system"
    USER = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceUser:
    """The user as which the node runs."""

    name: str
    uid: int
    gid: int
    home: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What an installation does: one file, one folder of logs, and commands.

    `load` and `unload` have the system know the file and start the node, and the reverse.
    `condition` is what else must hold, "" = nothing.
    """

    kind: ServiceKind
    user: ServiceUser
    file: Path
    content: bytes
    logs: Path
    load: tuple[Command, ...]
    unload: tuple[Command, ...]
    forget: tuple[Command, ...]
    look: Command
    journal: Command = ()
    """What the node said outside its log, where the system keeps that and no file has it."""
    links: tuple[Path, ...] = ()
    """Links that the system makes to the file."""
    emptied: tuple[Path, ...] = ()
    """Folders that go with the service where nothing else is in them, from the innermost out."""
    condition: str = ""

    @property
    def needs_root(self) -> bool:
        """Whether only root may install it."""
        return self.kind is ServiceKind.SYSTEM


def log_file(folder: Path, home: Path, platform: str) -> Path:
    """The log of a node in a data directory that a service keeps."""
    return logs_folder(folder, home, platform) / "node.log"


def logs_folder(folder: Path, home: Path, platform: str) -> Path:
    """Where the log lies."""
    return home / "Library/Logs/kakeya" if platform == "darwin" else folder / "logs"


def plan_service(
    kind: ServiceKind,
    user: ServiceUser,
    *,
    python: str,
    flags: Sequence[str],
    folder: Path,
    platform: str,
    systemd: int = 0,
) -> ServicePlan:
    """Plan a service of a node in a data directory; `flags` are those of `kakeya-node`, `systemd`
    is its version, where it is there."""
    log = log_file(folder, user.home, platform)
    command = (
        *(python, "-m", "kakeya.node.daemon", "--data-dir", str(folder)),
        *("--log-file", str(log)),
        *flags,
    )
    environ = {"HOME": str(user.home), "PATH": _PATHS[platform], SERVICE_VARIABLE: kind.value}
    make = _launchd if platform == "darwin" else _systemd
    return make(kind, user, command, environ, log.parent, systemd)


def _launchd(
    kind: ServiceKind,
    user: ServiceUser,
    command: Command,
    environ: dict[str, str],
    logs: Path,
    _: int,
) -> ServicePlan:
    is_daemon = kind is ServiceKind.SYSTEM
    said: dict[str, object] = {
        "Label": LABEL,
        **({"UserName": user.name} if is_daemon else {}),
        "ProgramArguments": list(command),
        "WorkingDirectory": str(user.home),
        "EnvironmentVariables": environ,
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _THROTTLE_S,
        "ExitTimeOut": _STOP_S,
        "ProcessType": "Interactive",
        # What comes before the node's own log, and after it.
        "StandardErrorPath": str(logs / "launchd.log"),
    }
    domain = "system" if is_daemon else f"gui/{user.uid}"
    root = Path("/Library/LaunchDaemons") if is_daemon else user.home / "Library/LaunchAgents"
    file = root / f"{LABEL}.plist"
    return ServicePlan(
        kind=kind,
        user=user,
        file=file,
        content=plistlib.dumps(said, sort_keys=False),
        logs=logs,
        load=(("/bin/launchctl", "bootstrap", domain, str(file)),),
        unload=(("/bin/launchctl", "bootout", f"{domain}/{LABEL}"),),
        forget=(),
        look=("/bin/launchctl", "print", f"{domain}/{LABEL}"),
        condition=""
        if is_daemon
        else (
            f"it runs only while {user.name} is logged in at the screen, and macOS asks there "
            "whether Python may use the local network"
        ),
    )


def _systemd(
    kind: ServiceKind,
    user: ServiceUser,
    command: Command,
    environ: dict[str, str],
    logs: Path,
    version: int,
) -> ServicePlan:
    is_system = kind is ServiceKind.SYSTEM
    root = Path("/etc/systemd/system") if is_system else user.home / ".config/systemd/user"
    target = f"{'multi-user' if is_system else 'default'}.target"
    wants = root / f"{target}.wants"
    grows = f"RestartSteps=5\nRestartMaxDelaySec={_LONGEST_S}\n" if version >= _GROWS_SINCE else ""
    variables = "".join(
        f"Environment={_quoted(f'{name}={one}')}\n" for name, one in environ.items()
    )
    content = (
        "[Unit]\nDescription=Kakeya node\nAfter=network-online.target\n"
        "Wants=network-online.target\nStartLimitIntervalSec=0\n\n"
        f"[Service]\nType=exec\n{f'User={user.name}{_OWN_SHM}' if is_system else ''}\n"
        f"WorkingDirectory={_escaped(str(user.home))}\n{variables}"
        f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in command)}\n"
        f"Restart=always\nRestartSec={_AGAIN_S if grows else _THROTTLE_S // 3}\n{grows}"
        f"KillMode=mixed\nTimeoutStopSec={_STOP_S}\nLimitNOFILE=8192:524288\n\n"
        f"[Install]\nWantedBy={target}\n"
    ).replace("Type=exec\n\n", "Type=exec\n")
    systemctl: Command = ("systemctl",) if is_system else ("systemctl", "--user")
    linger = f"loginctl enable-linger {shlex.quote(user.name)}"
    return ServicePlan(
        kind=kind,
        user=user,
        file=root / UNIT,
        content=content.encode(),
        logs=logs,
        load=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", UNIT)),
        unload=((*systemctl, "disable", "--now", UNIT),),
        forget=((*systemctl, "daemon-reload"),),
        links=(wants / UNIT,),
        emptied=() if is_system else (wants, root, root.parent),
        look=(*systemctl, "show", f"--property={_LOOKS_AT}", UNIT),
        journal=(
            *("journalctl", "--quiet", "--no-pager", "--output=cat"),
            f"_SYSTEMD_{'' if is_system else 'USER_'}UNIT={UNIT}",
            f"_UID={user.uid}",
        ),
        condition=""
        if is_system
        else f"it runs while {user.name} is logged in; `{linger}` has it run without, too",
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a unit file: systemd takes quotes, backslashes and %, and $ in commands alone."""
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def why_ended(at_start: str, at_end: str, ends: int = 0) -> str:
    """Why a node has ended more often than `ends` times since `at_start`; "" = it has not.

    Both are what `look` says; `at_start`, with `ends` 0, just after the service was started.
    """
    before, after = _properties(at_start), _properties(at_end)
    if "ActiveState" in after:
        waits = after.get("SubState", "").startswith("auto-restart")
        is_over = after["ActiveState"] in ("failed", "inactive")
        has_ended = is_over or _starts(after, before, "NRestarts") + waits > ends
        names = ("Result", "ExecMainStatus")
    else:
        # launchd keeps the last end for ever, and counts starts alone.
        names = ("last exit code", "last terminating signal")
        is_told = any(after.get(name, _NEVER) != _NEVER for name in names)
        has_ended = _starts(after, before, "runs") > ends if ends else is_told
    told = ", ".join(f"{name} {after[name]}" for name in names if name in after)
    return f"the node ended, says its service: {told}" if has_ended else ""


def _starts(after: Mapping[str, str], before: Mapping[str, str], name: str) -> int:
    return int(after.get(name, "0")) - int(before.get(name, "0"))


def _properties(said: str) -> dict[str, str]:
    """NAME=VALUE of systemd, and NAME = VALUE of launchd, of whose parts the outermost is first."""
    found: dict[str, str] = {}
    for line in said.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name.strip(), value.strip())
    return found
