"""Commands of a fleet: init, invite, join, revoke; drain; and pressure, by which a host warns its
node.

`init` and `join` write the identity of the node in a data directory while no node runs there; the
other commands go to the node that runs there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.service.drain import MOST_PATIENCE_S, PATIENCE_S, drain
from kakeya.cli.show.labels import NodeLabels
from kakeya.core.errors import InvalidArgument
from kakeya.core.host import host_label
from kakeya.core.units import MIB
from kakeya.node.datadir import DataDir

if TYPE_CHECKING:  # gRPC and X.509 take longer to import than `kakeya status` to answer
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub

_TIMEOUT_S = 10.0
_MOST_MB = 1 << 30
_ROLES = ("member", "client", "admin")
Answer = TypeVar("Answer")
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands to those of `kakeya`."""
    init = _command(commands, "init", "start a fleet; this machine becomes its authority")
    init.add_argument("--label", default="", metavar="NAME", help="default: the host's name")
    invite = _command(
        commands, "invite", "print a token that lets one machine join, within 15 minutes"
    )
    invite.add_argument(
        "--role",
        default="member",
        choices=_ROLES,
        help="member: a node (default); client: may generate; admin: may do everything",
    )
    join = _command(commands, "join", "join the fleet of a token")
    join.add_argument(
        "token",
        metavar="TOKEN",
        help="the line that `kakeya invite` printed; - reads it from stdin",
    )
    join.add_argument("--label", default="", metavar="NAME", help="default: the host's name")
    revoke = _command(commands, "revoke", "remove a node from the fleet for good")
    revoke.add_argument("node", metavar="NODE", help="its label, its id, or the start of its id")
    drain = _command(commands, "drain", "have the node take nothing new, end what runs, and stop")
    drain.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="after so long it stops though requests run (default: %(default)g)",
    )
    drain.add_argument(
        "--until-replaced",
        action="store_true",
        help="keep the HTTP port until a kakeya-node that is started meanwhile has taken it",
    )
    pressure = _command(
        commands, "pressure", "tell the node how short of memory the machine is, for a minute"
    )
    pressure.add_argument(
        "level", metavar="LEVEL", help="nominal, low, critical, or the system's own word"
    )
    pressure.add_argument(
        "--free-mb", type=int, default=0, metavar="MB", help="memory that models may still take"
    )


def run(options: argparse.Namespace) -> int | None:
    """Run one of these commands and return its exit status; None for any other command.

    Raises KakeyaError.
    """
    folder = data_dir_of(options)
    match options.command:
        case "init":
            return _init(folder, options.label or host_label(), as_json=options.json)
        case "invite":
            return _invite(folder, options.role, as_json=options.json)
        case "join":
            return _join(folder, options.token, options.label or host_label(), as_json=options.json)
        case "revoke":
            return _revoke(folder, options.node, as_json=options.json)
        case "drain":
            return _drain(
                folder,
                options.patience,
                until_replaced=options.until_replaced,
                as_json=options.json,
            )
        case "pressure":
            return _pressure(folder, options.level, options.free_mb, as_json=options.json)
        case _:
            return None


