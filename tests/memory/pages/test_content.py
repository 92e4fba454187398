"""The score that decides who goes, and what a configuration of pages may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError
from kakeya.core.units import KIB, MIB
from kakeya.memory.pages.content import (
    PIN_RULES,
    ContentPriority,
    ContentType,
    PageConfig,
    keep_score,
)

ages = st.floats(0, 1e6)
pages = st.integers(1, 4096)
priorities = st.sampled_from(ContentPriority)


def keep(age_s: float, priority: ContentPriority, size: int = 1) -> float:
    return keep_score(age_s=age_s, pages=size, total_pages=4096, priority=priority)


@given(ages, pages, priorities)
def test_the_score_is_between_0_and_1(age_s: float, size: int, priority: ContentPriority) -> None:
    assert 0.0 <= keep(age_s, priority, size) <= 1.0


@given(ages, ages, pages, priorities)
def test_of_equal_content_and_size_the_older_goes_first(
    one: float, other: float, size: int, priority: ContentPriority
) -> None:
    young, old = sorted((one, other))
    assert keep(old, priority, size) <= keep(young, priority, size)


def test_a_prefix_idle_for_ever_goes_before_a_buffer_in_use_now() -> None:
    """S2.14 as first written says the opposite: 1.0 against 0.8."""
    assert keep(1e9, ContentPriority.KV_CACHE) < keep(0.0, ContentPriority.TEMP_BUFFER)


def test_of_equal_age_contents_go_in_the_order_of_their_priority() -> None:
    """S2.16."""
    scores = [keep(5.0, priority) for priority in ContentPriority]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_of_equal_age_and_content_the_smaller_goes_first() -> None:
    assert keep(5.0, ContentPriority.KV_CACHE, 1) < keep(5.0, ContentPriority.KV_CACHE, 100)


def test_every_content_has_a_pin_rule_and_a_priority() -> None:
    """GRADIENT has neither in the document (S2.13, S2.16)."""
    assert set(PIN_RULES) == set(ContentType)
    assert PIN_RULES[ContentType.GRADIENT].priority is ContentPriority.GRADIENT


@pytest.mark.parametrize("size", [512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB])
def test_four_page_sizes_are_allowed(size: int) -> None:
    assert PageConfig(page_bytes=size).page_bytes == size


def test_the_defaults_are_those_of_the_document() -> None:
    """S2.33, S2.34, S2.35."""
    config = PageConfig()
    assert (config.page_bytes, config.total_pages) == (2 * MIB, 4096)
    assert (config.fit, config.ready_blocks, config.pin_limit_s) == ("best_fit", 16, 30.0)
    assert config.wait_limit_s == 0.1
    assert (config.headroom, config.high_watermark, config.low_watermark) == (0.1, 0.90, 0.80)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"page_bytes": 3 * MIB}, "must be one of 512.0 KiB, 1.0 MiB, 2.0 MiB, 4.0 MiB"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"slab_pages": 0}, "slab_pages is 0"),
        ({"slab_pages": 64, "total_pages": 32}, r"1\.\.total_pages \(32\)"),
        ({"ready_blocks": 0}, "ready_blocks is 0"),
        ({"headroom": -0.1}, "headroom is -0.1"),
        ({"low_watermark": 0.9}, "0 < low < high <= 1"),
        ({"high_watermark": 1.1}, "0 < low < high <= 1"),
        ({"high_watermark": float("nan")}, "0 < low < high <= 1"),
        ({"wait_limit_s": -1.0}, "wait_limit_s is -1.0"),
        ({"pin_limit_s": 0.0}, "pin_limit_s is 0.0"),
        ({"pin_limit_s": float("nan")}, "pin_limit_s is nan"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PageConfig(**wrong)
