"""`kakeya jobs`: the jobs of slow work on a node, one of them, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal
from urllib.parse import quote

from kakeya.cli.node_api import NodeApi
from kakeya.core.errors import ConfigError

_JOBS = "/api/v1/jobs"


def run(
    node: NodeApi, action: Literal["list", "show", "cancel"], job_id: str, *, as_json: bool
) -> int:
    """Run one command and return its exit status. Raises ConfigError and those of `NodeApi`."""
    if (action == "list") is bool(job_id):
        raise ConfigError("give kakeya jobs list, kakeya jobs show JOB or kakeya jobs cancel JOB")
    path = f"{_JOBS}/{quote(job_id, safe='')}"
    match action:
        case "list":
            found = node.get(_JOBS)
        case "show":
            found = node.get(path)
        case "cancel":
            found = node.post(path + "/cancel")
    print(json.dumps(found) if as_json else "\n".join(job_lines(found, time.time())))
    return 0


def job_lines(found: Mapping[str, Any], now: float) -> Iterator[str]:
    """The lines for a person, of a job or of a list of jobs, at `now` of the wall clock."""
    if found.get("object") == "list":
        for job in found["data"]:
            yield _line(job, now)
        if not found["data"]:
            yield "no jobs"
        return
    yield _line(found, now)
    if error := found.get("error"):
        yield f"  {error['code']}: {error['message']}"
    if "result" in found:
        yield json.dumps(found["result"], indent=2, ensure_ascii=False)


def _line(job: Mapping[str, Any], now: float) -> str:
    progress = job["progress"]
    age_s = max(0, round(now - job["created_at"]))
    said = f"{job['id']}  {job['kind']} of {job['owner'] or 'this machine'}, {age_s} s old: "
    said += f"{job['state']}, {progress['share']:.0%}"
    phrase = "".join(char if char.isprintable() else "?" for char in progress["phrase"])
    return said + (f", {phrase}" if phrase else "")
