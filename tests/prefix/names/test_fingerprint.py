"""Fingerprints: every field counts, and a peer reads what was meant."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.prefix.names.fingerprint import KvFingerprint, fingerprint_of
from kakeya.v1 import distributed_pb2 as pb

OURS = KvFingerprint(
    model_id="tiny",
    weights_digest="aa",
    config_digest="bb",
    tokenizer_digest="cc",
    rope='{"theta": 10000}',
    layout='{"layers": 4}',
    kv_dtype="bfloat16",
    block_tokens=256,
    tenant="t",
    adapter="dd",
    exactness='{"mlx": "0.32"}',
)
ANOTHER: dict[str, object] = {
    "weights_digest": "ab",
    "config_digest": "ba",
    "tokenizer_digest": "",
    "rope": '{"theta": 500000}',
    "layout": '{"layers": 5}',
    "kv_dtype": "float16",
    "block_tokens": 128,
    "format_version": 2,
    "tenant": "",
    "adapter": "",
    "exactness": '{"mlx": "0.33"}',
}
words = st.text(st.characters(codec="utf-8", exclude_characters="+"), min_size=1, max_size=8)
maybe = st.one_of(st.just(""), words)
fingerprints = st.builds(
    KvFingerprint,
    model_id=maybe,
    weights_digest=words,
    config_digest=maybe,
    tokenizer_digest=maybe,
    rope=maybe,
    layout=words,
    kv_dtype=maybe,
    block_tokens=st.integers(0, 20).map(lambda n: 1 << n),
    format_version=st.integers(1, 999),
    tenant=maybe,
    adapter=maybe,
    exactness=words,
)


def test_another_is_tried_for_every_compared_field() -> None:
    assert {field.name for field in fields(KvFingerprint)} - {"model_id"} == set(ANOTHER)


@pytest.mark.parametrize("name", ANOTHER)
def test_every_field_makes_another_fingerprint(name: str) -> None:
    other = replace(OURS, **{name: ANOTHER[name]})  # type: ignore[arg-type]
    assert other.exact() != OURS.exact()
    assert (other.compat() == OURS.compat()) == (name == "exactness")


@pytest.mark.parametrize("name", ANOTHER)
def test_every_field_makes_another_message(name: str) -> None:
    other = replace(OURS, **{name: ANOTHER[name]})  # type: ignore[arg-type]
    assert other.to_wire() != OURS.to_wire()
    read = KvFingerprint.from_wire(other.to_wire())
    assert read is not None
    assert read.exact() != OURS.exact()


def test_names_of_models_are_not_compared() -> None:
    other = replace(OURS, model_id="another")
    assert (other.compat(), other.exact()) == (OURS.compat(), OURS.exact())


def test_what_moves_from_one_field_to_the_next_is_another_fingerprint() -> None:
    one = replace(OURS, config_digest="ab", tokenizer_digest="c")
    assert one.compat() != replace(OURS, config_digest="a", tokenizer_digest="bc").compat()


@settings(max_examples=40, deadline=None)
@given(fingerprints)
def test_the_wire_keeps_the_digests(ours: KvFingerprint) -> None:
    read = KvFingerprint.from_wire(ours.to_wire())
    assert read == ours.condensed()
    assert read is not None
    assert (read.compat(), read.exact()) == (ours.compat(), ours.exact())
    assert read.to_wire() == ours.to_wire()


@settings(max_examples=40, deadline=None)
@given(fingerprints, fingerprints)
def test_digests_are_equal_for_equal_fields_only(one: KvFingerprint, other: KvFingerprint) -> None:
    same = replace(other, model_id=one.model_id) == one
    assert (one.exact() == other.exact()) == same


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        pb.CacheCompatibility,
        model_revision=st.sampled_from(("", "aa", "aa+bb", "+", "aa+", "+bb", "a+b+c")),
        cache_format_version=st.sampled_from(
            ("", "kvb1/sha256:" + "0" * 64, "kvb0/sha256:" + "0" * 64, "v1", "kvb1/sha256:00")
        ),
        rope_hash=st.sampled_from(("", "sha256:" + "1" * 64, "plain")),
        layer_geometry_hash=st.sampled_from(("", "sha256:" + "2" * 64, "plain")),
        block_size_tokens=st.sampled_from((0, 3, 256)),
        sink_size=st.sampled_from((0, 4)),
        window_size=st.sampled_from((0, 64)),
    )
)
def test_whatever_is_read_says_the_same_again(message: pb.CacheCompatibility) -> None:
    read = KvFingerprint.from_wire(message)
    assert read is None or read.to_wire() == message


def test_a_message_of_another_implementation_is_a_miss() -> None:
    message = pb.CacheCompatibility(
        model_id="m", model_revision="r", cache_format_version="kakeya-kv-v1", sink_size=4
    )
    assert KvFingerprint.from_wire(message) is None


@pytest.mark.parametrize("name", ["weights_digest", "layout", "exactness"])
def test_what_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the {name} of 'tiny' is not known"):
        replace(OURS, **{name: ""})  # type: ignore[arg-type]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must have no '\\+'"):
        replace(OURS, weights_digest="a+b")
    with pytest.raises(InvalidArgument, match="format_version is 0"):
        replace(OURS, format_version=0)
    with pytest.raises(InvalidArgument, match="power of two"):
        replace(OURS, block_tokens=100)


def test_a_loaded_model_has_one_by_what_its_engine_says() -> None:
    def of(**changed: object) -> KvFingerprint:
        facts: dict[str, object] = {
            "model_id": "tiny",
            "base_fingerprint": "aa",
            "quantization": "4bit-g64",
            "dtype": "bfloat16",
            "vocabulary_digest": "cc",
            "kv_block_tokens": 256,
            "kv_layout": "{}",
            "kv_exactness": "{}",
        }
        return fingerprint_of(**facts | changed)  # type: ignore[arg-type]

    ours = of()
    assert ours == of()
    assert of(model_id="other").exact() == ours.exact()
    others = [
        of(base_fingerprint="ab"),
        of(quantization="8bit-g64"),
        of(dtype="float16"),
        of(vocabulary_digest="cd"),
        of(kv_block_tokens=128),
        of(kv_layout="[]"),
        of(kv_exactness="[]"),
        of(adapter="dd"),
        of(tenant="t"),
        of(config="{}"),
        of(rope="{}"),
    ]
    assert len({one.exact() for one in [ours, *others]}) == 1 + len(others)