def _command(commands: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_data_dir(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _init(folder: Path, label: str, *, as_json: bool) -> int:
    from kakeya.fleet.identity.authority import create_fleet

    with DataDir(folder):
        identity = create_fleet(folder, label, time.time())
    _show(
        {"fleet": identity.fleet, "node_id": identity.node_id, "label": identity.label},
        f"fleet {identity.fleet} started; this machine, {identity.label}, is its authority\n"
        f"its id begins with {NodeLabels().of(identity.node_id)}\n"
        "next: start kakeya-node here, then run `kakeya invite` for each machine that joins",
        as_json=as_json,
    )
    return 0


def _join(folder: Path, token: str, label: str, *, as_json: bool) -> int:
    from kakeya.core.clock import SystemClock
    from kakeya.fleet.identity.join_client import join
    from kakeya.wire.security import CertRole

    if token == "-":  # keeps the token out of the list of processes
        token = sys.stdin.readline()
    with DataDir(folder):
        joined = asyncio.run(join(folder, token, label, clock=SystemClock(), is_typed=True))
    identity = joined.identity
    is_node = identity.role is not CertRole.CLIENT
    after = "start kakeya-node here" if is_node else "name this folder in kakeya.Client"
    what = "joined" if joined.is_new else "is a member already of"
    _show(
        {
            "fleet": identity.fleet,
            "node_id": identity.node_id,
            "label": identity.label,
            "role": identity.role.value,
            "peers": list(joined.peers),
            "is_new": joined.is_new,
        },
        f"{identity.label} {what} fleet {identity.fleet} as {identity.role}\n"
        f"its id begins with {NodeLabels().of(identity.node_id)}\nnext: {after}",
        as_json=as_json,
    )
    return 0


def _invite(folder: Path, role: str, *, as_json: bool) -> int:
    from kakeya.v1.fleet_pb2 import InviteRequest

    made = _ask(folder, lambda node: node.Invite(InviteRequest(role=role), timeout=_TIMEOUT_S))
    minutes = max(1, round((made.expires_at_unix - time.time()) / 60))
    _show(
        {"token": made.token, "expires_at": made.expires_at_unix, "role": role},
        made.token,
        as_json=as_json,
    )
    if not as_json:
        hint = f"valid for one {role} and {minutes} minutes; on the new machine: kakeya join TOKEN"
        print(hint, file=sys.stderr)
    return 0


def _revoke(folder: Path, node: str, *, as_json: bool) -> int:
    from kakeya.v1.fleet_pb2 import RevokeRequest

    made = _ask(folder, lambda stub: stub.Revoke(RevokeRequest(node=node), timeout=_TIMEOUT_S))
    short = NodeLabels().of(made.node_id)
    named = short if made.node_id.startswith(node) else f"{node} ({short})"
    _show(
        {"node_id": made.node_id, "version": made.version},
        f"revoked {named}; the nodes of the fleet learn it by gossip, within seconds",
        as_json=as_json,
    )
    return 0


def _drain(folder: Path, patience_s: float, *, until_replaced: bool, as_json: bool) -> int:
    if not 0 < patience_s <= MOST_PATIENCE_S:
        raise InvalidArgument(
            f"--patience is {patience_s:g}; above 0 and at most {MOST_PATIENCE_S:g} is needed"
        )

    def tell(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr)

    end = drain(folder, patience_s, until_replaced=until_replaced, tell=tell)
    _show(
        {"cut_off": end.requests, "seconds": round(end.seconds, 1)},
        f"drained in {end.seconds:.1f} s, {end.requests} requests were cut off; the node stops",
        as_json=as_json,
    )
    return 0


def _pressure(folder: Path, level: str, free_mb: int, *, as_json: bool) -> int:
    from kakeya.v1.fleet_pb2 import DispatchPressureRequest

    if not 0 <= free_mb <= _MOST_MB:
        raise InvalidArgument(f"--free-mb is {free_mb}; 0 to {_MOST_MB} is needed")
    told = DispatchPressureRequest(level=level, free_bytes=free_mb * MIB)
    answer = _ask(folder, lambda node: node.DispatchPressure(told, timeout=_TIMEOUT_S))
    _show(
        {"level": level, "level_before": answer.level_before},
        f"told {level}; before it was {answer.level_before}. `kakeya status` shows what follows",
        as_json=as_json,
    )
    return 0


def _ask(folder: Path, call: Callable[[ControlServiceStub], Answer]) -> Answer:
    """Call the socket of the node in a folder. Raises the node's refusal, without a prefix."""
    from kakeya.cli.owner_call import ask_node
    from kakeya.v1.fleet_pb2_grpc import ControlServiceStub

    return ask_node(folder, ControlServiceStub, call, timeout_s=_TIMEOUT_S)


def _show(fields: dict[str, object], text: str, *, as_json: bool) -> None:
    print(json.dumps(fields) if as_json else text)
