"""Model names: embedded, folders and Hugging Face ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal
from kakeya.generation.config import ModelsConfig
from kakeya.generation.spec import (
    ModelRole,
    ModelSpec,
    parse_model,
    parse_proposer,
    resolve,
    where_pulled,
)


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


def test_a_pulled_model_is_found_by_its_name_and_no_other_path(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    for source, role in (("my-model", "verifier"), ("my-model:embedder", "embedder")):
        spec = where_pulled(parse_model(source), tmp_path)
        assert (spec.model_id, spec.role, resolve(spec)) == ("my-model", role, str(folder))
    for source in ("../my-model", "x/../my-model", "kakeya-tiny", "org/other", ".my-model"):
        spec = parse_model(source)
        assert where_pulled(spec, tmp_path / "x" if "/" in source else tmp_path) == spec


def test_a_folder_may_be_an_embedder_and_ngram_may_not(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    spec = parse_model(f"vectors={folder}:embedder")
    assert (spec.model_id, spec.role) == ("vectors", ModelRole.EMBEDDER)
    with pytest.raises(Illegal, match="ngram only drafts"):
        parse_model("ngram:embedder")


HASH = "3f2c0b9d7e5a41c68b0d9f4e2a7c6b5d4e3f2a1b"


def test_a_folder_of_the_hubs_cache_has_the_name_of_its_repository(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--tiny--coder"
    snapshot = repository / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    model_folder(tmp_path).rename(snapshot)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_text("")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(HASH)
    for source in (snapshot, repository):
        spec = parse_model(str(source))
        assert (spec.model_id, resolve(spec)) == ("acme/tiny--coder", str(snapshot.resolve()))


def test_a_link_is_named_as_the_link(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    link = tmp_path / "my-coder"
    link.symlink_to(folder)
    spec = parse_model(f"{link}:proposer")
    assert (spec.model_id, resolve(spec)) == ("my-coder", str(folder))


def test_a_folder_that_is_named_by_where_it_lies_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    (folder / "inside").mkdir()
    monkeypatch.chdir(folder / "inside")
    for source in ("..", "../", "../.", f"{folder}/"):
        assert parse_model(source).model_id == "my-model"
    monkeypatch.chdir(folder)
    assert parse_model(".").model_id == "my-model"


def test_a_model_may_be_given_a_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    spec = parse_model(f"acme/coder={folder}:proposer")
    assert spec == ModelSpec(model_id="acme/coder", source=str(folder), role=ModelRole.PROPOSER)
    assert parse_proposer("draft=kakeya-tiny-draft").source == "kakeya-tiny-draft"
    assert parse_model("mine=org/name").source == "org/name"


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run=3"
    folder.mkdir()
    assert parse_model(str(folder)).model_id == "run=3"


@pytest.mark.parametrize("raw", ["a b=kakeya-tiny", "=kakeya-tiny", "a=", "a:b=c", "ngram=x"])
def test_a_name_that_cannot_be_one_is_refused(raw: str) -> None:
    with pytest.raises(Illegal, match="name"):
        parse_model(raw)


def test_two_models_of_one_name_are_told_how_to_be_two(tmp_path: Path) -> None:
    one, other = (tmp_path / place / "same" for place in ("a", "b"))
    for folder in (one, other):
        folder.mkdir(parents=True)
    specs = parse_model(str(one)), parse_model(str(other))
    with pytest.raises(ConfigError, match=f"NAME={other}"):
        ModelsConfig(serve=specs).specs()


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
