"""`kakeya key` and `kakeya ca`: what a program on another machine needs to use a node over HTTP: an
API key, and the certificate of the fleet's authority, by which it trusts the node.

The commands change a file in the data folder; a running node sees the change by itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.core.errors import ConfigError
from kakeya.core.host import host_label
from kakeya.core.settings import is_loopback, split_address
from kakeya.gateway.http.keys import KeyRole, add_key, read_keys, remove_key
from kakeya.node.datadir import find_running
from kakeya.wire.server.config import ListenConfig

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    _action(commands, "ca", "print the certificate by which other machines trust this fleet, PEM")
    text = "API keys for HTTP callers on other machines"
    key = commands.add_parser("key", help=text, description=text, allow_abbrev=False)
    actions = key.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(actions, "add", "make a key and show it, once")
    add.add_argument("name", metavar="NAME", help="the name of its client, as laptop")
    add.add_argument(
        "--role",
        default=KeyRole.INFER.value,
        choices=[role.value for role in KeyRole],
        help="infer: may generate (default); admin: may also see the node and change it",
    )
    _action(actions, "list", "show the names and roles of all keys")
    remove = _action(actions, "remove", "take a key away; it ends to count within a second")
    remove.add_argument("name", metavar="NAME", help="the name of the key")


def run(options: argparse.Namespace) -> int | None:
    """Run one of these commands and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    if options.command not in ("key", "ca"):
        return None
    folder = data_dir_of(options)
    match "ca" if options.command == "ca" else options.action:
        case "ca":
            pem = _authority(folder)
            _show({"pem": pem}, pem.rstrip(), as_json=options.json)
        case "add":
            key = add_key(folder, options.name, KeyRole(options.role), time.time())
            fields = {"name": options.name, "role": options.role, "key": key}
            _show(fields, key, as_json=options.json)
            if not options.json:  # beside stdout, which a script keeps
                steps = _how_to_use(folder, options.data_dir)
                print(f"the key of {options.name}, shown this once; {steps}", file=sys.stderr)
        case "remove":
            remove_key(folder, options.name)
            said = f"the key of {options.name} is removed; a running node refuses it within 1 s"
            _show({"name": options.name}, said, as_json=options.json)
        case _:
            _list(folder, as_json=options.json)
    return 0


def _authority_file(folder: Path) -> Path:
    # Imported here: X.509 takes longer to import than `kakeya status` to answer.
    from kakeya.fleet.identity.identity import AUTHORITY, FOLDER

    return folder / FOLDER / AUTHORITY


def _authority(folder: Path) -> str:
    path = _authority_file(folder)
    try:
        return path.read_text("ascii")
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem.strerror or problem}; a node gets it with kakeya "
            "init or kakeya join TOKEN"
        ) from problem


def _how_to_use(folder: Path, named: str) -> str:
    """The lines by which a laptop uses the node of a folder, and what that node lacks for it.

    `named` is the folder as the command line gave it, "" = it is the usual one.
    """
    running = find_running(folder)
    address = running.http if running else ListenConfig().http
    # From a clone, no shell that ssh begins finds the program by its name.
    program = [str(Path(sys.executable).with_name("kakeya")), "ca"]
    command = shlex.join([*program, *(["--data-dir", str(folder.resolve())] if named else [])])
    host, port = f"{host_label()}.local", split_address(address)[1]
    lacks = []
    if not _authority_file(folder).exists():
        lacks.append("start a fleet with kakeya init, or join one")
    if is_loopback(address):
        lacks.append(
            f"start the node with --http 0.0.0.0:{port}, else it serves this machine alone"
        )
    return (
        "".join(f"{step}; " for step in lacks) + f"on the other machine:\n"
        f"  ssh {host} {command} > kakeya-ca.pem\n"
        f"  export OPENAI_BASE_URL=https://{host}:{port}/v1 OPENAI_API_KEY=KEY\n"
        "  export SSL_CERT_FILE=$PWD/kakeya-ca.pem       # Python\n"
        "  export NODE_EXTRA_CA_CERTS=$PWD/kakeya-ca.pem # Node\n"
        '  curl --cacert kakeya-ca.pem -H "Authorization: Bearer $OPENAI_API_KEY" '
        "$OPENAI_BASE_URL/models"
    )


def _list(folder: Path, *, as_json: bool) -> None:
    keys = read_keys(folder)
    lines = [
        f"{one.name:<20} {one.role:<6} "
        f"since {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.made_at))}"
        for one in keys
    ]
    fields = [{"name": one.name, "role": one.role, "made_at": one.made_at} for one in keys]
    none = "no keys; make one with kakeya key add NAME"
    _show({"keys": fields}, "\n".join(lines) or none, as_json=as_json)


def _action(actions: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_data_dir(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    return action


def _show(fields: dict[str, object], text: str, *, as_json: bool) -> None:
    print(json.dumps(fields) if as_json else text)
