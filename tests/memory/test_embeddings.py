from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import errors
from kakeya.memory.arbiter.policy import Rung
from kakeya.memory.embeddings import (
    VisionEmbedding,
    VisionEmbeddingCache,
    embedding_key,
    normalised,
)


class Now:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def embedding(value: float = 0.0) -> VisionEmbedding:
    tokens = memoryview(array("f", [value] * 6))
    return VisionEmbedding(tokens=tokens, token_count=2, hidden_size=3)


def test_a_hit_and_a_miss() -> None:
    cache = VisionEmbeddingCache(mono=Now())
    one = embedding(1)
    cache.put("a", one)
    assert cache.get("a") is one
    assert cache.get("b") is None


def test_the_least_recently_used_goes_first_and_a_hit_counts_as_use() -> None:
    cache = VisionEmbeddingCache(mono=Now(), max_entries=2)
    for key in ("a", "b"):
        cache.put(key, embedding())
    cache.get("a")
    cache.put("c", embedding())
    assert cache.get("b") is None
    assert cache.get("a") is not None


def test_what_expired_goes_before_what_lives() -> None:
    now = Now()
    cache = VisionEmbeddingCache(mono=now, max_entries=2, ttl_s=10)
    cache.put("old", embedding())
    now.at = 5
    cache.put("young", embedding())
    cache.get("old")
    now.at = 10
    cache.put("new", embedding())
    assert cache.get("young") is not None


def test_an_entry_lives_its_time_whether_it_is_used_or_not() -> None:
    now = Now()
    cache = VisionEmbeddingCache(mono=now)
    cache.put("a", embedding())
    now.at = 299.9
    assert cache.get("a") is not None
    now.at = 300
    assert cache.get("a") is None


def test_purging_takes_only_what_expired() -> None:
    now = Now()
    cache = VisionEmbeddingCache(mono=now, ttl_s=10)
    cache.put("a", embedding())
    now.at = 5
    cache.put("b", embedding())
    now.at = 10
    assert cache.purge_expired() == 1
    assert len(cache) == 1


def test_putting_again_renews() -> None:
    now = Now()
    cache = VisionEmbeddingCache(mono=now, ttl_s=10)
    cache.put("a", embedding(1))
    now.at = 5
    cache.put("a", embedding(2))
    now.at = 12
    again = cache.get("a")
    assert again is not None
    assert again.tokens[0] == 2


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4), st.booleans())))
def test_it_never_holds_more_than_what_it_had_and_what_it_was_granted(
    puts: list[tuple[str, int, bool]],
) -> None:
    cache = VisionEmbeddingCache(mono=Now(), max_entries=3)
    for key, count, may_grow in puts:
        before = cache.usage().held_bytes
        asked: list[int] = []

        def answer(size: int, asked: list[int] = asked, may_grow: bool = may_grow) -> bool:
            asked.append(cache.usage().held_bytes + size)
            return may_grow

        one = VisionEmbedding(tokens=memoryview(bytes(count)), token_count=count, hidden_size=1)
        cache.put(key, one, answer)
        after = cache.usage().held_bytes
        assert after == asked[0] if may_grow else after <= before
        assert (cache.get(key) is one) == (may_grow or count <= before)
        assert len(cache) <= 3


def test_without_room_to_grow_the_newest_takes_the_place_of_the_oldest() -> None:
    cache = VisionEmbeddingCache(mono=Now())
    for key in ("a", "b", "c"):
        cache.put(key, embedding())
    cache.put("d", embedding(), lambda _: False)
    assert [cache.get(key) is not None for key in "abcd"] == [False, True, True, True]


async def test_it_is_a_tenant_that_gives_expired_bytes_first() -> None:
    now = Now()
    cache = VisionEmbeddingCache(mono=now, ttl_s=10)
    cache.put("old", embedding())
    now.at = 5
    cache.put("lru", embedding())
    cache.put("mru", embedding())
    now.at = 10
    usage = cache.usage()
    assert (usage.rung, usage.held_bytes, usage.expired_bytes, usage.spare_bytes) == (
        Rung.CACHE, 72, 24, 48,
    )  # fmt: skip
    await cache.shrink(24)
    assert len(cache) == 2
    await cache.shrink(1)
    assert cache.get("mru") is not None
    assert len(cache) == 1


def test_numbers_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="6 numbers; 8 are needed"):
        VisionEmbedding(tokens=memoryview(array("f", [0] * 6)), token_count=2, hidden_size=4)


