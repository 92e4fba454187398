"""`kakeya models`: the models on the disks of the fleet; fetch, find and remove them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.core.errors import KakeyaError, NotFound
from kakeya.core.units import format_bytes, printable

if TYPE_CHECKING:  # gRPC takes longer to import than most commands to answer
    from rich.progress import Progress, TaskID

    from kakeya.v1.weights_pb2 import ModelFilesEntry, PullProgress

_LIST_S = 30.0
_PULL_S = 7 * 24 * 3600.0
_DIGITS = 12
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    text = "models on the disks of this node and its peers"
    models = commands.add_parser("models", help=text, description=text, allow_abbrev=False)
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "list", "list the models here and at peers")
    pull = _action(actions, "pull", "fetch a model from peers, or from the hub where none has it")
    pull.add_argument("name", metavar="MODEL", help="its name in the list, or ORG/NAME of the hub")
    pull.add_argument("--from", dest="from_node", default="", metavar="NODE", help="only from here")
    pull.add_argument("--keep", action="store_true", help="exempt it from clean-ups")
    remove = _action(actions, "rm", "remove a model that a pull brought")
    remove.add_argument("name", metavar="MODEL")
    remove.add_argument("--force", action="store_true", help="even if it is in use or configured")
    where = _action(actions, "where", "tell which nodes have a model")
    where.add_argument("name", metavar="MODEL")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    if options.command != "models":
        return None
    folder = data_dir_of(options)
    match options.action:
        case "pull":
            return _pull(folder, options)
        case "rm":
            return _remove(folder, options)
        case "where":
            return _where(folder, options.name, as_json=options.json)
        case _:
            return _list(folder, as_json=options.json)


def _action(actions: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_data_dir(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    return action


def _listed(folder: Path) -> tuple[list[ModelFilesEntry], dict[str, str]]:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.weights_pb2 import ListModelsRequest
    from kakeya.v1.weights_pb2_grpc import ModelFilesServiceStub

    answer = ask_node(
        folder,
        ModelFilesServiceStub,
        lambda stub: stub.ListModels(ListModelsRequest(), timeout=_LIST_S),
        timeout_s=_LIST_S,
    )
    return list(answer.models), dict(answer.silent)


def _list(folder: Path, *, as_json: bool) -> int:
    models, silent = _listed(folder)
    if as_json:
        print(json.dumps({"models": list(map(_told, models)), "silent": silent}))
        return 0
    from rich.markup import escape

    from kakeya.cli.show.tables import fitting_table, stdout_console

    console = stdout_console()
    headings = ("model", "size", "digest", "here", "peers", "last used")
    table = fitting_table(console, *headings, right=("size",))
    for one in models:
        table.add_row(
            escape(printable(one.name)),
            format_bytes(one.bytes),
            one.digest[:_DIGITS] or "not read yet",
            _here(one),
            escape(printable(", ".join((*one.peers, *(f"{it} (comes)" for it in one.fetching))))),
            _age(one.last_used_unix),
        )
    console.print(table if models else "no models on the disks of this node and its peers")
    for one in models:
        if one.unserved:
            print(printable(f"{one.name} is not served: {one.unserved}"), file=sys.stderr)
    for peer, reason in silent.items():
        print(printable(f"{peer} did not answer: {reason}"), file=sys.stderr)
    return 0


def _where(folder: Path, name: str, *, as_json: bool) -> int:
    models, silent = _listed(folder)
    named = [one for one in models if one.name == name]
    if as_json:
        print(json.dumps({"models": list(map(_told, named)), "silent": silent}))
        return 0 if named else 1
    if not named:
        raise NotFound(f"no node has {name!r}; `kakeya models list` shows what there is")
    for one in named:
        print(f"{one.digest[:_DIGITS] or 'not read yet'}  {format_bytes(one.bytes)}")
        for place in (
            *((f"this node: {one.path}",) if one.path else ()),
            *one.peers,
            *(f"{peer}, which still fetches it" for peer in one.fetching),
        ):
            print(f"  {printable(place)}")
    return 0


def _remove(folder: Path, options: argparse.Namespace) -> int:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.weights_pb2 import RemoveModelRequest
    from kakeya.v1.weights_pb2_grpc import ModelFilesServiceStub

    asked = RemoveModelRequest(name=options.name, force=options.force)
    answer = ask_node(
        folder,
        ModelFilesServiceStub,
        lambda stub: stub.RemoveModel(asked, timeout=_LIST_S),
        timeout_s=_LIST_S,
    )
    if options.json:
        print(json.dumps({"path": answer.path, "freed_bytes": answer.freed_bytes}))
    else:
        print(f"removed {printable(answer.path)}, {format_bytes(answer.freed_bytes)}")
    return 0


def _pull(folder: Path, options: argparse.Namespace) -> int:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.weights_pb2 import PullModelRequest
    from kakeya.v1.weights_pb2_grpc import ModelFilesServiceStub

    asked = PullModelRequest(name=options.name, from_node=options.from_node, keep=options.keep)
    shown = _show_json if options.json else _show_bar

    def follow(stub: ModelFilesServiceStub) -> PullProgress | None:
        last = None
        for last in shown(stub.PullModel(asked, timeout=_PULL_S)):  # noqa: B007
            pass
        return last

    began = time.monotonic()
    last = ask_node(folder, ModelFilesServiceStub, follow, timeout_s=_PULL_S)
    if last is None or last.phase != "done":
        raise KakeyaError(f"the pull of {options.name} ended early; run it again, it goes on")
    if not options.json:
        came, seconds = last.bytes - last.resumed_bytes, max(1e-3, time.monotonic() - began)
        rate = f"{format_bytes(came)} in {seconds:.1f} s, {format_bytes(came / seconds)}/s"
        print(printable(f"{last.path}: {last.note or rate}"))
    return 0


def _show_json(states: Iterator[PullProgress]) -> Iterator[PullProgress]:
    for state in states:
        print(
            json.dumps(
                {
                    "name": state.name,
                    "phase": state.phase,
                    "bytes": state.bytes,
                    "done_bytes": state.done_bytes,
                    "resumed_bytes": state.resumed_bytes,
                    "bytes_per_second": state.bytes_per_second,
                    "sources": list(state.sources),
                    "digest": state.digest,
                    "path": state.path,
                    "note": state.note,
                }
            ),
            flush=True,
        )
        yield state


def _show_bar(states: Iterator[PullProgress]) -> Iterator[PullProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking", total=None, rate="")
        for state in states:
            _advance(bar, task, state)
            yield state


def _advance(bar: Progress, task: TaskID, state: PullProgress) -> None:
    sources = f" from {', '.join(state.sources)}" if state.sources else ""
    said = f"{state.phase}{sources}" + (f": {state.note}" if state.note else "")
    rate = f"{format_bytes(state.bytes_per_second)}/s" if state.bytes_per_second else ""
    bar.update(
        task,
        description=printable(said),
        total=state.bytes or None,
        completed=state.done_bytes,
        rate=rate,
    )


def _here(one: ModelFilesEntry) -> str:
    if not one.path:
        return "no"
    words = ["pulled" if one.is_pulled else "yes"]
    words += ["kept"] if one.is_kept else []
    words += ["loaded"] if one.is_loaded else ["configured"] if one.is_configured else []
    return ", ".join(words)


def _age(used_at: float) -> str:
    if not used_at:
        return ""
    age_s = max(0.0, time.time() - used_at)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def _told(one: ModelFilesEntry) -> dict[str, object]:
    return {
        "name": one.name,
        "bytes": one.bytes,
        "digest": one.digest,
        "path": one.path,
        "is_loaded": one.is_loaded,
        "is_configured": one.is_configured,
        "is_pulled": one.is_pulled,
        "is_kept": one.is_kept,
        "unserved": one.unserved,
        "last_used_unix": one.last_used_unix,
        "peers": list(one.peers),
        "fetching": list(one.fetching),
    }
