"""`kakeya connect`: write, print or take back the configuration by which a client uses a node.

The file as it was stays beside it, as FILE.kakeya-backup; where there was none, the empty
FILE.kakeya-made says so. Either says that the client is connected; `--undo` removes it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kakeya.cli.connect.clients import CLIENTS, NO_KEY, AgentProgram, NodeTarget, openai_variables
from kakeya.cli.connect.edit import Edit, Uneditable
from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.node_api import NodeApi, find_node
from kakeya.core.errors import (
    ConfigError,
    Conflict,
    InvalidArgument,
    KakeyaError,
    NotFound,
    PeerUnavailable,
)
from kakeya.core.files import write_atomically

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_OPENAI = "openai"
_ANY_TOKENS = 1 << 20
"""A context of which every client is told, so that all that is told is taken back."""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    text = "make a program of agents use a node: its address, model and key"
    connect = commands.add_parser("connect", help=text, description=text, allow_abbrev=False)
    names = [*CLIENTS, _OPENAI]
    connect.add_argument(
        "client",
        choices=names,
        metavar="CLIENT",
        help=f"{', '.join(names)}; the last prints variables for all others",
    )
    connect.add_argument(
        "--node",
        default="",
        metavar="HOST:PORT",
        help="HTTP address of a node, or https://HOST:PORT (default: that of --data-dir)",
    )
    add_data_dir(connect)
    connect.add_argument("--model", default="", metavar="ID", help="default: the node's first")
    connect.add_argument(
        "--key", default="", metavar="KEY", help="an API key (default: $KAKEYA_API_KEY, or none)"
    )
    connect.add_argument("--home", default="", metavar="DIR", help="instead of your home folder")
    way = connect.add_mutually_exclusive_group()
    way.add_argument("--print", action="store_true", help="print the configuration, write nothing")
    way.add_argument("--undo", action="store_true", help="give the file back as it was")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    if options.command != "connect":
        return None
    if options.client == _OPENAI:
        _openai(options)
        return 0
    client = CLIENTS[options.client]
    # Variables name folders of the person at the terminal, not of another home.
    home, environ = (Path(options.home), {}) if options.home else (Path.home(), dict(os.environ))
    file = config_file(client, home, environ)
    if options.undo:
        disconnect(client, file)
        print(f"what kakeya connect wrote is taken out of {file} again")
        return 0
    edit = client.edit(_target(options))
    if options.print:
        print(f"# {file}\n{edit.snippet()}", end="")
        return 0
    connect_file(client, file, edit)
    undo = f"kakeya connect {client.name} --undo"
    if options.home:
        undo += f" --home {shlex.quote(options.home)}"
    print(f"{file} written; start {client.program}, or take it back: {undo}")
    return 0


def config_file(client: AgentProgram, home: Path, environ: Mapping[str, str]) -> Path:
    """The file that is changed: what a link leads to, so that the link stays one.

    Raises ConfigError for a home folder that does not exist.
    """
    if not home.is_dir():
        raise ConfigError(f"there is no folder {home}; --home names one that is there")
    return client.config_file(home, environ).resolve()


def connect_file(client: AgentProgram, file: Path, edit: Edit) -> None:
    """Put an edit into a file in place of an earlier one, and keep the file as it was before.

    Raises Conflict when the file cannot be edited.
    """
    before = _before(client, file)
    try:
        edited = edit.apply(before)
    except Uneditable as fault:
        raise Conflict(
            f"{file} cannot be changed: {fault}; it is as it was. kakeya connect {client.name} "
            "--print shows what to put into it"
        ) from fault
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_made = _made(file).exists() or not file.exists()
        if is_made and not _backup(file).exists():
            _write(_made(file), "", like=file)
        else:
            _write(_backup(file), before, like=file)
        _write(file, edited, like=file)
    except OSError as fault:
        raise KakeyaError(f"{file} cannot be written: {fault.strerror}") from fault


def disconnect(client: AgentProgram, file: Path) -> None:
    """Take an edit out of a file; changes that were made since then stay.

    Raises NotFound when there is none, Conflict when the file cannot be read.
    """
    if not _backup(file).exists() and not _made(file).exists():
        raise NotFound(f"{file} was not changed by kakeya connect {client.name}")
    before = _before(client, file)
    try:
        if _made(file).exists() and not before.strip():
            file.unlink(missing_ok=True)
        else:
            _write(file, before, like=file)
        _backup(file).unlink(missing_ok=True)
        _made(file).unlink(missing_ok=True)
    except OSError as fault:
        raise KakeyaError(f"{file} cannot be written: {fault.strerror}") from fault


def _before(client: AgentProgram, file: Path) -> str:
    """The text of a file without an earlier edit."""
    kept = _read(_backup(file)) if _backup(file).exists() else ""
    is_connected = _backup(file).exists() or _made(file).exists()
    if not file.exists():
        return kept
    text = _read(file)
    if not is_connected:
        return text
    try:
        return client.edit(
            NodeTarget(url="", model="", key="", context_tokens=_ANY_TOKENS)
        ).restore(text, kept)
    except Uneditable as fault:
        raise Conflict(
            f"{file} cannot be read: {fault}. {_backup(file).name} beside it holds what it was "
            "before kakeya connect"
        ) from fault


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as fault:
        raise Conflict(f"{file} is not UTF-8; it stays as it is") from fault
    except OSError as fault:
        raise KakeyaError(f"{file} cannot be read: {fault.strerror}") from fault


def _write(file: Path, text: str, *, like: Path) -> None:
    """Write a file that only its owner reads, as it holds a key, or those who could read it."""
    mode = like.stat().st_mode if like.exists() else None
    write_atomically(file, text.encode())
    if mode is not None:
        file.chmod(mode & 0o777)


def _backup(file: Path) -> Path:
    return file.with_name(f"{file.name}.kakeya-backup")


def _made(file: Path) -> Path:
    return file.with_name(f"{file.name}.kakeya-made")


def _openai(options: argparse.Namespace) -> None:
    if options.undo:
        print("unset OPENAI_BASE_URL OPENAI_API_KEY")
        return
    for name, value in openai_variables(_target(options)).items():
        print(f"export {name}={shlex.quote(value)}")
    if sys.stdout.isatty():
        print('# a shell takes them by: eval "$(kakeya connect openai)"', file=sys.stderr)


def _target(options: argparse.Namespace) -> NodeTarget:
    """The node and its model. Raises KakeyaError."""
    key = options.key or os.environ.get("KAKEYA_API_KEY") or ""
    if not key.isprintable() or not key.isascii() or " " in key:
        raise InvalidArgument("the key has a character that no HTTP header holds; see kakeya key")
    folder = data_dir_of(options)
    node = find_node(options.node, folder, key)
    url = f"{'https' if node.is_encrypted else 'http'}://{node.address}"
    target = NodeTarget(url=url, model=options.model, key=key or NO_KEY)
    try:
        return _told(node, target)
    except PeerUnavailable as gone:
        if not options.model:
            raise
        print(f"kakeya: {gone.message}; its model is taken from --model", file=sys.stderr)
        return target


def _told(node: NodeApi, target: NodeTarget) -> NodeTarget:
    """The target with what the node says of its model; its first one where none is named."""
    listed = node.get("/v1/models").get("data")
    models = {str(one["id"]): one for one in listed} if isinstance(listed, list) else {}
    if not models:
        raise NotFound(f"the node at {node.address} serves no model; start it with --model")
    name = target.model or next(iter(models))
    # An adapter is served as MODEL:ADAPTER; the list has the models.
    model = models.get(name) or models.get(name.partition(":")[0])
    if model is None:
        raise NotFound(f"{node.address} does not serve {name!r}; it serves {', '.join(models)}")
    context = model.get("context_length")
    return replace(target, model=name, context_tokens=context if isinstance(context, int) else 0)
