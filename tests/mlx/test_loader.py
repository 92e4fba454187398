"""Loading folders: what is read, and what is said of folders that are not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kakeya.core.errors import ConfigError
from kakeya.generation.progress import LoadPhase
from kakeya.mlx.loader import load, resolve_folder, vocabulary_digest
from kakeya.mlx.model import MlxModel
from tests.mlx.random_models import EOS, write_model


def test_a_folder_loads_with_its_facts(tmp_path: Path) -> None:
    loaded = load(str(write_model(tmp_path / "m", "llama")), "m")
    assert loaded.context_tokens == 512
    assert loaded.eos_token_ids == (EOS,)
    assert loaded.dtype == "float32"
    assert loaded.weight_bytes > 50_000


def test_half_precision_weights_become_float32_on_the_cpu(tmp_path: Path) -> None:
    loaded = load(str(write_model(tmp_path / "m", "llama", dtype=mx.float16)), "m")
    assert loaded.dtype == "float32"


def test_quantized_weights_stay_quantized(tmp_path: Path) -> None:
    loaded = load(str(write_model(tmp_path / "m", "llama", quantize_bits=4)), "m")
    assert loaded.quantization == "4bit-g32"
    logits = loaded.forward(mx.array([[1, 2, 3]]), loaded.make_cache())
    assert bool(mx.isfinite(logits).all())


def test_the_weights_have_one_name_with_adapters_and_without(tmp_path: Path) -> None:
    """A node without adapters goes on with the answers of others, too."""
    folder = str(write_model(tmp_path / "m", "llama"))
    plain, slotted = load(folder, "m"), load(folder, "m", adapter_slots=2, adapter_rank=4)
    names = {MlxModel(one, 0.0, False).facts.base_fingerprint for one in (plain, slotted)}
    assert names == {plain.fingerprint}
    assert plain.fingerprint


def test_generation_config_adds_stop_ids(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    assert load(str(folder), "m").eos_token_ids == (EOS, 7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/no/such/folder", "does not exist"),
        ("no-such-name", "does not exist"),
    ],
)
def test_a_missing_folder_is_named(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        resolve_folder(given)
    assert given in caught.value.message


def test_a_folder_without_parts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        resolve_folder(str(tmp_path))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no model-2\.safetensors, which model\.safetensors\.in"):
        resolve_folder(str(tmp_path))


def test_the_files_that_an_index_names_are_read_and_no_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama")
    before = mx.load(str(folder / "model.safetensors"))
    index = {"weight_map": dict.fromkeys(before, "weights.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    stray = {name: mx.zeros_like(array) for name, array in before.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stray)
    loaded = load(str(folder), "m")
    name = "model.norm.weight"
    assert dict(tree_flatten(loaded.network.parameters()))[name].tolist() == before[name].tolist()


def test_a_hugging_face_id_is_downloaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot", "llama")
    asked: list[str] = []

    told: list[tuple[LoadPhase, int, int]] = []

    def download(name: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked.append(name)
        with tqdm_class(total=2, unit="it") as files, tqdm_class(total=0, unit="B") as counted:
            counted.total = 400
            counted.update(100)
            files.update(1)
            counted.update(300)
        return str(folder)

    assert resolve_folder("org/name", lambda *one: told.append(one), download) == folder
    assert asked == ["org/name"]
    assert told == [
        (LoadPhase.FIND, 0, 0),
        (LoadPhase.DOWNLOAD, 100, 400),
        (LoadPhase.DOWNLOAD, 400, 400),
    ]


def test_a_failed_download_says_so() -> None:
    def download(name: str, allow_patterns: list[str], tqdm_class: Any) -> str:
        raise OSError("no route")

    with pytest.raises(ConfigError, match="neither a folder here nor could it be downloaded"):
        resolve_folder("org/name", download=download)


def test_damaged_weights_are_a_config_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(str(folder), "m")


def test_an_unknown_architecture_is_a_config_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="nonesuch"):
        load(str(folder), "m")


def test_equal_vocabularies_have_equal_digests_whatever_the_rest(tmp_path: Path) -> None:
    def folder(name: str, vocabulary: dict[str, int], **rest: object) -> Path:
        path = tmp_path / name
        path.mkdir()
        spec = {"model": {"vocab": vocabulary}, "added_tokens": [], **rest}
        (path / "tokenizer.json").write_text(json.dumps(spec))
        return path

    one = vocabulary_digest(folder("a", {"x": 0, "y": 1}))
    same = vocabulary_digest(folder("b", {"y": 1, "x": 0}, truncation=None))
    other = vocabulary_digest(folder("c", {"x": 1, "y": 0}))
    assert one == same != other
    assert vocabulary_digest(tmp_path / "nowhere") == ""
