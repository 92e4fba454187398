"""Capabilities of plug-ins and jobs over HTTP."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kakeya import EMBEDDING, Capability, Loaded, errors, report_progress
from kakeya.core.clock import SystemClock
from kakeya.dispatch.capabilities import Capabilities
from kakeya.dispatch.jobs import JobQueue
from kakeya.gateway.http.authorization import KeyCheck
from kakeya.gateway.http.keys import KeyRing, KeyRole, add_key
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.plugins import GROUP, PluginReport, load_capabilities
from tests.gateway.toy import Served, serving
from tests.waiting import until

FAR = {"x-forwarded-for": "192.0.2.7"}
RERANK = "/api/v1/capabilities/rerank"


class Reranker:
    """Counts the letters of texts; a payload of words says what else it does."""

    gate: asyncio.Event
    begun = cancelled = 0

    async def load(self, model_key: str) -> Loaded:
        return Loaded(backend=model_key, measured_bytes=1000)

    async def unload(self, model_key: str, backend: object) -> None:
        """Nothing is held."""

    async def run(self, backend: object, payload: object) -> object:
        match payload:
            case {"texts": list(texts)}:
                return {"model": backend, "scores": [len(text) for text in texts]}
            case "wait":
                Reranker.begun += 1
                report_progress(0.25, "a quarter\nis read \ud800")
                try:
                    await Reranker.gate.wait()
                except asyncio.CancelledError:
                    Reranker.cancelled += 1
                    raise
                return "waited"
            case "bytes":
                return {"image": b"\xff"}
            case "set":
                return {1, 2}
            case "fault":
                raise ZeroDivisionError("a number\nof a plug-in \ud800")
            case "cancelled":
                raise errors.Cancelled("by itself")
            case _:
                raise errors.InvalidArgument("payload must be an object with texts")


def _estimate(model_key: str) -> int:
    sizes = {"small": 1000, "huge": 10**9}
    if model_key not in sizes:
        raise errors.NotFound(f"there is no re-ranker {model_key!r}; there is small")
    return sizes[model_key]


def capability() -> Capability:
    return Capability(name="rerank", role=EMBEDDING, handler=Reranker(), estimate=_estimate)


@dataclass
class Host:
    arbiter: MemoryArbiter
    plugins: tuple[PluginReport, ...] = field(default=())


@asynccontextmanager
async def hosting(keys: KeyCheck | None = None) -> AsyncIterator[Served]:
    clock = SystemClock()
    Reranker.gate, Reranker.begun, Reranker.cancelled = asyncio.Event(), 0, 0
    jobs = JobQueue(None, clock=clock, rng=random.Random(1))
    async with MemoryArbiter(budget=10**6, clock=clock, grace_s=0) as arbiter, jobs:
        host = Host(arbiter)
        capabilities = Capabilities(host, jobs)
        async with serving(jobs=jobs, capabilities=capabilities, keys=keys) as served:
            # As on a node, plug-ins come when HTTP is there already.
            point = EntryPoint(name="a", value=f"{__name__}:capability", group=GROUP)
            host.plugins = await load_capabilities(arbiter, [point])
            yield served


async def test_a_capability_answers_json_with_json() -> None:
    async with hosting() as served:
        listed = (await served.http.get("/api/v1/capabilities")).json()
        assert [(one["id"], one["role"], one["loaded"]) for one in listed["data"]] == [
            ("rerank", "embedding", [])
        ]
        body = {"model": "small", "payload": {"texts": ["ab", ""]}, "x_priority": "high"}
        answer = await served.http.post(RERANK, json=body)
        assert answer.status_code == 200
        assert answer.json() == {
            "object": "capability.result",
            "capability": "rerank",
            "model": "small",
            "result": {"model": "small", "scores": [2, 0]},
        }
        answer = await served.http.post(RERANK, json={"model": "small", "payload": "bytes"})
        assert answer.json()["result"] == {"image": {"b64": "/w=="}}
        listed = (await served.http.get("/api/v1/capabilities")).json()
        assert listed["data"][0]["loaded"] == ["small"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        ("/api/v1/capabilities/rerankk", {}, 404, "capability_not_found", r"did you mean rerank\?"),
        # An engine of the node is none of a client's.
        ("/api/v1/capabilities/text", {}, 404, "capability_not_found", "there are rerank"),
        (RERANK, {"model": "tiny"}, 404, "not_found", "there is small"),
        (RERANK, {"model": "tiny", "background": True}, 404, "not_found", "there is small"),
        (RERANK, {"model": "huge"}, 503, "memory_refused", ""),
        (RERANK, {"payload": 1}, 400, "invalid_argument", "an object with texts"),
        (RERANK, {"payload": "set"}, 500, "result_not_json", "cannot be written as JSON"),
        (RERANK, {"payload": "cancelled"}, 500, "capability_failed", "by itself"),
        (
            RERANK,
            {"payload": "fault"},
            500,
            "capability_failed",
            r"rerank failed: ZeroDivisionError: a number of a plug-in \?",
        ),
        # On a busy machine the deadline is over before the model is asked for.
        (
            RERANK,
            {"payload": "wait", "timeout_s": 0.01},
            504,
            "deadline_exceeded",
            r"0\.01 s|within the 0 s that the deadline left",
        ),
        (RERANK, {"colour": 1}, 400, "unsupported_parameter", "colour"),
        (RERANK, {"model": None}, 400, "invalid_argument", "model"),
    ],
)
async def test_errors_are_typed_and_cost_nothing_else(
    path: str, body: dict[str, object], status: int, code: str, words: str
) -> None:
    async with hosting() as served:
        whole = {"model": "small", "payload": {"texts": ["a"]}}
        assert (await served.http.post(RERANK, json=whole)).status_code == 200
        answer = await served.http.post(path, json={"model": "small"} | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert re.search(words, error["message"])
        assert "Traceback" not in answer.text
        assert (await served.http.post(RERANK, json=whole)).status_code == 200


async def test_a_client_that_leaves_ends_its_run() -> None:
    async with hosting() as served:
        body = {"model": "small", "payload": "wait"}
        work = asyncio.ensure_future(served.http.post(RERANK, json=body))
        await until(lambda: Reranker.begun)
        assert (await served.http.get("/api/v1/jobs")).json()["data"] == []
        work.cancel()
        await until(lambda: Reranker.cancelled)


async def submitted(served: Served, payload: object, **headers: str) -> str:
    body = {"model": "small", "payload": payload, "background": True}
    answer = await served.http.post(RERANK, json=body, headers=headers)
    assert answer.status_code == 202
    job = answer.json()
    assert (job["object"], job["state"], job["kind"]) == ("job", "queued", "capability")
    assert answer.headers["location"] == f"/api/v1/jobs/{job['id']}"
    return str(job["id"])


async def test_a_job_that_waits_in_the_arbiter_says_for_what() -> None:
    async with hosting() as served:
        running, waiting = [await submitted(served, "wait") for _ in range(2)]
        await until(lambda: Reranker.begun)

        async def phrase(job_id: str) -> tuple[str, str]:
            job = (await served.http.get(f"/api/v1/jobs/{job_id}")).json()
            return job["state"], job["progress"]["phrase"]

        for _ in range(400):
            if (await phrase(waiting))[1]:
                break
            await asyncio.sleep(0.01)
        assert await phrase(waiting) == ("running", "it waits: 1st for a place, small")
        assert (await phrase(running))[1] == "a quarter is read ?"
        Reranker.gate.set()
        for job_id in (running, waiting):
            path = f"/api/v1/jobs/{job_id}"
            job = (await served.http.get(path, params={"wait_s": 60})).json()
            assert (job["state"], job["progress"]["phrase"]) == ("done", "")


async def test_a_job_is_polled_and_its_progress_seen() -> None:
    async with hosting() as served:
        job_id = await submitted(served, "wait")
        path = f"/api/v1/jobs/{job_id}"
        for _ in range(400):
            job = (await served.http.get(path)).json()
            if job["progress"]["share"]:
                break
            await asyncio.sleep(0.01)
        assert (job["state"], job["progress"]) == (
            "running",
            {"share": 0.25, "phrase": "a quarter is read ?"},
        )
        assert "result" not in job
        assert (await served.http.get(path, params={"wait_s": 0.01})).json()["state"] == "running"
        waiting = asyncio.ensure_future(served.http.get(path, params={"wait_s": 60}))
        await asyncio.sleep(0)
        Reranker.gate.set()
        job = (await waiting).json()
        assert (job["state"], job["result"], job["progress"]["share"]) == ("done", "waited", 1.0)
        listed = (await served.http.get("/api/v1/jobs")).json()
        assert [one["id"] for one in listed["data"]] == [job_id]
        for wrong in ("soon", "-1", "nan", "1e9"):
            answer = await served.http.get(path, params={"wait_s": wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "wait_s"


async def test_a_job_is_cancelled_and_forgotten() -> None:
    async with hosting() as served:
        path = f"/api/v1/jobs/{await submitted(served, 'wait')}"
        assert (await served.http.post(path + "/cancel")).json()["state"] == "cancelled"
        assert (await served.http.get(path)).json()["state"] == "cancelled"
        assert (await served.http.delete(path)).json()["deleted"]
        answer = await served.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
        assert (await served.http.get("/api/v1/jobs")).json()["data"] == []


async def test_a_job_that_fails_says_why() -> None:
    async with hosting() as served:
        path = f"/api/v1/jobs/{await submitted(served, 'fault')}"
        job = (await served.http.get(path, params={"wait_s": 60})).json()
        assert job["state"] == "failed"
        assert job["error"] == {
            "code": "capability_failed",
            "message": "rerank failed: ZeroDivisionError: a number of a plug-in ?",
        }


async def test_a_key_sees_its_own_jobs_and_an_admin_all(tmp_path: Path) -> None:
    keys = {
        name: (await asyncio.to_thread(add_key, tmp_path, name, role, now=0.0))
        for name, role in (
            ("ann", KeyRole.INFER),
            ("bob", KeyRole.INFER),
            ("owner", KeyRole.ADMIN),
        )
    }
    ring = KeyRing(tmp_path, SystemClock().mono)
    async with hosting(KeyCheck(ring=ring, needed="always")) as served:

        def of(name: str) -> dict[str, str]:
            return FAR | {"authorization": f"Bearer {keys[name]}"}

        path = f"/api/v1/jobs/{await submitted(served, 'wait', **of('ann'))}"
        for name, status in (("ann", 200), ("bob", 404), ("owner", 200)):
            assert (await served.http.get(path, headers=of(name))).status_code == status
            listed = (await served.http.get("/api/v1/jobs", headers=of(name))).json()
            assert len(listed["data"]) == (status == 200)
        assert (await served.http.post(path + "/cancel", headers=of("bob"))).status_code == 404
        assert (await served.http.get(path)).status_code == 401
        capabilities = await served.http.get("/api/v1/capabilities", headers=of("bob"))
        assert capabilities.status_code == 200
        assert (await served.http.get("/api/v1/status", headers=of("bob"))).status_code == 403
        cancelled = await served.http.post(path + "/cancel", headers=of("owner"))
        assert cancelled.json()["state"] == "cancelled"
