"""The command line beside the daemon: status, plan, generate, explain, demo, doctor, and others.

Each command finds the node that runs in the data directory. Status, plan, generate, explain,
config, ring, jobs and bench also take `--node HOST:PORT` or `--node https://HOST:PORT`, the address
of a node's HTTP interface, and send the API key in KAKEYA_API_KEY, if there is one; the others act
as the owner of a node, on its own machine. Exit status: 0 done, 1 the node refused or does not run,
2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn
from urllib.parse import quote

from kakeya.cli import adapters as adapter_cli
from kakeya.cli import cache as cache_cli
from kakeya.cli import config as config_cli
from kakeya.cli import fleet as fleet_cli
from kakeya.cli import jobs as job_cli
from kakeya.cli import keys as key_cli
from kakeya.cli import logs, ring_groups, version
from kakeya.cli import models as model_cli
from kakeya.cli import ring as ring_cli
from kakeya.cli.bench import command as bench_cli
from kakeya.cli.connect import command as connect_cli
from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.leases import commands as lease_cli
from kakeya.cli.node_api import KEY_VARIABLE, NodeApi, find_node
from kakeya.cli.service import command as service_cli
from kakeya.cli.service import restart, update
from kakeya.cli.show.labels import NodeLabels, labels_in, labels_of
from kakeya.cli.talk import chat, generate
from kakeya.core.errors import ConfigError, KakeyaError
from kakeya.core.settings import nearest
from kakeya.core.units import printable

_WATCH_S = 1.0
DOCTOR = "find faults of this node, its peers and the network between them"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    whole = parser()
    if not (sys.argv[1:] if argv is None else argv):
        whole.print_help()
        return 2
    options = whole.parse_args(argv)
    try:
        return _run(options)
    except ConfigError as wrong:
        _complain(wrong)
        return 2
    except KakeyaError as failed:
        _complain(failed)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the pipe has closed it; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(problem: KakeyaError) -> None:
    lines = NodeLabels().within(problem.message).splitlines() or [""]
    print("kakeya: " + "\n  ".join(map(printable, lines)), file=sys.stderr)


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "completion":
            return _complete(options.shell)
        case "demo":
            from kakeya.cli.demo import run_demo

            return run_demo(as_json=options.json)
        case "doctor":
            from kakeya.cli import doctor

            return doctor.run(options, data_dir_of(options))
        case "bench":
            return bench_cli.run(options, data_dir_of(options))
        case "lease":
            return lease_cli.run(options)
    for run in _OWNERS:
        status = run(options)
        if status is not None:
            return status
    key = os.environ.get(KEY_VARIABLE, "")
    return _ask(find_node(options.node, data_dir_of(options), key), options)


_OWNERS: tuple[Callable[[argparse.Namespace], int | None], ...] = (
    fleet_cli.run,
    adapter_cli.run,
    model_cli.run,
    cache_cli.run,
    key_cli.run,
    ring_groups.run,
    connect_cli.run,
    logs.run,
    version.run,
    restart.run,
    service_cli.run,
    update.run,
)
"""Commands for the owner of a node, on its machine."""


def _ask(node: NodeApi, options: argparse.Namespace) -> int:
    """Run a command that asks a node over HTTP."""
    match options.command:
        case "status":
            return _status(node, as_json=options.json, watch=options.watch)
        case "plan":
            return _plan(node, as_json=options.json)
        case "explain":
            return _explain(node, options.request_id, as_json=options.json)
        case "config":
            return config_cli.run(node, options.action, as_json=options.json)
        case "ring":
            return ring_cli.run(node, options)
        case "jobs":
            return job_cli.run(node, options.action, options.job_id, as_json=options.json)
        case "chat":
            return chat.run(node, options)
        case _:
            return generate.run(node, options)


class _Parser(argparse.ArgumentParser):
    """Takes options between optional words too: `jobs show --data-dir DIR JOB`.

    argparse alone gives all optional words their defaults at the first one.
    """

    _is_between = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's own, which `parse_known_intermixed_args` calls once for each kind."""
        if self._is_between:
            return super().parse_known_args(args, namespace)
        optional = any(action.nargs in ("?", "*") for action in self._get_positional_actions())
        self._is_between = optional
        try:
            parse = self.parse_known_intermixed_args if optional else super().parse_known_args
            found, unknown = parse(args, namespace)
        finally:
            self._is_between = False
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def _unknown(self, arguments: Sequence[str]) -> str:
        """What is wrong with arguments that the command does not take."""
        first = arguments[0].partition("=")[0]
        if not first.startswith("-"):
            return f"unexpected: {' '.join(arguments)}"
        if first == "--node":
            return "no option --node here: the command acts as the owner of this machine's node"
        return f"no option {first}{nearest(first, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.metavar == "COMMAND" and action.choices and value not in action.choices:
            near = nearest(value, map(str, action.choices))
            raise argparse.ArgumentError(None, f"no command {value!r}{near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kakeya: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    whole = _Parser(prog="kakeya", description=__doc__, allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = _command(commands, "status", "show the node's models, memory and peers")
    status.add_argument("--watch", action="store_true", help="show it again every second")
    _command(commands, "plan", "show which nodes would verify and draft, and why")
    explain = _command(commands, "explain", "tell what of a request's prompt was cached, and why")
    explain.add_argument("request_id", metavar="REQUEST", help="x-request-id of its answer")
    config = _command(commands, "config", "show the settings that are live, or read the file again")
    config.add_argument("action", nargs="?", default="show", choices=("show", "reload"))
    jobs = _command(commands, "jobs", "list the jobs of slow work, show or cancel one")
    jobs.add_argument("action", nargs="?", default="list", choices=("list", "show", "cancel"))
    jobs.add_argument("job_id", nargs="?", default="", metavar="JOB", help="id of a job")
    generate.add_options(_command(commands, "generate", "continue a text, streamed to stdout"))
    chat.add_options(_command(commands, "chat", "talk with a model; /help shows what it can do"))
    text = "measure a model at this node, keep and compare the results"
    bench_cli.add_options(_command(commands, "bench", text))
    demo = commands.add_parser("demo", help="two nodes on this machine, four ways to draft")
    demo.add_argument("--json", action="store_true", help="print one JSON object, no table")
    fleet_cli.add_parsers(commands)
    adapter_cli.add_parsers(commands)
    model_cli.add_parsers(commands)
    cache_cli.add_parsers(commands)
    lease_cli.add_parsers(commands)
    key_cli.add_parsers(commands)
    ring_cli.add_parsers(commands)
    connect_cli.add_parsers(commands)
    logs.add_parsers(commands)
    version.add_parsers(commands)
    restart.add_parsers(commands)
    service_cli.add_parsers(commands)
    update.add_parsers(commands)
    text = "print what a shell needs to complete these commands"
    completion = commands.add_parser("completion", help=text, description=text)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    doctor = commands.add_parser(
        "doctor",
        help=DOCTOR,
        description=f"{DOCTOR}; exit status 0 without a fault, 1 with one",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "peer", nargs="?", default="", metavar="PEER", help="label, node id or HOST:PORT (all)"
    )
    add_data_dir(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return whole


def _complete(shell: str) -> int:
    try:
        import shtab
    except ImportError as missing:
        raise ConfigError(f"{missing}; install it: {sys.executable} -m pip install shtab") from None
    print(shtab.complete(parser(), shell=shell))
    return 0


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.add_argument(
        "--node",
        default="",
        metavar="HOST:PORT",
        help="HTTP address of a node, or https://HOST:PORT",
    )
    add_data_dir(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _status(node: NodeApi, *, as_json: bool, watch: bool) -> int:
    def print_json(seen: Mapping[str, object]) -> None:
        print(json.dumps(seen), flush=True)

    show: Callable[[Mapping[str, object]], None] = print_json
    with ExitStack() as stack:
        if not as_json:
            from kakeya.cli.show.display import show_status, watched_status
            from kakeya.cli.show.tables import stdout_console

            show = stack.enter_context(watched_status(stdout_console())) if watch else show_status
        while True:
            show(node.get("/api/v1/status"))
            if not watch:
                return 0
            time.sleep(_WATCH_S)


def _plan(node: NodeApi, *, as_json: bool) -> int:
    fleet = node.get("/api/v1/fleet")
    plan, nodes = fleet.get("plan"), fleet.get("nodes")
    if not isinstance(plan, dict):
        raise KakeyaError(f"{node.address} gives no plan; is it a Kakeya node of this version?")
    if as_json:
        print(json.dumps(plan))
    else:
        from kakeya.cli.show.display import show_plan

        labels = labels_in(nodes if isinstance(nodes, list) else ())
        show_plan(json.loads(labels.within(json.dumps(plan))))
    return 0 if plan.get("placement") else 1


def _explain(node: NodeApi, request_id: str, *, as_json: bool) -> int:
    from kakeya.cli.explain import explanation

    found = node.get(f"/api/v1/requests/{quote(request_id, safe='')}")
    if as_json:
        print(json.dumps(found))
    else:
        labels = labels_of(node) if found.get("routes") else NodeLabels()
        print(labels.within("\n".join(explanation(found))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
