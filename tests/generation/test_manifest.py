"""Tables [models.NAME]: what they say is read, shown, and told apart from what lists say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.config.config import NodeConfig, load
from kakeya.core.errors import ConfigError
from kakeya.generation.manifest import BACKENDS, Category, Manifest
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.arbiter.resident import Warmth
from kakeya.memory.config import MemoryConfig

Load = Callable[[str], NodeConfig]
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
SHOWN = st.fixed_dictionaries(
    {},
    optional={
        "pin": st.booleans(),
        "size_mb": st.integers(1, 1 << 20),
        "stay_warm_s": st.floats(0, 604_800),
        "may_displace_text": st.just(True),
        "template": st.just(TEMPLATE),
        "thinking": st.sampled_from(["on", "off"]),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "max_tokens": st.integers(1, 1 << 20),
        "category": st.sampled_from(["text", "vision", "diffusion"]),
        "backend": st.sampled_from(BACKENDS),
        "options": st.dictionaries(
            st.from_regex(r"[a-z_]+", fullmatch=True),
            st.one_of(st.integers(-9, 9), st.booleans(), st.sampled_from(["q8_0", "auto"])),
            min_size=1,
        ),
    },
)


@pytest.fixture
def load_file(tmp_path: Path) -> Load:
    def load_text(toml: str) -> NodeConfig:
        file = tmp_path / "node.toml"
        file.write_text(toml)
        return load(["--config", str(file)], {})

    return load_text


def _line(name: str, value: object) -> str:
    if isinstance(value, dict):
        return f"{name} = {{{', '.join(_line(key, one) for key, one in value.items())}}}"
    return f"{name} = {json.dumps(value)}"


def model_of(config: NodeConfig, name: str) -> ModelSpec:
    (found,) = (one for one in config.models if one.model_id == name)
    return found


@given(SHOWN)
@settings(max_examples=60, deadline=None)
def test_what_a_table_says_is_what_is_shown_of_it(
    tmp_path_factory: pytest.TempPathFactory, said: dict[str, object]
) -> None:
    file = tmp_path_factory.mktemp("tables") / "node.toml"
    lines = [_line(name, value) for name, value in said.items()]
    file.write_text("\n".join(["[models.kakeya-tiny]", *lines]))
    model = model_of(load(["--config", str(file)], {}), "kakeya-tiny")
    assert model.manifest.describe() == said
    assert model.category == said.get("category", "text")


def test_a_table_with_a_path_serves_its_model_behind_the_list(load_file: Load) -> None:
    config = load_file(
        '[models]\nserve = ["kakeya-tiny"]\nproposers = ["ngram"]\n'
        '[models.agent]\npath = "kakeya-tiny-tools"\npin = true\n'
        '[models."org/encoder"]\npath = "kakeya-tiny-draft"\ncategory = "embedding"\n'
        "[models.kakeya-tiny]\nmax_tokens = 9\n"
    )
    assert [(one.model_id, one.source, one.role) for one in config.models] == [
        ("kakeya-tiny", "kakeya-tiny", ModelRole.VERIFIER),
        ("agent", "kakeya-tiny-tools", ModelRole.VERIFIER),
        ("org/encoder", "kakeya-tiny-draft", ModelRole.EMBEDDER),
        ("ngram", "ngram", ModelRole.PROPOSER),
    ]
    assert model_of(config, "kakeya-tiny").manifest.max_tokens == 9
    assert model_of(config, "org/encoder").category is Category.EMBEDDING
    assert model_of(config, "agent").manifest.pin


def test_a_template_is_read_from_the_file_that_a_table_names(
    load_file: Load, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    said = model_of(load_file(f'[models.kakeya-tiny]\ntemplate = "{file}"'), "kakeya-tiny")
    assert said.manifest.template == (TEMPLATE, str(file))
    assert said.manifest.describe() == {"template": str(file)}


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[models.kakeya-tinny]", ["models.kakeya-tinny has no path", "mean kakeya-tiny?"]),
        ("[models.ngram]", ["models.ngram has no path"]),
        ('[models."a b"]\npath = "kakeya-tiny"', ["models.a b", "letters, digits"]),
        ("[models.m]\npinn = true", ["unknown key models.m.pinn", "mean models.m.pin?"]),
        ("[models.m]\nthinking = true", ["models.m.thinking", "on or off or auto"]),
        ("[models.m]\ntop_p = 0", ["models.m.top_p: 0", "out of range"]),
        ('[models.m]\nbackend = "mxl"', ["models.m.backend: 'mxl'", "give mlx"]),
        ("[models.m]\noptions = 3", ["models.m.options: 3 is no table"]),
        ("[models.m.options]\na = [1]", ["models.m.options: a is [1]", "give a text"]),
        ('[models.m]\ntemplate = "no.jinja"', ["models.m.template: 'no.jinja' cannot be read"]),
        (
            '[models.kakeya-tiny]\ntemplate = "a\\n{% for %}"',
            ["models.kakeya-tiny.template: line 2", "jinja2"],
        ),
        (
            '[models]\nserve = ["m=kakeya-tiny"]\n[models.m]\npath = "kakeya-tiny-draft"',
            ["models.m.path is 'kakeya-tiny-draft'", "models.serve says 'kakeya-tiny'"],
        ),
        (
            '[models]\nproposers = ["m=kakeya-tiny"]\n[models.m]\nrole = "verifier"',
            ["models.m.role is verifier", "models.proposers says proposer"],
        ),
        (
            '[models.kakeya-tiny]\ncategory = "embedding"',
            ["models.kakeya-tiny.category is embedding", "verifier"],
        ),
        (
            '[models.kakeya-tiny]\npin = false\n[memory]\npinned = ["kakeya-tiny"]',
            ["models.kakeya-tiny.pin is false", "memory.pinned"],
        ),
        (
            '[models.kakeya-tiny]\nsize_mb = 5\n[memory]\nsizes_mb = ["kakeya-tiny=6"]',
            ["models.kakeya-tiny.size_mb and memory.sizes_mb differ"],
        ),
        (
            "[models.kakeya-tiny]\nstay_warm_s = 500\n[memory]\nunload_after_s = 400",
            ["models.kakeya-tiny.stay_warm_s is 500 s", "memory.unload_after_s, 400 s"],
        ),
    ],
)
def test_a_wrong_table_is_one_sentence_that_names_it(
    load_file: Load, toml: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_file(toml)
    for word in words:
        assert word in refused.value.message


def test_what_is_said_twice_and_alike_is_taken(load_file: Load) -> None:
    config = load_file(
        '[models]\nserve = ["m=kakeya-tiny"]\n'
        '[models.m]\npath = "kakeya-tiny"\nrole = "verifier"\npin = true\nsize_mb = 6\n'
        '[memory]\npinned = ["m"]\nsizes_mb = ["m=6"]\n'
    )
    assert model_of(config, "m").source == "kakeya-tiny"


def test_an_option_that_a_backend_lacks_is_refused_with_a_near_name() -> None:
    said = Manifest(options=(("ctx_sise", 4),))
    with pytest.raises(ConfigError, match=r"models\.m\.options\.ctx_sise: x .*mean ctx_size\?"):
        said.check_options("m", "x", known=("ctx_size", "slots"))
    with pytest.raises(ConfigError, match="mlx has no options"):
        said.check_options("m", "mlx", known=())
    Manifest(options=(("slots", 4),)).check_options("m", "x", known=("ctx_size", "slots"))


@pytest.mark.parametrize(
    ("manifest", "category", "seconds"),
    [
        (Manifest(), Category.TEXT, 200),
        (Manifest(), Category.EMBEDDING, 200),
        (Manifest(), Category.VISION, 60),
        (Manifest(), Category.DIFFUSION, 600),
        (Manifest(stay_warm_s=0), Category.DIFFUSION, 0),
        (Manifest(stay_warm_s=7), Category.TEXT, 7),
    ],
)
def test_a_model_stays_warm_as_its_table_says_else_as_its_category(
    manifest: Manifest, category: Category, seconds: float
) -> None:
    config = MemoryConfig(stay_warm_s=200, unload_after_s=600)
    warmth = config.warmth(manifest, category, is_pinned=False)
    assert warmth == Warmth(stay_warm_s=seconds, unload_after_s=600)
    assert MemoryConfig().warmth(Manifest(), Category.DIFFUSION, is_pinned=True) == Warmth(
        stay_warm_s=900, is_pinned=True
    )
