"""Ring groups of a node are compared with one process before they serve: real ranks on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya.generation.spec import EMBEDDED_FOLDER
from tests.mlx.ring.rig import ENGINE, LAUNCH, Served, group
from tests.node.nodes import NodeProcess, model_state
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")
MODEL = EMBEDDED_FOLDER / "kakeya-tiny"
WRONG = ("tests.mlx.ring.child_wrong_sums",)
LIMIT_S = 240.0


def canary_of(node: NodeProcess) -> dict[str, Any]:
    found: dict[str, Any] = model_state(node, "big")["canary"]
    return found


async def ask(node: NodeProcess) -> httpx.Response:
    body = {"model": "big", "prompt": "one", "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=LIMIT_S) as client:
        return await client.post("/v1/completions", json=body)


@contextmanager
def linked(link: Path, *engine: str) -> Iterator[Served]:
    """A group behind a socket of that name."""
    with group(2, MODEL, "--ring", "tensor", engine=engine or ENGINE) as served:
        link.symlink_to(served.socket)
        try:
            yield served
        finally:
            link.unlink()


async def test_a_group_serves_once_it_is_verified_and_one_with_wrong_sums_is_ended(
    tmp_path: Path,
) -> None:
    link = tmp_path / "group.sock"
    settings = tmp_path / "kakeya.toml"
    settings.write_text(
        f'[models.big]\npath = "{MODEL}"\nsize_mb = 100\noptions = {{ group = "{link}" }}\n'
    )
    async with NodeProcess(tmp_path, "--config", str(settings), "--no-mdns") as node:
        with linked(link):
            await eventually(
                "it is verified", lambda: canary_of(node)["state"] == "verified", limit_s=LIMIT_S
            )
            assert canary_of(node)["apart"] < 0.0001
            assert (await ask(node)).status_code == 200
            one = node.api.get("/api/v1/status")["memory"]["residents"]
            assert [resident["model"] for resident in one] == [
                "big"
            ]  # the other gave its room back
        with linked(link, *WRONG, "times=1.03") as second:
            await eventually(
                "it is refused", lambda: canary_of(node)["state"] == "refused", limit_s=LIMIT_S
            )
            await eventually("its end", lambda: second.process.poll() is not None)
        said = canary_of(node)
        assert said["code"] == "group_refused"
        assert "log probabilities" in said["reason"] or "no tie" in said["reason"]
        answer = await ask(node)
        assert answer.status_code == 503
        assert "computes something else" in answer.text
        assert model_state(node, "big")["state"] == "failed"
