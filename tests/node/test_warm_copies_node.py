"""Real nodes: a prompt that one of them declares is warm on another one too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.node.nodes import QUICK, VERIFIER, NodeProcess, client_of, model_state, seen_by
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SYSTEM = "You are the concierge of a small hotel by the sea. " * 30
CONFIG = f"""
[precache]
warm_nodes = 2
[[precache.prompts]]
system = "{SYSTEM}"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[NodeProcess]]:
    """Three nodes with the model; the first declares a prompt."""
    folder = tmp_path_factory.mktemp("copies")
    config = folder / "node.toml"
    config.write_text(CONFIG)
    async with AsyncExitStack() as stack:
        made: list[NodeProcess] = []
        for name in ("declares", "one", "other"):
            flags = ("--config", str(config)) if not made else ("--peer", made[0].grpc)
            own = ("--node-id", name, "--model", VERIFIER, *QUICK, *flags)
            node = await stack.enter_async_context(NodeProcess(folder / name, *own))
            made.append(node)
        for node in made:
            await eventually("a model is ready", partial(is_ready, node))
        await eventually("all see all", lambda: all(len(seen_by(node)) == 3 for node in made))
        yield made


def is_ready(node: NodeProcess) -> bool:
    return bool(model_state(node, VERIFIER)["state"] == "ready")


def precache_of(node: NodeProcess) -> dict[str, Any]:
    found: dict[str, Any] = node.api.get("/api/v1/status")["precache"]
    return found


def keepers(nodes: list[NodeProcess]) -> list[str]:
    copies: list[dict[str, list[str]]] = precache_of(nodes[0])["copies"]
    if not copies:
        return []
    (copy,) = copies
    return copy["nodes"]


async def test_a_declared_prompt_is_warm_on_another_node_which_need_not_compute_it(
    nodes: list[NodeProcess],
) -> None:
    await eventually("another node keeps it", lambda: len(keepers(nodes)) == 2)
    keeper = next(node for node in nodes[1:] if node.node_id in keepers(nodes))
    (bare,) = (node for node in nodes[1:] if node is not keeper)
    assert precache_of(keeper)["for_peers"] == 1
    assert precache_of(bare)["for_peers"] == 0
    async with client_of(keeper) as client:
        said = await client.chat.completions.create(
            model=VERIFIER,
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "When is breakfast?"},
            ],
            max_tokens=4,
        )
    usage = said.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached > 0.8 * usage.prompt_tokens


async def test_a_keeper_that_leaves_is_replaced(nodes: list[NodeProcess]) -> None:
    await eventually("another node keeps it", lambda: len(keepers(nodes)) == 2)
    (first,) = (node for node in nodes[1:] if node.node_id in keepers(nodes))
    (second,) = (node for node in nodes[1:] if node is not first)
    await first.stop()
    await eventually(
        "the other node keeps it", lambda: keepers(nodes) == ["declares", second.node_id]
    )
    assert precache_of(second)["for_peers"] == 1
