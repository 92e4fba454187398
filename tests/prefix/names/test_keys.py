"""Keys of requests: which hint counts, which slot it gives, and that no two ids become one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.prefix.names.keys import (
    ANY_SLOT,
    SYSTEM_PREFIX,
    CacheKeys,
    PromptSegment,
    derive_slot_id,
    hash_stable_prefix,
    resolve_key,
    sanitise,
)

ALL = CacheKeys(
    conversation_id="room-1", segment_hash="aa", prefix_hash="bb", prompt_cache_key="cc"
)
segments = st.lists(st.builds(PromptSegment, content=st.text(), stable=st.booleans()), max_size=6)


@pytest.mark.parametrize(
    ("missing", "key"),
    [
        ((), "conv:room-1"),
        (("conversation_id",), "seg:aa"),
        (("conversation_id", "segment_hash"), "pfx:bb"),
        (("conversation_id", "segment_hash", "prefix_hash"), "v5:cc"),
        (("conversation_id", "segment_hash", "prefix_hash", "prompt_cache_key"), None),
    ],
)
def test_the_first_hint_that_is_given_counts(missing, key):
    assert resolve_key(replace(ALL, **dict.fromkeys(missing, ""))) == key


def test_a_cache_key_that_carries_its_prefix_already_gets_no_second_one():
    assert resolve_key(CacheKeys(prompt_cache_key="v5:abc")) == "v5:abc"
    assert resolve_key(CacheKeys(prompt_cache_key="v5:")) is None


@pytest.mark.parametrize("parallel", [0, -1, -16])
def test_without_slots_or_a_key_any_slot_will_do(parallel):
    assert derive_slot_id("conv:a", parallel) == ANY_SLOT == -1
    assert derive_slot_id("", 4) == -1


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1), st.integers(1, 256))
def test_a_slot_is_the_head_of_the_keys_hash(key, parallel):
    head = int.from_bytes(sha256(key.encode("utf-8", "surrogatepass")).digest()[:4], "big")
    assert derive_slot_id(key, parallel) == (0 if parallel == 1 else head % parallel)


def test_slots_are_spread_evenly():
    counts = Counter(derive_slot_id(f"conv:room-{n}", 4) for n in range(800))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) < 80


@settings(max_examples=60, deadline=None)
@given(segments)
def test_only_the_stable_run_at_the_beginning_is_hashed(run):
    stable = next((i for i, segment in enumerate(run) if not segment.stable), len(run))
    digest = hash_stable_prefix(run)
    assert digest == hash_stable_prefix(run[:stable])
    assert (digest is None) == (stable == 0)
    assert digest is None or re.fullmatch("[0-9a-f]{16}", digest)


@settings(max_examples=60, deadline=None)
@given(
    segments, st.text(), st.lists(st.builds(PromptSegment, content=st.text(), stable=st.booleans()))
)
def test_a_tail_with_a_time_stamp_leaves_the_hash_alone(run, stamp, later):
    run = [segment for segment in run if segment.stable]
    tail = [PromptSegment(content=stamp, stable=False), *later]
    assert hash_stable_prefix(run + tail) == hash_stable_prefix(run)


@settings(max_examples=60, deadline=None)
@given(segments.map(lambda run: [s for s in run if s.stable]), st.integers(0), st.text())
def test_another_text_gives_another_hash(run, at, content):
    if not run or run[at % len(run)].content == content:
        return
    other = [*run]
    other[at % len(run)] = PromptSegment(content=content, stable=True)
    assert hash_stable_prefix(other) != hash_stable_prefix(run)


def test_where_the_segments_end_counts():
    def stable(*texts):
        return [PromptSegment(content=text, stable=True) for text in texts]

    assert hash_stable_prefix(stable("ab", "c")) != hash_stable_prefix(stable("a", "bc"))


@pytest.mark.parametrize(
    "malformed", [None, 3, "text", {}, [None], ["x"], [PromptSegment(content=3, stable=True)]]
)
def test_malformed_segments_fall_through_to_the_next_key(malformed):
    digest = hash_stable_prefix(malformed)
    assert digest is None
    assert resolve_key(CacheKeys(segment_hash=digest or "", prefix_hash="p")) == "pfx:p"


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text())
def test_no_two_ids_become_one(one, other):
    assert (sanitise(one) == sanitise(other)) == (one == other)
    assert (sanitise(one).lower() == sanitise(other).lower()) == (one == other)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_a_sanitised_id_is_a_safe_name_and_no_plain_id_is_changed(raw):
    name = sanitise(raw)
    assert re.fullmatch(r"[a-z0-9_-][a-z0-9._~-]*|~[0-9a-f]{32}", name)
    assert len(name) <= 64
    assert ".." not in name or name == raw


@pytest.mark.parametrize(
    ("one", "other"),
    [("a/b", "c/b"), ("a/b", "a-b"), ("A", "a"), ("a" * 64, "a" * 65), ("a.", "a.."), (" a", "a")],
)
def test_ids_that_are_easily_confused_stay_apart(one, other):
    assert sanitise(one) != sanitise(other)


@pytest.mark.parametrize("plain", ["room-1", "a", "0", "x" * 64, "a.b_c", "a.long.bin"])
def test_plain_ids_stay(plain):
    assert sanitise(plain) == plain


@pytest.mark.parametrize("odd", ["..", ".", "", "../../etc", ".hidden", "a\x00b", "\ud800", "日本"])
def test_odd_ids_become_names(odd):
    assert re.fullmatch(r"[a-z0-9_-]*~[0-9a-f]{32}", sanitise(odd))


def test_no_hashed_name_can_be_given_as_a_plain_id():
    assert sanitise(sanitise("A")) != sanitise("A")


def test_no_conversation_gets_the_name_of_declared_prompts():
    assert resolve_key(CacheKeys(conversation_id="__system_prefix__")) != SYSTEM_PREFIX
