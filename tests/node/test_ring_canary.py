"""A ring group whose sums are off is found before it serves: real ranks on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya.generation.spec import EMBEDDED_FOLDER
from tests.mlx.ring.rig import LAUNCH, group
from tests.node.nodes import VERIFIER, NodeProcess, model_state
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed")
MODEL = EMBEDDED_FOLDER / VERIFIER
LIMIT_S = 200.0


def canary_of(node: NodeProcess) -> dict[str, Any]:
    found: dict[str, Any] = model_state(node, "big")["canary"]
    return found


@pytest.mark.slow
async def test_a_group_of_which_one_rank_has_wrong_sums_is_ended_and_serves_nothing(
    tmp_path: Path,
) -> None:
    link, settings = tmp_path / "group.sock", tmp_path / "kakeya.toml"
    settings.write_text(
        f'[models.big]\npath = "{MODEL}"\nsize_mb = 100\noptions = {{ group = "{link}" }}\n'
    )
    wrong = ("tests.mlx.ring.child_wrong_sums", "times=1.03")
    with group(2, MODEL, "--ring", "tensor", engine=wrong) as served:
        link.symlink_to(served.socket)
        async with NodeProcess(tmp_path, "--config", str(settings), "--no-mdns") as node:
            await eventually(
                "it is refused", lambda: canary_of(node)["state"] == "refused", limit_s=LIMIT_S
            )
            await eventually("its end", lambda: served.process.poll() is not None)
            said = canary_of(node)
            assert said["code"] == "group_refused"
            assert "log probabilities" in said["reason"]
            assert model_state(node, "big")["state"] == "failed"
            async with httpx.AsyncClient(base_url=f"http://{node.http}", timeout=60) as client:
                body = {"model": "big", "prompt": "one", "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert "computes something else" in answer.text
            assert node.api.get("/api/v1/status")["memory"]["residents"] == []
