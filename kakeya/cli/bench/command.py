"""`kakeya bench`: measure a model at a node, keep the report, show one, compare two."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import kakeya
from kakeya.cli.bench.measure import BenchPlan, NodeBench
from kakeya.cli.bench.report import FORMAT, compared, goals, lines, links, summary
from kakeya.cli.node_api import KEY_VARIABLE, NodeApi, find_node
from kakeya.cli.talk.generate import models_of
from kakeya.core.errors import ConfigError, KakeyaError, NotFound, StoreFailed
from kakeya.core.files import write_atomically
from kakeya.core.host import unified_memory_bytes
from kakeya.core.hosts import is_loopback_host
from kakeya.core.settings import nearest, split_address
from kakeya.core.units import printable
from kakeya.fleet.paths.link_rates import EXPECTED, UNKNOWN

FOLDER = "bench"
"""Below the data directory; a file a report."""
_USAGE = "give kakeya bench [MODEL], kakeya bench show [FILE] or kakeya bench compare A B"
_ERASE = "\r\033[K"
_BUSY = 0.5
"""Load per core before the first request from which a machine counts as busy."""
_MOST_BYTES = 1 << 20
_NO_REPORT = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)
_PROMPT_TOKENS = 1000
"""Of the long prompt; less where the context is short."""


def add_options(bench: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    bench.add_argument(
        "words",
        nargs="*",
        metavar="MODEL",
        help="a model (the node's first one); or: show [FILE]; or: compare A B",
    )
    bench.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    bench.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="of an answer; default: %(default)s"
    )
    bench.add_argument(
        "--clients", type=int, default=4, metavar="N", help="requests at once; default: %(default)s"
    )
    bench.add_argument("--names", action="store_true", help="write the names of the nodes, too")


def run(options: argparse.Namespace, data_dir: Path) -> int:
    """Run the command and return its exit status: 130 = it was ended early. Raises KakeyaError."""
    folder = data_dir / FOLDER
    match options.words:
        case ["show", *names] if len(names) < 2:
            report = _read(folder, names[0] if names else "")
            print(json.dumps(report) if options.json else _text(lines(report)))
            return 0
        case ["compare", first, second]:
            a, b = _read(folder, first), _read(folder, second)
            print(json.dumps({"a": a, "b": b}) if options.json else _text(compared(a, b)))
            return 0
        case [] | [_] if options.words != ["compare"]:
            return _measure(options, data_dir)
        case _:
            raise ConfigError(_USAGE)


def _text(told: Iterable[str]) -> str:
    """Lines of a report that another machine may have written."""
    return "\n".join(map(printable, told))


def _measure(options: argparse.Namespace, data_dir: Path) -> int:
    for name, least in (("rounds", 1), ("tokens", 8), ("clients", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be {least} or more")
    node = find_node(options.node, data_dir, os.environ.get(KEY_VARIABLE, ""))
    served = models_of(node)
    model = options.words[0] if options.words else served[0]
    if model not in served:
        raise NotFound(f"no model {model!r} is served{nearest(model, served)}")
    status: Any = node.get("/api/v1/status")
    most = _model(status, model).get("context_tokens", 0) // 2 or _PROMPT_TOKENS
    plan = BenchPlan(
        model=model,
        rounds=options.rounds,
        tokens=options.tokens,
        clients=options.clients,
        prompt_tokens=min(_PROMPT_TOKENS, most),
    )
    own_id = str((status.get("node") or {}).get("node_id") or "")
    bench = NodeBench(node, plan, random.Random(), node_id=own_id)
    if busy := _load(node.address):
        bench.samples.spoil(busy)
    failure = _work(bench)
    if failure is not None and not bench.samples.values:
        raise failure
    report = _report(node, plan, bench, status, names=options.names)
    report["is_complete"] = failure is None
    path = data_dir / FOLDER / f"{report['made_at'].replace(':', '')}.json"
    while path.exists():  # two in one second
        path = path.with_stem(f"{path.stem}b")
    print(json.dumps(report) if options.json else _text(lines(report)), flush=True)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(report, indent=1).encode())
    except OSError as problem:
        raise StoreFailed(f"the report cannot be kept in {path}: {problem.strerror}") from problem
    print(f"kept in {path}", file=sys.stderr)
    if isinstance(failure, KakeyaError):
        raise failure
    return 0 if failure is None else 130


def _work(bench: NodeBench) -> KakeyaError | KeyboardInterrupt | None:
    """Measure, with progress on stderr; returns what ended it early."""
    is_terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        said = printable(text)
        print(
            f"{_ERASE}{said}" if is_terminal else said,
            end="" if is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    show("requests of the priority batch: all others go first")
    failure: KakeyaError | KeyboardInterrupt | None = None
    try:
        for step in bench.steps(lambda text: show(f"waiting: {text}")):
            show(step)
    except (KakeyaError, KeyboardInterrupt) as problem:
        failure = problem
    if is_terminal:
        print(_ERASE, end="", file=sys.stderr, flush=True)
    return failure


def _load(address: str) -> str:
    """A sentence where this machine, with the node, is busy before the first request."""
    if not _is_here(address):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the machine was busy: load {load:.1f} on {cores} cores" if load > _BUSY * cores else ""


def _is_here(address: str) -> bool:
    return is_loopback_host(split_address(address)[0])


def _report(
    node: NodeApi, plan: BenchPlan, bench: NodeBench, before: Mapping[str, Any], *, names: bool
) -> dict[str, Any]:
    """All that is known, as JSON; of a node that is gone meanwhile its status of before."""
    status, fleet, cables = _told(node, plan.model, before)
    own, model = status.get("node") or {}, _model(status, plan.model)
    verify_ms = {str(rows): ms for rows, ms in (model.get("verify_ms") or {}).items()}
    results = summary(bench.samples)
    size = {"cores": os.cpu_count(), "memory_bytes": unified_memory_bytes()}
    is_path = plan.model.startswith(("/", "~", "."))
    return {
        "format": FORMAT,
        "kakeya": str(own.get("version") or kakeya.__version__),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "platform": str(own.get("platform") or "unknown"),
            **(size if _is_here(node.address) else {}),
            "label": str(own.get("label") or "") if names else "",
        },
        "model": {
            "id": Path(plan.model).name if is_path else plan.model,
            **{key: model.get(key) for key in ("quantization", "weight_bytes", "device")},
        },
        "settings": {
            "rounds": plan.rounds,
            "tokens": plan.tokens,
            "clients": plan.clients,
            "prompt_tokens": plan.prompt_tokens,
        },
        "results": results,
        "verify_ms": verify_ms,
        "links": links(fleet, cables, names=names),
        "goals": goals(results, verify_ms),
        "spoilt": bench.samples.spoilt,
    }


def _told(
    node: NodeApi, model: str, before: Mapping[str, Any]
) -> tuple[Any, Any, list[Mapping[str, Any]]]:
    try:
        status: Any = node.get("/api/v1/status")
    except KakeyaError:
        status = before
    fleet = status.get("fleet") or {}
    if len(fleet.get("nodes") or ()) < 2:
        return status, fleet, []
    try:
        plan: Any = node.get(f"/api/v1/ring/plan?model={quote(model, safe='')}")
    except KakeyaError:
        return status, fleet, []
    return status, fleet, [_measured(one) for one in plan["links"]]


def _measured(cable: Mapping[str, Any]) -> Mapping[str, Any]:
    """A link without the rate that is only expected of its network."""
    is_guess = cable["bytes_per_second"] == round(EXPECTED.get(cable["network"], UNKNOWN))
    return {**cable, "bytes_per_second": None} if is_guess else cable


def _model(status: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    found = (one for one in status.get("models") or () if one.get("model_id") == model)
    return next(found, {})


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Read a report by its path or its name; "" = the last one. Raises ConfigError, NotFound."""
    if name:
        places = (name, folder / name, folder / f"{name}.json")
        # A name that is too long is no file here, where Path.is_file raises.
        path = next((Path(one) for one in places if os.path.isfile(one)), None)  # noqa: PTH113
    else:
        path = max(folder.glob("*.json"), default=None)
    if path is None:
        raise NotFound(f"no report {name or 'so far'} in {folder}; kakeya bench makes one")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} has format {found['format']!r}; this build reads {FORMAT}")
        list(lines(found))
        list(compared(found, found))
    except _NO_REPORT as problem:
        raise ConfigError(f"{path} is no report of kakeya bench: {problem!r}") from problem
    return dict(found)
