"""Encoders: the vectors of the published architecture, whatever shares their batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError
from kakeya.mlx.embedder import MlxEncoder
from kakeya.mlx.encoder import gelu, read_config
from tests.mlx.encoder_reference import CONFIG, reference, write_encoder

CLOSE = 1e-4
TEXTS = ((2, 4, 6, 3), (2, 3), (7,), tuple(range(4, 40)), (2, 4, 6, 8, 3))


def vectors(folder: Path, texts: Sequence[Sequence[int]] = TEXTS, size: int = 0) -> np.ndarray:
    made = MlxEncoder(str(folder), "m").encode(texts, [size] * len(texts))
    return np.stack([np.frombuffer(one, "<f4") for one in made])


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_batch_has_the_vectors_of_the_architecture(
    tmp_path: Path, kind: str, prefix: str
) -> None:
    changes = {"model_type": kind, "pad_token_id": 0 if kind == "bert" else 1}
    plain = write_encoder(tmp_path / "plain", changes=changes)
    named = write_encoder(tmp_path / "named", changes=changes, prefix=prefix)
    wanted = np.stack([reference(plain, ids) for ids in TEXTS])
    assert np.abs(vectors(named) - wanted).max() < CLOSE


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_tokens_become_one_vector_as_the_folder_says(
    tmp_path: Path, pooling: str, normalizes: bool
) -> None:
    key = f"pooling_mode_{pooling}_token{'' if pooling == 'cls' else 's'}"
    for number, said in enumerate(({key: True}, {"pooling_mode": pooling})):
        folder = write_encoder(tmp_path / str(number), pooling=said, normalizes=normalizes)
        wanted = np.stack(
            [reference(folder, ids, pooling=pooling, normalizes=normalizes) for ids in TEXTS]
        )
        assert np.abs(vectors(folder) - wanted).max() < CLOSE


def test_a_folder_without_steps_pools_by_the_mean(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", pooling=None)
    wanted = reference(folder, TEXTS[0], normalizes=False)
    assert np.abs(vectors(folder)[0] - wanted).max() < CLOSE


def test_a_long_text_has_its_scores_computed_in_pieces(tmp_path: Path) -> None:
    """2,000 tokens and four heads have 64 MB of scores."""
    folder = write_encoder(tmp_path / "m")
    text = [number % 36 + 4 for number in range(2000)]
    assert np.abs(vectors(folder, [text, text[:9]])[0] - reference(folder, text)).max() < CLOSE


def test_a_vector_that_is_cut_off_has_length_one_again(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", changes={"matryoshka_dimensions": [8, 16]})
    assert MlxEncoder(str(folder), "m").facts.nested_sizes == (8, 16)
    whole, cut = vectors(folder), vectors(folder, size=8)
    assert cut.shape == (len(TEXTS), 8)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1)
    assert np.allclose(cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True))


def test_old_names_of_a_norms_parameters_are_known(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m")
    before = vectors(folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): np.array(value)
        for name, value in tensors.items()
    }
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(value) for name, value in old.items()}
    )
    assert np.array_equal(vectors(folder), before)


def test_the_most_tokens_of_a_text_are_the_trained_ones(tmp_path: Path) -> None:
    assert read_config(write_encoder(tmp_path / "a")).text_tokens == 2048
    assert read_config(write_encoder(tmp_path / "b", most_tokens=256)).text_tokens == 256
    behind_padding = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 514}
    assert read_config(write_encoder(tmp_path / "c", changes=behind_padding)).text_tokens == 512


@pytest.mark.parametrize(
    ("changes", "pooling", "says"),
    [
        ({"model_type": "llama"}, None, "'llama'; embeddings are computed by bert"),
        ({"position_embedding_type": "relative_key"}, None, "relative_key"),
        ({"hidden_act": "mish"}, None, "'mish'; known are gelu"),
        ({"hidden_act": ["gelu"]}, None, "known are gelu"),
        ({"num_attention_heads": 7}, None, "num_attention_heads 7; the size must be a multiple"),
        ({"model_type": "roberta", "pad_token_id": "x"}, None, "lacks a number"),
        ({"hidden_size": None}, None, "lacks a number"),
        ({}, {"pooling_mode_lasttoken": True}, "pooling_mode_lasttoken"),
        ({}, {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, " and "),
        ({}, {}, "pools by nothing"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], pooling: dict[str, object] | None, says: str
) -> None:
    folder = write_encoder(tmp_path / "m", pooling=pooling)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(str(config).replace("'", '"').replace("None", "null"))
    with pytest.raises(ConfigError, match=says):
        read_config(folder)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("config.json", "[]", "must hold a JSON object"),
        ("modules.json", "{}", "must hold a JSON list"),
        ("modules.json", '["pool"]', "a step \"'pool'\""),
        ("1_Pooling/config.json", "[]", "must hold a JSON object"),
        ("sentence_bert_config.json", "3", "must hold a JSON object"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(
    tmp_path: Path, file: str, text: str, says: str
) -> None:
    folder = write_encoder(tmp_path / "m")
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=f"{file}.*{says}"):
        read_config(folder)


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m")
    config = {**CONFIG, "num_hidden_layers": 3}
    (folder / "config.json").write_text(str(config).replace("'", '"'))
    with pytest.raises(ConfigError, match=r"layers\.2"):
        MlxEncoder(str(folder), "m")


@given(st.floats(-50, 50, width=32))
def test_the_fitted_gelu_is_within_its_bound(x: float) -> None:
    wanted = x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    assert gelu(mx.array([x])).item() == pytest.approx(wanted, abs=4e-7 * max(1, abs(x)))
