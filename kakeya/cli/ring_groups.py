"""`kakeya ring up`, `down` and `status`: groups that share a model too large for one machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlencode

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.node_api import KEY_VARIABLE, find_node
from kakeya.core.errors import InvalidArgument, Refused
from kakeya.core.figures import Json
from kakeya.core.units import printable

if TYPE_CHECKING:  # gRPC takes longer to import than `kakeya status` to answer
    from kakeya.backends.ring.spec import RingSpec

_UP_S = 3600.0
_DOWN_S = 60.0
_LIST_S = 10.0
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_verbs(actions: argparse._SubParsersAction[Parser]) -> None:
    """Add the verbs to those of `kakeya ring`."""
    up = _action(actions, "up", "bring up a group of nodes that share a model, and keep it up")
    up.add_argument("model", metavar="MODEL", help="as of `kakeya-node --model`")
    up.add_argument(
        "--nodes",
        default="",
        metavar="A,B",
        help="labels or ids, from rank 0 on, which leads (default: as `kakeya ring plan` has it)",
    )
    up.add_argument(
        "--split", default="", choices=("tensor", "pipeline"), help="default: tensor, or as planned"
    )
    up.add_argument("--layers", default="", metavar="N,N", help="of each node, in a pipeline")
    up.add_argument("--lend-mb", default="", metavar="MB,MB", help="in place of an estimate")
    up.add_argument("--name", default="", metavar="ID", help="what clients call it")
    down = _action(actions, "down", "end a group, and give its memory back on every node")
    down.add_argument("name", metavar="GROUP", help="its name, as `kakeya ring status` has it")
    _action(actions, "status", "show the groups of the fleet")


def run(options: argparse.Namespace) -> int | None:
    """Run one of these verbs and return its exit status; None for any other command. Raises
    KakeyaError."""
    if options.command != "ring":
        return None
    folder = data_dir_of(options)
    match options.verb:
        case "up":
            spec = _spec(options) if options.nodes else _planned(options, folder)
            return _up(folder, spec, as_json=options.json)
        case "down":
            return _down(folder, options.name, as_json=options.json)
        case "status":
            return _status(folder, as_json=options.json)
        case _:
            return None


def _action(actions: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_data_dir(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    return action


def _spec(options: argparse.Namespace) -> RingSpec:
    from kakeya.backends.ring.spec import RingSeat, RingSpec, group_name

    nodes = [node.strip() for node in options.nodes.split(",")]
    layers = _numbers("--layers", options.layers, len(nodes))
    lend_mb = _numbers("--lend-mb", options.lend_mb, len(nodes))
    source = _source(options.model)
    spec = RingSpec(
        name=options.name or group_name(source),
        source=source,
        split=options.split or "tensor",
        seats=tuple(
            RingSeat(node=node, layers=layer, lend_bytes=mb << 20)
            for node, layer, mb in zip(nodes, layers, lend_mb, strict=True)
        ),
    )
    spec.check()
    return spec


def _source(model: str) -> str:
    """A folder by its whole path; any other name as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _planned(options: argparse.Namespace, folder: Path) -> RingSpec:
    """The group that the node plans. Raises Refused where it plans none."""
    from kakeya.backends.ring.spec import RingSeat, RingSpec, group_name

    if options.layers or options.lend_mb:
        raise InvalidArgument("--layers and --lend-mb are for --nodes; without it a plan says them")
    source = _source(options.model)
    asked = {"model": source, "split": options.split}
    path = urlencode({name: said for name, said in asked.items() if said})
    node = find_node("", folder, os.environ.get(KEY_VARIABLE, ""))
    plan = node.get(f"/api/v1/ring/plan?{path}")
    if plan["reason_refused"]:
        raise Refused(f"no ring group for {options.model}: {plan['reason_refused']}")
    split = str(plan["split"])
    members = cast("list[Mapping[str, Any]]", plan["members"])
    return RingSpec(
        name=options.name or group_name(source),
        source=source,
        split=split,
        seats=tuple(
            RingSeat(
                node=one["node_id"],
                lend_bytes=one["lend_mb"] << 20,
                layers=one["layers"] if split == "pipeline" else 0,
            )
            for one in members
        ),
    )


