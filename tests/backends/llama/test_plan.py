"""The arguments of llama-server, and the memory that its KV takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.backends.llama.find import built_server, find_server
from kakeya.backends.llama.plan import plan_of
from kakeya.backends.sizes import lease_sizes
from kakeya.core.errors import ConfigError
from kakeya.core.units import GIB, MIB
from kakeya.generation.spec import parse_model, resolve
from kakeya.memory.estimate.history import SizeHistory
from tests.gguf_files import tiny_meta, write_gguf

KV_BYTES = 2 * 2 * (16 + 16) * 2
"""Of one token: layers, heads, keys and values, bytes."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q4_1.gguf", tiny_meta())


def test_the_context_is_that_of_the_model_as_far_as_memory_goes(tmp_path: Path) -> None:
    long = {"llama.context_length": 131_072, "llama.block_count": 2000}
    model = write_gguf(tmp_path / "long.gguf", tiny_meta(**long))
    each = 1000 * KV_BYTES
    assert plan_of(model, memory_bytes=128 * GIB).kv_tokens == 32_768
    few = plan_of(model, memory_bytes=8 * GIB)
    assert few.kv_tokens == GIB // each // 256 * 256
    assert few.kv_bytes == few.kv_tokens * each


def test_options_win_over_what_is_chosen(model: Path) -> None:
    options = {"ctx_size": 1024, "parallel": 2, "gpu_layers": 9, "flash_attn": True, "threads": 3}
    plan = plan_of(model, options)
    assert (plan.kv_tokens, plan.slots, plan.kv_bytes) == (1024, 2, 1024 * KV_BYTES)
    assert plan.flags == ("--threads", "3", "--gpu-layers", "9", "--flash-attn", "on")


@pytest.mark.parametrize(
    ("cores", "options", "flags"),
    [
        (0, {}, ()),
        (1, {}, ("--threads", "1", "--threads-batch", "1")),
        (4, {}, ("--threads", "3", "--threads-batch", "4")),
        (4, {"threads_batch": 2}, ("--threads", "3", "--threads-batch", "2")),
        (4, {"threads": 2}, ("--threads", "2")),
    ],
)
def test_prompts_are_read_by_all_cores_and_tokens_by_all_but_one(
    model: Path, cores: int, options: dict[str, object], flags: tuple[str, ...]
) -> None:
    assert plan_of(model, options, cores=cores).flags == flags


@pytest.mark.parametrize("options", [{"ctx": 1}, {"ctx_size": -1}, {"threads": "two"}])
def test_a_wrong_option_is_refused_by_its_name(model: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        plan_of(model, options)


def test_a_model_that_cannot_be_served_is_refused_before_its_load(tmp_path: Path) -> None:
    spm = write_gguf(tmp_path / "spm.gguf", tiny_meta(**{"tokenizer.ggml.model": "llama"}))
    with pytest.raises(ConfigError, match="tokenizer 'llama'"):
        plan_of(spm)
    part = write_gguf(tmp_path / "part-00001-of-00002.gguf", tiny_meta())
    with pytest.raises(ConfigError, match=r"lacks part-00002-of-00002\.gguf"):
        plan_of(part)


def test_the_lease_has_the_file_and_all_keys_and_values(model: Path) -> None:
    plan = plan_of(model)
    sizes = lease_sizes(
        {"tiny": (str(model), "text")},
        64 * GIB,
        history=SizeHistory(),
        hub=None,
        fixed_kv_bytes={"tiny": plan.kv_bytes},
    )
    least = plan.kv_bytes + int(model.stat().st_size * 1.1)
    assert least < sizes["tiny"].bytes < least + 256 * MIB


def test_a_gguf_file_is_a_model_by_its_path_and_by_its_folder(model: Path) -> None:
    by_path, by_folder = parse_model(str(model)), parse_model(f"mine={model.parent}")
    assert by_path.model_id == "tiny.Q4_1"
    assert resolve(by_path) == resolve(by_folder) == str(model)
    write_gguf(model.with_name("other.gguf"), tiny_meta())
    with pytest.raises(ConfigError, match=r"other\.gguf"):
        resolve(by_folder)


def test_the_program_is_found_by_name_on_the_path_and_where_it_was_built(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert find_server(environ=environ) is None
    places = [built_server(environ, tmp_path), tmp_path / "bin" / "llama-server", tmp_path / "mine"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o755)
        named = str(place) if place.name == "mine" else ""
        assert find_server(named, environ=environ) == place
    with pytest.raises(ConfigError, match="no program"):
        find_server(str(tmp_path / "nothing"), environ=environ)
