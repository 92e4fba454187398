"""A model as the verifier of a program's own decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.decoding.draft.proposer import Draft, ProposerStats
from kakeya.decoding.library.speculative import SpeculativeDecoder
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.mlx.library import mlx_verifier
from kakeya.mlx.local_verifier import LocalVerifier
from tests.mlx.random_models import write_model

PROMPT = [5, 9, 2, 7, 5, 9, 2, 7, 5, 9]
KINDS = ("llama", "gemma3", "mamba")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in KINDS}


class HalfRight:
    """Knows the answer, and drafts every third token of it wrong; sometimes nothing."""

    name = "half right"

    def __init__(self, answer: Sequence[int]) -> None:
        self.stats = ProposerStats()
        self._text = [*PROMPT, *answer]
        self._rng = random.Random(1)

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        meant = self._text[len(prefix) : len(prefix) + size]
        drafted = (token if self._rng.random() < 2 / 3 else (token + 1) % 8 for token in meant)
        return Draft(source=self.name, tokens=tuple(drafted) if self._rng.random() < 0.9 else ())


def plain(verifier: LocalVerifier, count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens += verifier.verify(tokens, [])
    return tokens[len(PROMPT) :]


def decoder(verifier: LocalVerifier, proposer: object) -> SpeculativeDecoder:
    return SpeculativeDecoder(verifier, proposer, context_tokens=4096)  # type: ignore[arg-type]


@pytest.mark.parametrize("terms", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(
    folders: dict[str, Path], kind: str, terms: dict[str, float]
) -> None:
    """Where KV can be rolled back, where only a window can, and where nothing can."""
    verifier = mlx_verifier(folders[kind], **terms)  # type: ignore[arg-type]
    wanted = plain(verifier, 48)
    for proposer in (HalfRight(wanted), NGramProposer()):
        drafting = decoder(verifier, proposer)
        assert list(drafting.generate(PROMPT, 48)) == wanted
        assert drafting.stats.committed == 48
        if isinstance(proposer, HalfRight):
            assert drafting.stats.accepted > 5


def test_another_prompt_and_the_same_one_again_are_decoded_as_by_a_new_verifier(
    folders: dict[str, Path],
) -> None:
    verifier = mlx_verifier(folders["llama"])
    wanted = plain(mlx_verifier(folders["llama"]), 12)
    drafting = decoder(verifier, HalfRight(wanted))
    for prompt in (PROMPT, [*PROMPT[:4], 1, 1], PROMPT[:3], PROMPT):
        answer = list(drafting.generate(prompt, 12))
    assert answer == wanted


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_decode_that_was_interrupted_begins_anew_and_gives_the_same(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come in the middle of a forward, when some layers hold more KV than others."""
    verifier = mlx_verifier(folders[kind])
    wanted = plain(verifier, 12)
    forward = type(verifier._model).forward

    def interrupted(*given: object, **named: object) -> object:
        forward(*given, **named)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    tokens = [*PROMPT, *wanted[:5]]
    monkeypatch.setattr(type(verifier._model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verifier.verify([*tokens[:-2], 3, 3], [1, 2])
    monkeypatch.undo()
    assert list(decoder(verifier, NGramProposer()).generate(PROMPT, 12)) == wanted


def test_it_tells_the_facts_of_its_model() -> None:
    verifier = mlx_verifier("kakeya-tiny")
    assert (verifier.vocab_size, len(verifier.vocabulary_digest)) == (3072, 64)
    assert verifier.context_tokens >= 1024
    assert verifier.eos_token_ids
    assert Path(verifier.tokenizer_file).is_file()


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"'no-such-model' is not known.*an existing folder"):
        mlx_verifier("no-such-model")
    with pytest.raises(ConfigError, match=r"config\.json"):
        mlx_verifier(tmp_path / "bare")
    with pytest.raises(ConfigError, match="GGUF"):
        mlx_verifier(tmp_path / "weights.gguf")
    with pytest.raises(ConfigError, match="ngram"):
        mlx_verifier("ngram")
    with pytest.raises(InvalidArgument, match="temperature"):
        mlx_verifier("kakeya-tiny", temperature=-1)
