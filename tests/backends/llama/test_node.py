"""A whole node that serves a GGUF file: loaded, left by the memory, loaded again, and ended."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest

from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import Engines
from kakeya.cli.child import NodeProcess
from kakeya.cli.main import main
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.core.process import resident_bytes
from kakeya.generation.manifest import Manifest
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.api import MemoryArbiter
from tests.backends.llama.server import toy_gguf
from tests.gguf_files import tiny_meta, write_gguf
from tests.node.nodes import model_state
from tests.waiting import eventually

ASKED: Any = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Call the tool § get_weather."}],
    "temperature": 0,
    "max_tokens": 40,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return toy_gguf(tmp_path / "model")


async def test_a_node_loads_unloads_and_ends_a_server(
    llama_server: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_MEMORY_UNLOAD_AFTER_S", "1")
    monkeypatch.setenv("KAKEYA_MEMORY_STAY_WARM_S", "1")
    monkeypatch.setenv("KAKEYA_LLAMA_SERVER", str(llama_server))
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    with tempfile.TemporaryDirectory(prefix="kk") as home:
        async with NodeProcess(Path(home), "--model", f"toy={model.parent}") as node:
            client = openai.OpenAI(base_url=f"http://{node.http}/v1", api_key="none")

            def say() -> Any:
                return client.chat.completions.create(**ASKED).choices[0].message.content

            def state() -> Any:
                return model_state(node, "toy")

            first = await eventually("an answer", say)
            assert "get_weather" in first
            await eventually("unloaded", lambda: state()["state"] == "unloaded")
            assert await eventually("an answer", say) == first
            pid = await eventually("a server", lambda: state()["pid"])
            node.send(signal.SIGKILL)
            await node.wait()
            await eventually("the server ended", lambda: not resident_bytes(pid))


async def test_a_conversation_is_warm_after_its_model_left_and_after_a_restart(
    llama_server: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cold once it was wiped."""
    monkeypatch.setenv("KAKEYA_MEMORY_UNLOAD_AFTER_S", "1")
    monkeypatch.setenv("KAKEYA_MEMORY_STAY_WARM_S", "1")
    monkeypatch.setenv("KAKEYA_LLAMA_SERVER", str(llama_server))
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    long = {**ASKED, "messages": [{"role": "user", "content": "Once more. " * 120}]}
    with tempfile.TemporaryDirectory(prefix="kk") as home:

        def say(node: NodeProcess) -> Any:
            client = openai.OpenAI(base_url=f"http://{node.http}/v1", api_key="none")
            answer = client.chat.completions.create(**long)
            return answer.choices[0].message.content, answer.usage

        async with NodeProcess(Path(home), "--model", f"toy={model.parent}") as node:
            text, cold = await eventually("an answer", lambda: say(node))
            assert cold.prompt_tokens_details.cached_tokens == 0
            await eventually("unloaded", lambda: model_state(node, "toy")["state"] == "unloaded")
            again, warm = await asyncio.to_thread(say, node)
            assert again == text
            assert warm.prompt_tokens_details.cached_tokens == cold.prompt_tokens - 1
        async with NodeProcess(Path(home), "--model", f"toy={model.parent}") as node:
            again, warm = await eventually("an answer", lambda: say(node))
            assert again == text
            assert warm.prompt_tokens_details.cached_tokens == cold.prompt_tokens - 1
            wipe = ["cache", "wipe", "--data-dir", str(Path(home) / "data")]
            assert await asyncio.to_thread(main, wipe) == 0
            _, last = await asyncio.to_thread(say, node)
            assert last.prompt_tokens_details.cached_tokens == 0


def engines(
    model: Path,
    *,
    role: ModelRole = ModelRole.VERIFIER,
    manifest: Manifest = Manifest(),  # noqa: B008
    server: str = "/bin/sh",
) -> Engines:
    clock = SystemClock()
    return Engines(
        [ModelSpec(model_id="toy", source=str(model), role=role, manifest=manifest)],
        lambda spec, resolved: lambda socket: (),
        MemoryArbiter(budget=1 << 30, clock=clock),
        clock=clock,
        options=EngineOptions(),
        on_change=lambda: None,
        llama_server=server,
    )


def test_a_file_that_cannot_be_served_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "toy.gguf", tiny_meta())
    asked = Manifest(options=(("ctx_size", 1024), ("parallel", 2)))
    made = engines(model, manifest=asked)
    assert made.fixed_kv_bytes == {"toy": 1024 * 2 * 2 * 32 * 2}
    assert made.make("toy").options.max_running == 2
    assert made.get("toy").manifest.backend == "llama-server"
    with pytest.raises(ConfigError, match="only answer requests"):
        engines(model, role=ModelRole.PROPOSER)
    with pytest.raises(ConfigError, match="backend is mlx"):
        engines(model, manifest=Manifest(backend="mlx"))
    with pytest.raises(ConfigError, match="ctx_size"):
        engines(model, manifest=Manifest(options=(("ctx", 1),)))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="scripts/llama_server"):
        engines(model, server="")
