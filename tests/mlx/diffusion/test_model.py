"""A block-diffusion drafter as a model: its facts, its faults, and that drafts change no token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from kakeya.core.errors import ConfigError, Unsupported
from kakeya.decoding.draft.proposer import BlockProposal
from kakeya.decoding.library.speculative import SpeculativeDecoder
from kakeya.generation.spec import EMBEDDED_FOLDER, ModelRole, ModelSpec, resolve
from kakeya.mlx.diffusion.model import DiffusionModel, is_block_diffusion
from kakeya.mlx.library import mlx_verifier
from kakeya.mlx.local_verifier import LocalVerifier
from tests.mlx.diffusion.rig import SMALL, write_drafter

DLM = "kakeya-tiny-dlm"
PROMPT = [267, 1013, 12, 345, 19, 267, 1013, 12, 345, 19, 800]


class Blocks:
    """A drafter as a proposer of blocks."""

    def __init__(self, model: DiffusionModel, seed: int | None, temperature: float) -> None:
        self._model = model
        self._noise = seed, temperature

    def propose_block(self, committed: list[int], size: int, steps: int) -> BlockProposal:
        made = self._model.draft(committed, size, *self._noise, steps)
        return BlockProposal(tokens=made.tokens, num_valid=len(made.tokens))


@pytest.fixture(scope="module")
def shipped() -> DiffusionModel:
    return DiffusionModel(str(EMBEDDED_FOLDER / DLM), DLM)


def plain(verifier: LocalVerifier, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens += verifier.verify(tokens, [])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("terms", [{}, {"temperature": 0.8, "seed": 5}])
def test_no_size_and_no_count_of_steps_changes_a_token(
    shipped: DiffusionModel, terms: dict[str, float]
) -> None:
    verifier = mlx_verifier("kakeya-tiny", **terms)  # type: ignore[arg-type]
    wanted = plain(verifier, PROMPT, 8)
    drafter = Blocks(shipped, int(terms["seed"]) if terms else None, terms.get("temperature", 0.0))
    accepted = 0
    for size in (1, 3, 16, 40):
        for steps in (1, 99):
            decoder = SpeculativeDecoder(
                verifier,
                drafter,
                context_tokens=verifier.context_tokens,
                block_size=size,
                num_diffusion_steps=steps,
            )
            assert list(decoder.generate(PROMPT, max_tokens=8)) == wanted
            assert not decoder.stats.first_failure
            accepted += decoder.stats.accepted
    assert accepted > 0


def test_the_shipped_drafter_has_the_vocabulary_of_its_verifier(shipped: DiffusionModel) -> None:
    verifier = mlx_verifier("kakeya-tiny")
    assert shipped.facts.vocabulary_digest == verifier.vocabulary_digest != ""
    assert shipped.facts.vocab_size == verifier.vocab_size
    assert shipped.facts.tokens_per_second > 0
    assert shipped.facts.weight_bytes > 0
    assert shipped.memory().peak_bytes >= shipped.memory().active_bytes > 0


def test_it_generates_nothing_and_is_served_as_a_proposer_only(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")
    model = DiffusionModel(str(folder), "m")
    with pytest.raises(Unsupported, match="m only drafts; give it as --proposer"):
        model.open()
    assert is_block_diffusion(folder)
    assert not is_block_diffusion(tmp_path)
    spec = ModelSpec(model_id="m", source=str(folder), role=ModelRole.PROPOSER)
    assert resolve(spec) == str(folder)
    for role in (ModelRole.VERIFIER, ModelRole.EMBEDDER):
        with pytest.raises(ConfigError, match="only drafts for others; give it as --proposer"):
            resolve(ModelSpec(model_id="m", source=str(folder), role=role))


def test_a_damaged_folder_is_told(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 24}))
    with pytest.raises(ConfigError, match=r"weights in .* cannot be read"):
        DiffusionModel(str(folder), "m")
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no folder of a block-diffusion drafter.*head_dim"):
        DiffusionModel(str(folder), "m")
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match=r"weights in .* cannot be read"):
        DiffusionModel(str(folder), "m")


def test_what_is_held_for_drafts_can_be_given_back(tmp_path: Path) -> None:
    model = DiffusionModel(str(write_drafter(tmp_path)), "m")
    assert model.idle_bytes() == 0
    model.draft(list(range(4, 30)), 4, None, 0.0)
    assert model.idle_bytes() == 25 * SMALL.kv_bytes_per_token
    model.shed(1)
    assert model.idle_bytes() == 0
    assert list(model.chores()) == []
    model.limit(1 << 30, 1 << 20)
    model.tidy()
    mx.set_memory_limit(1 << 40)
