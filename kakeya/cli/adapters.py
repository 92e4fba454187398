"""`kakeya adapters`: add, list and remove LoRA adapters of the node in a data directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.core.units import format_bytes

if TYPE_CHECKING:  # gRPC takes longer to import than most commands to answer
    from kakeya.v1.adapters_pb2 import AdapterInfo
    from kakeya.v1.adapters_pb2_grpc import AdapterServiceStub

_TIMEOUT_S = 120.0
"""The limit for an answer: the node reads and packs a large adapter before it answers."""
Answer = TypeVar("Answer")
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    text = "LoRA adapters, which callers use as models BASE:NAME"
    adapters = commands.add_parser("adapters", help=text, description=text, allow_abbrev=False)
    actions = adapters.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(actions, "add", "add an adapter from a folder that mlx_lm.lora wrote")
    add.add_argument("name", metavar="NAME", help="callers use it as BASE:NAME")
    add.add_argument("--base", required=True, metavar="MODEL", help="the model it was trained on")
    add.add_argument("--path", required=True, metavar="DIR", help="the folder")
    add.add_argument(
        "--owner",
        default="",
        metavar="CLIENT",
        help="the only client that may use it (default: all)",
    )
    add.add_argument("--exact", action="store_true", help="keep exact values (default: int8)")
    add.add_argument("--replace", action="store_true", help="replace the adapter of this name")
    _action(actions, "list", "list the adapters, where each one is, and how much it is used")
    remove = _action(actions, "remove", "remove an adapter; running requests go on")
    remove.add_argument("name", metavar="NAME", help="BASE:NAME, or NAME if only one base has it")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    if options.command != "adapters":
        return None
    folder = data_dir_of(options)
    match options.action:
        case "add":
            return _add(folder, options)
        case "list":
            return _list(folder, as_json=options.json)
        case _:
            return _remove(folder, options.name, as_json=options.json)


def _action(actions: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_data_dir(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    return action


def _add(folder: Path, options: argparse.Namespace) -> int:
    from kakeya.v1.adapters_pb2 import RegisterAdapterRequest

    asked = RegisterAdapterRequest(
        name=options.name,
        base=options.base,
        folder=str(Path(options.path).expanduser().absolute()),
        owner=options.owner,
        exact=options.exact,
        replace=options.replace,
    )
    made = _ask(folder, lambda node: node.RegisterAdapter(asked, timeout=_TIMEOUT_S)).adapter
    if options.json:
        print(json.dumps(_json(made)))
    else:
        whose = f", for {made.owner} alone" if made.owner else ""
        print(
            f"added {made.model_id}: rank {made.rank}, {made.precision}, "
            f"{format_bytes(made.packed_bytes)}{whose}"
        )
        print(f'use it as the model "{made.model_id}"', file=sys.stderr)
    return 0


def _list(folder: Path, *, as_json: bool) -> int:
    from kakeya.v1.adapters_pb2 import ListAdaptersRequest

    asked = ListAdaptersRequest()
    found = _ask(folder, lambda node: node.ListAdapters(asked, timeout=_TIMEOUT_S)).adapters
    if as_json:
        print(json.dumps([_json(adapter) for adapter in found]))
        return 0
    if not found:
        print("no adapters; kakeya adapters add NAME --base MODEL --path DIR", file=sys.stderr)
    width = max((len(adapter.model_id) for adapter in found), default=0)
    for adapter in found:
        if not adapter.tier:
            print(f"{adapter.model_id:<{width}}  {adapter.problem}")
            continue
        whose = f"  of {adapter.owner}" if adapter.owner else ""
        print(
            f"{adapter.model_id:<{width}}  {adapter.tier:<4}  rank {adapter.rank:<3} "
            f"{adapter.precision:<5}  {format_bytes(adapter.packed_bytes):>9}  "
            f"{adapter.uses} in the last minute{whose}"
        )
        if adapter.problem:
            print(f"  {adapter.problem}")
    return 0


def _remove(folder: Path, name: str, *, as_json: bool) -> int:
    from kakeya.v1.adapters_pb2 import RemoveAdapterRequest

    asked = RemoveAdapterRequest(model_id=name)
    gone = _ask(folder, lambda node: node.RemoveAdapter(asked, timeout=_TIMEOUT_S)).adapter
    print(json.dumps(_json(gone)) if as_json else f"removed {gone.model_id}")
    return 0


def _json(adapter: AdapterInfo) -> dict[str, object]:
    return {field.name: getattr(adapter, field.name) for field in adapter.DESCRIPTOR.fields}


def _ask(folder: Path, call: Callable[[AdapterServiceStub], Answer]) -> Answer:
    """Call the socket of the node in a folder. Raises the node's refusal, without a prefix."""
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.adapters_pb2_grpc import AdapterServiceStub

    return ask_node(folder, AdapterServiceStub, call, timeout_s=_TIMEOUT_S)