def _numbers(flag: str, text: str, count: int) -> Sequence[int]:
    if not text:
        return [0] * count
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdecimal() for part in parts):
        raise InvalidArgument(f"{flag} is {text!r}; {count} nodes need {count} numbers, as 20,12")
    return [int(part) for part in parts]


def _up(folder: Path, spec: RingSpec, *, as_json: bool) -> int:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.ring_pb2 import RaiseGroupRequest
    from kakeya.v1.ring_pb2_grpc import RingServiceStub

    said = ""

    def follow(stub: RingServiceStub) -> Json:
        nonlocal said
        told: Json = {}
        for report in stub.RaiseGroup(RaiseGroupRequest(group=spec.to_wire()), timeout=_UP_S):
            if report.group_json:
                told = json.loads(report.group_json)
                line = _progress(told)
                if line != said and not as_json:
                    print(printable(line), file=sys.stderr, flush=True)
                said = line
        return told

    told = ask_node(folder, RingServiceStub, follow, timeout_s=_UP_S)
    print(json.dumps(told) if as_json else "\n".join(map(printable, _lines(told))))
    return 0


def _down(folder: Path, name: str, *, as_json: bool) -> int:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.ring_pb2 import EndGroupRequest
    from kakeya.v1.ring_pb2_grpc import RingServiceStub

    answer = ask_node(
        folder,
        RingServiceStub,
        lambda stub: stub.EndGroup(EndGroupRequest(name=name), timeout=_DOWN_S),
        timeout_s=_DOWN_S,
    )
    if as_json:
        print(json.dumps({"ended": name, "note": answer.note}))
    else:
        print(printable(f"ended {name}" + (f": {answer.note}" if answer.note else "")))
    return 0


def _status(folder: Path, *, as_json: bool) -> int:
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.ring_pb2 import ListGroupsRequest
    from kakeya.v1.ring_pb2_grpc import RingServiceStub

    reply = ask_node(
        folder,
        RingServiceStub,
        lambda stub: stub.ListGroups(ListGroupsRequest(is_for_fleet=True), timeout=_LIST_S),
        timeout_s=_LIST_S,
    )
    groups = json.loads(reply.groups_json)
    if reply.silent:
        silent = printable(", ".join(reply.silent))
        print(f"kakeya: no answer from {silent}; groups led there are not shown", file=sys.stderr)
    if as_json:
        print(json.dumps(groups))
    elif groups:
        print("\n".join(printable(line) for group in groups for line in _lines(group)))
    else:
        print("no ring groups; `kakeya ring up MODEL` brings one up")
    return 0


def _progress(group: Mapping[str, object]) -> str:
    return f"{group['name']}: " + ", ".join(
        f"rank {rank['rank']} on {rank['node']} {rank['load'] or rank['state']}"
        for rank in _ranks(group)
    )


def _lines(group: Mapping[str, object]) -> Sequence[str]:
    answers = f", answers {group['answers']}" if group["answers"] else ""
    retry = f", next try in {group['retry_s']:g} s" if group["retry_s"] is not None else ""
    lines = [
        f"{group['name']}  {group['state']} for {group['seconds']:g} s{answers}{retry}  "
        f"({group['split']}, {group['restarts']} restarts)"
    ]
    if group["reason"]:
        lines.append(f"  last failure: {group['reason']}")
    for rank in _ranks(group):
        layers = f"  {rank['layers']} layers" if rank["layers"] else ""
        lines.append(
            f"  rank {rank['rank']}  {rank['node']}  {rank['memory_mb']} MB{layers}  "
            f"{rank['load'] or rank['state']}"
        )
    return lines


def _ranks(group: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    ranks = group["ranks"]
    return ranks if isinstance(ranks, list) else ()
