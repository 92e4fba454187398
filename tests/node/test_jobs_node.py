"""A node with a plug-in, which is killed in the middle of its jobs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya import EMBEDDING, Capability, Loaded, report_progress
from tests.node.nodes import QUICK, NodeProcess

GO = "KAKEYA_TEST_JOB_GO"


class Waiter:
    """Waits for a file to be there, of which the environment names the path."""

    async def load(self, model_key: str) -> Loaded:
        return Loaded(backend=model_key, measured_bytes=1000)

    async def unload(self, model_key: str, backend: object) -> None:
        """Nothing is held."""

    async def run(self, backend: object, payload: object) -> object:
        report_progress(0.5, f"waiting for {payload}")
        while not await asyncio.to_thread(Path(os.environ[GO]).exists):
            await asyncio.sleep(0.01)
        return {"waited for": payload}


def again() -> Capability:
    handler = Waiter()
    return Capability(
        name="again", role=EMBEDDING, handler=handler, estimate=lambda _: 1000, concurrency=4
    )


def once() -> Capability:
    return Capability(
        name="once",
        role=EMBEDDING,
        handler=Waiter(),
        estimate=lambda _: 1000,
        may_repeat=False,
    )


def write_distribution(folder: Path) -> None:
    info = folder / "waiters-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waiters\nVersion: 1.0\n")
    points = "".join(f"{name} = {__name__}:{name}\n" for name in ("again", "once"))
    (info / "entry_points.txt").write_text(f"[kakeya.capabilities]\n{points}")


async def submitted(http: httpx.AsyncClient, name: str, payload: int) -> str:
    body = {"model": "m", "payload": payload, "background": True}
    answer = await http.post(f"/api/v1/capabilities/{name}", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def job_of(http: httpx.AsyncClient, job_id: str, wait_s: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = (
        await http.get(f"/api/v1/jobs/{job_id}", params={"wait_s": wait_s})
    ).json()
    return found


async def until_it_runs(http: httpx.AsyncClient, job_id: str) -> None:
    while not (await job_of(http, job_id))["progress"]["share"]:
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_jobs_outlive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, go = tmp_path / "site", tmp_path / "go"
    await asyncio.to_thread(write_distribution, site)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{root}")
    monkeypatch.setenv(GO, str(go))

    def client(node: NodeProcess) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False, timeout=60)

    node = NodeProcess(tmp_path, "--proposer", "ngram", *QUICK)
    async with node, client(node) as http:
        refused = await submitted(http, "once", 3)
        await until_it_runs(http, refused)
        # These wait for the place of the other capability, of which a role has one.
        repeated = [await submitted(http, "again", n) for n in range(2)]
        cancelled = await submitted(http, "again", 2)
        answer = await http.post(f"/api/v1/jobs/{cancelled}/cancel")
        assert answer.json()["state"] == "cancelled"
        node.send(signal.SIGKILL)
        await node.wait()
    await asyncio.to_thread(go.touch)
    async with node, client(node) as http:
        for n, job_id in enumerate(repeated):
            job = await job_of(http, job_id, wait_s=60)
            assert (job["state"], job["result"]) == ("done", {"waited for": n})
        assert (await job_of(http, cancelled))["state"] == "cancelled"
        failed = await job_of(http, refused)
        assert failed["state"] == "failed"
        assert "may not be done twice" in failed["error"]["message"]
        status = await asyncio.to_thread(node.api.get, "/api/v1/status")
        assert isinstance(status["jobs"], dict)
        assert status["jobs"]["done"] == 2
