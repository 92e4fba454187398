"""What a node tells at `/metrics` and in its status has the names that it had; values are left out.

`told_before.json` was written by the code of before: `KAKEYA_TELL=1 pytest` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kakeya.cli.child import NodeProcess
from kakeya.sessions.client import Client
from tests.node.nodes import DRAFTER, QUICK, VERIFIER, eventually, model_state, run_cli
from tests.node.test_memory import ask

BEFORE = Path(__file__).with_name("told_before.json")
TRAINED = Path(__file__).parents[1] / "adapters" / "trained"


def families(text: str) -> dict[str, list[str]]:
    """Kind, help, and the labels of each series but `le`, by the name of its family."""
    told = {}
    for family in text_string_to_metric_families(text):
        labels = {
            json.dumps({k: _steady(v) for k, v in sample.labels.items() if k != "le"}) + sample.name
            for sample in family.samples
        }
        bounds = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
        told[family.name] = [
            family.type,
            family.documentation,
            *sorted(labels),
            *sorted(bounds, key=float),
        ]
    return told


def shape(value: Any) -> Any:
    """The keys of nested JSON; a list is all that its items have."""
    if isinstance(value, dict):
        return {_steady(key): shape(one) for key, one in value.items()}
    if isinstance(value, list):
        shapes = {json.dumps(shape(one), sort_keys=True) for one in value}
        return [json.loads(one) for one in sorted(shapes)]
    return "null" if value is None else type(value).__name__


def _steady(text: str) -> str:
    return re.sub(r"127\.0\.0\.1:\d+|\b[0-9a-f]{8,}\b", "...", text)


async def told(folder: Path) -> dict[str, Any]:
    flags = ("--node-id", "verifier", "--model", VERIFIER, "--proposer", DRAFTER, *QUICK)
    peer_flags = ("--node-id", "drafter", "--proposer", "ngram", *QUICK)
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    async with NodeProcess(folder / "a", *flags) as node:
        for model in (VERIFIER, DRAFTER):
            await eventually("ready", lambda m=model: model_state(node, m)["state"] == "ready")
        async with NodeProcess(folder / "b", *peer_flags, "--peer", node.grpc) as other:
            await eventually("both", lambda: len(node.api.get("/api/v1/fleet")["nodes"]) == 2)
            data = str(folder / "a" / "data")
            words = (
                "adapters",
                "add",
                "shout",
                "--base",
                VERIFIER,
                "--path",
                str(TRAINED / "shout"),
            )
            added = await asyncio.to_thread(run_cli, *words, "--data-dir", data)
            assert added.returncode == 0, added.stderr
            for model in (VERIFIER, f"{VERIFIER}:shout", VERIFIER):
                assert (await ask(node, model)).status_code == 200
            assert (await ask(node, "unknown")).status_code == 404
            async with Client(node.grpc) as client, await client.create_session() as session:
                await session.append(list(range(40)))
                assert [token async for token in session.generate(8)]
                assert other.grpc
                status = await asyncio.to_thread(node.api.get, "/api/v1/status")
            await asyncio.to_thread(run_cli, "pressure", "low", "--data-dir", data)
            await eventually(
                "evicted", lambda: node.api.get("/api/v1/status")["memory"]["last_evictions"]
            )
            later = await asyncio.to_thread(node.api.get, "/api/v1/status")

            def scrape() -> str:
                with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=10) as answer:
                    return answer.read().decode()

            text = await asyncio.to_thread(scrape)
    later["memory"]["last_events"] = later["memory"]["last_events"][:1]
    return {"families": families(text), "status": shape(status), "memory": shape(later["memory"])}


async def test_a_node_tells_what_it_told_before(tmp_path: Path) -> None:
    found = json.loads(json.dumps(await told(tmp_path)))
    if os.environ.get("KAKEYA_TELL"):
        BEFORE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    before = json.loads(BEFORE.read_text())
    for part in before:
        assert found[part] == before[part]
