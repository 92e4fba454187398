"""Model names: embedded, folders and Hugging Face ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal
from kakeya.generation.spec import ModelRole, parse_model, parse_proposer, resolve


def model_folder(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_folder_is_served_under_its_base_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    spec = parse_model(str(folder))
    assert (spec.model_id, spec.role) == ("my-model", ModelRole.VERIFIER)
    assert resolve(spec) == str(folder)


def test_a_role_may_follow_a_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    spec = parse_model(f"{folder}:proposer")
    assert (spec.model_id, spec.role) == ("my-model", ModelRole.PROPOSER)


def test_a_hub_id_is_left_to_the_engine() -> None:
    spec = parse_model("mlx-community/Qwen3-0.6B-4bit")
    assert spec.model_id == resolve(spec) == "mlx-community/Qwen3-0.6B-4bit"


def test_ngram_needs_no_folder() -> None:
    assert parse_proposer("ngram").is_ngram


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ((), "config.json and *.safetensors"),
        (("config.json",), "*.safetensors"),
        (("model.safetensors",), "config.json"),
    ],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(
    tmp_path: Path, present: tuple[str, ...], missing: str
) -> None:
    folder = model_folder(tmp_path, *present)
    with pytest.raises(ConfigError) as refused:
        resolve(parse_model(str(folder)))
    assert f"lacks {missing};" in refused.value.message
    assert str(folder) in refused.value.message


@pytest.mark.parametrize("source", ["kakeya-tyni", "/nowhere/model", "./nowhere", "a/b/c", ".."])
def test_an_unknown_name_is_refused_with_what_would_be_right(source: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(parse_model(source))
    assert source in refused.value.message or "folder" in refused.value.message
    assert "kakeya-tiny" in refused.value.message or "config.json" in refused.value.message


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean kakeya-tiny"):
        resolve(parse_model("kakeya-tyni"))


def test_a_folder_cannot_take_the_name_of_the_ngram_proposer(tmp_path: Path) -> None:
    (tmp_path / "ngram").mkdir()
    with pytest.raises(Illegal, match="rename"):
        parse_model(str(tmp_path / "ngram"))
