"""`kakeya ring`: groups of nodes that serve one model together. `plan` starts nothing; the other
verbs are in `ring_groups`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

from kakeya.cli import ring_groups
from kakeya.cli.data_dir import add_data_dir
from kakeya.cli.node_api import NodeApi

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_PLAN = "tell which nodes would share a model, how, and how fast it would be"
_WIDTH = 80


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    text = "groups of nodes that serve one model together"
    ring = commands.add_parser("ring", help=text, description=text, allow_abbrev=False)
    verbs = ring.add_subparsers(dest="verb", required=True, metavar="VERB")
    plan = verbs.add_parser("plan", help=_PLAN, description=_PLAN, allow_abbrev=False)
    plan.add_argument(
        "model", metavar="MODEL", help="a name that a node knows, or a folder at the node"
    )
    plan.add_argument("--nodes", default="", metavar="A,B", help="labels or ids (all live nodes)")
    plan.add_argument(
        "--split", default="", choices=("tensor", "pipeline"), help="default: the faster one"
    )
    plan.add_argument("--node", default="", metavar="HOST:PORT", help="HTTP address of a node")
    add_data_dir(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")
    ring_groups.add_verbs(verbs)


def run(node: NodeApi, options: argparse.Namespace) -> int:
    """Run one verb and return its exit status: 1 = a plan that was refused. Raises KakeyaError."""
    asked = {"model": options.model, "nodes": options.nodes, "split": options.split}
    path = urlencode({name: said for name, said in asked.items() if said})
    found = node.get(f"/api/v1/ring/plan?{path}")
    print(json.dumps(found) if options.json else "\n".join(plan_lines(found)))
    return 1 if found.get("reason_refused") else 0


def plan_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a person, of an answer of /api/v1/ring/plan."""
    refused = found["reason_refused"]
    if not found["members"]:
        yield from _wrapped(f"no ring group for {found['model']}: {refused}")
    else:
        verdict = "refused" if refused else "plan"
        yield from _wrapped(
            f"{verdict}: {found['model']} over {len(found['members'])} nodes, "
            f"{found['split']} split, backend {found['backend']}"
        )
        is_pipeline = found["split"] == "pipeline"
        yield f"  rank  {'node':28}  {'lends':>9}  {'can lend':>9}  layers"
        can = {one["node_id"]: one["can_lend_mb"] for one in found["nodes"]}
        for one in found["members"]:
            layers = one["layers"] if is_pipeline else f"a part of {one['layers']}"
            yield (
                f"  {one['rank']:>4}  {one['label'][:28]:28}  {one['lend_mb']:>6} MB  "
                f"{can[one['node_id']]:>6} MB  {layers}"
            )
        yield (
            f"  about {found['tokens_per_second']:.1f} tokens/s, prompts "
            f"{found['prefill_tokens_per_second']:.0f} tokens/s"
        )
        yield (
            f"  each token waits {found['collectives_per_token']} times for the other ranks and "
            f"sends {found['sent_bytes_per_token'] / 1024:.0f} KiB"
        )
        if refused:
            yield from _wrapped(refused, "  ")
    guessed = {
        one["label"]: one["speed_from"]
        for one in found["nodes"]
        if one["speed_from"] != "measured" and not one["refusal"]
    }
    for label, source in guessed.items():
        said = "of its chip" if source == "chip" else "a guess"
        yield f"  the speed of {label[:28]} is {said}: no model was measured there yet"


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
