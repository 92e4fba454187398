"""`kakeya jobs` against a gateway with a plug-in."""

from __future__ import annotations

import asyncio
import json

import pytest

from kakeya.cli.jobs import job_lines
from kakeya.cli.main import main
from tests.gateway.test_jobs import Reranker, hosting, submitted
from tests.waiting import until

JOB = {
    "id": "job_1",
    "object": "job",
    "kind": "image",
    "owner": "",
    "state": "running",
    "progress": {"share": 0.25, "phrase": "step 1\n of 4"},
    "created_at": 100.0,
    "error": None,
}


def test_a_job_is_a_line_and_what_came_of_it() -> None:
    assert list(job_lines(JOB, 107.0)) == [
        "job_1  image of this machine, 7 s old: running, 25%, step 1? of 4"
    ]
    failed = JOB | {"state": "failed", "error": {"code": "internal", "message": "it broke"}}
    assert list(job_lines(failed, 107.0))[1:] == ["  internal: it broke"]
    assert list(job_lines(JOB | {"result": "é"}, 107.0))[1:] == ['"é"']
    assert list(job_lines({"object": "list", "data": []}, 107.0)) == ["no jobs"]


async def test_jobs_are_listed_shown_and_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    async with hosting() as served:
        at = ("--node", f"127.0.0.1:{served.port}")

        async def said(*words: str) -> str:
            assert await asyncio.to_thread(main, ["jobs", *words, *at]) == 0
            return capsys.readouterr().out

        assert await said() == "no jobs\n"
        job_id = await submitted(served, "wait")
        await until(lambda: Reranker.begun)
        assert (await said("list")).startswith(f"{job_id}  capability of ")
        assert "running" in await said("show", job_id)
        assert await asyncio.to_thread(main, ["jobs", "show", *at, job_id]) == 0
        assert "running" in capsys.readouterr().out
        assert "cancelled" in await said("cancel", job_id)
        assert json.loads(await said("show", job_id, "--json"))["state"] == "cancelled"
        assert await asyncio.to_thread(main, ["jobs", "show", "job_x", *at]) == 1
        assert "there is no job 'job_x'" in capsys.readouterr().err
        for wrong in (["show"], ["list", job_id]):
            assert await asyncio.to_thread(main, ["jobs", *wrong, *at]) == 2
            assert "kakeya jobs show JOB" in capsys.readouterr().err
