"""KV from pages and into them: never other bits than a cold prefill, and never a failure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.kv_rig import Prefixes, logits_bits
from tests.engine.rig import Rig, load_rig, tools
from tests.mlx.random_models import VOCAB

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mamba")


def text(tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(tokens)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    root = tmp_path_factory.mktemp("models")
    return {name: load_rig(root / name, name) for name in ARCHITECTURES}


@pytest.fixture(params=ARCHITECTURES)
def rig(request: pytest.FixtureRequest, models: dict[str, Rig]) -> Rig:
    return Rig(models[request.param].model, tools())


@pytest.fixture
def prefixes(tmp_path: Path) -> Iterator[Prefixes]:
    with Prefixes(tmp_path) as made:
        yield made


def bits(rig: Rig, history: list[int]) -> bytes:
    return logits_bits(rig, "k", history[-1])


def test_what_is_taken_has_the_bits_that_would_be_computed(rig: Rig, prefixes: Prefixes) -> None:
    history = text(300)
    cold = prefixes.run(rig, history, kv_key="k")
    assert cold.exported == [0, 1, 2, 3, 4]
    expected = bits(rig, history)
    for most, imported in ((5, 299), (4, 256), (2, 128), (1, 64)):
        warm = prefixes.run(rig, history, most=most, kv_key="k")
        assert warm.imported == imported
        assert warm.done.cached_tokens == imported
        assert bits(rig, history) == expected