@pytest.mark.parametrize(("entries", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_cache_that_keeps_nothing_is_refused(entries: int, ttl_s: float) -> None:
    with pytest.raises(errors.ConfigError):
        VisionEmbeddingCache(mono=Now(), max_entries=entries, ttl_s=ttl_s)


def test_a_key_names_its_family() -> None:
    keys = {embedding_key(*pair) for pair in [("a", b"bc"), ("ab", b"c"), ("b", b"bc")]}
    assert len(keys) == 3
    assert all(len(key) == 64 for key in keys)
    with pytest.raises(errors.InvalidArgument):
        embedding_key("", b"pixels")


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_one_picture_has_one_normal_form_in_every_order(
    width: int, height: int, data: st.DataObject
) -> None:
    count = width * height
    pixel = st.tuples(*[st.integers(0, 255)] * 3)
    pixels = data.draw(st.lists(pixel, min_size=count, max_size=count))
    forms = {
        "RGB": bytes(v for r, g, b in pixels for v in (r, g, b)),
        "BGR": bytes(v for r, g, b in pixels for v in (b, g, r)),
        "RGBA": bytes(v for r, g, b in pixels for v in (r, g, b, 255)),
        "BGRA": bytes(v for r, g, b in pixels for v in (b, g, r, 9)),
        "ARGB": bytes(v for r, g, b in pixels for v in (0, r, g, b)),
    }
    normal = {
        normalised(form, width, height, order=order, side=8)  # type: ignore[arg-type]
        for order, form in forms.items()
    }
    assert len(normal) == 1
    assert len(normal.pop()) == 8 * 8 * 3 * 4


def read(form: bytes, side: int) -> np.ndarray:
    return np.frombuffer(form, "<u4").reshape(side, side, 3) / 2**24


def test_a_small_picture_is_padded_and_a_large_one_reduced_to_its_means() -> None:
    dot = read(normalised(b"\x07", 1, 1, order="L", side=2), 2)
    assert dot[0, 0].tolist() == [7, 7, 7]
    assert (dot[[0, 1, 1], [1, 0, 1]] > 255).all(), "no pixel is like that"
    wide = read(normalised(bytes([0, 1, 2, 9, 4, 5, 6, 7] * 2), 8, 2, order="L", side=4), 4)
    assert wide[0, :, 0].tolist() == [0.5, 5.5, 4.5, 6.5]
    uneven = read(normalised(bytes([0, 30, 90]), 3, 1, order="L", side=2), 2)
    assert uneven[0, :, 0].tolist() == [10, 70], "the middle one counts half in either"


sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(1, 6), st.integers(1, 3), st.randoms())
def test_a_picture_of_which_each_pixel_was_repeated_meets_itself(
    width: int, height: int, side: int, times: int, rng: Random
) -> None:
    image = np.frombuffer(rng.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    side = min(side, max(width, height))  # it is as large as the model sees it, or larger
    large = image.repeat(times, axis=0).repeat(times, axis=1)
    assert normalised(image.tobytes(), width, height, side=side) == normalised(
        large.tobytes(), width * times, height * times, side=side
    )


@given(sizes, sizes, st.integers(1, 9), st.integers(1, 255), st.randoms())
def test_a_picture_that_differs_in_one_pixel_has_another_normal_form(
    width: int, height: int, side: int, change: int, rng: Random
) -> None:
    pixels = bytearray(rng.randbytes(width * height * 3))
    before = normalised(bytes(pixels), width, height, side=side)
    at = rng.randrange(len(pixels))
    pixels[at] = (pixels[at] + change) % 256
    assert normalised(bytes(pixels), width, height, side=side) != before


def test_one_pixel_of_a_screen_counts_by_the_least_step() -> None:
    screen = bytearray(b"\xff" * (1920 * 1080 * 3))
    before = normalised(bytes(screen), 1920, 1080, side=224)
    for at in (0, len(screen) // 2, len(screen) - 1):
        screen[at] = 254
        after = normalised(bytes(screen), 1920, 1080, side=224)
        assert after != before
        before = after


def test_black_around_a_picture_is_part_of_it() -> None:
    assert normalised(bytes(3), 1, 1, side=4) != normalised(bytes(6), 2, 1, side=4)


def test_bytes_that_are_no_such_image_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="12 are needed"):
        normalised(bytes(11), 2, 2, side=4)
    with pytest.raises(errors.InvalidArgument, match="a side of 1"):
        normalised(bytes(12), 2, 2, side=0)
