"""The file of measured sizes: it reads back exactly, or it is set aside and named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.clock import SystemClock
from kakeya.memory.estimate.history import KEPT, MAX_MODELS, SizeHistory, SizeRecord
from kakeya.memory.estimate.size_file import SIZES, SizeFile, decode_sizes, encode_sizes, hub_folder
from kakeya.node.state_writer import StateWriter

SIZES_OF = st.lists(st.integers(1, 1 << 50), min_size=1, max_size=KEPT).map(tuple)
RECORDS = st.lists(
    st.builds(SizeRecord, st.text(max_size=70), st.text(max_size=10), SIZES_OF), max_size=20
).map(tuple)


@given(RECORDS)
def test_what_is_written_reads_back(records: tuple[SizeRecord, ...]) -> None:
    assert decode_sizes(encode_sizes(records)) == records


@given(RECORDS, st.data())
def test_a_changed_byte_never_reads_as_other_sizes(
    records: tuple[SizeRecord, ...], data: st.DataObject
) -> None:
    written = bytearray(encode_sizes(records))
    place = data.draw(st.integers(0, len(written) - 1))
    written[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert decode_sizes(bytes(written)) == records  # The case of an escape, say.


def test_the_first_start_knows_nothing(tmp_path: Path) -> None:
    assert SizeFile(tmp_path).load().snapshot() == ()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[1]",
        b'"sizes"',
        b"\xff\xfe",
        json.dumps({"version": 9, "sha256": "", "sizes": "[]"}).encode(),
        encode_sizes([SizeRecord("d", "text", (1,))])[:-9],
        encode_sizes([SizeRecord("d", "text", (-1,))]),
        encode_sizes([SizeRecord("d", "text", ())]),
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_set_aside_and_named(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SIZES).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert SizeFile(tmp_path).load().snapshot() == ()
    assert (tmp_path / f"{SIZES}.corrupt").read_bytes() == damage
    assert not (tmp_path / SIZES).exists()
    assert f"{SIZES}.corrupt" in str(caplog.records[0].__dict__)


def test_more_models_than_are_remembered_lose_the_oldest() -> None:
    records = [SizeRecord(f"m{number}", "text", (1,)) for number in range(MAX_MODELS + 3)]
    assert decode_sizes(encode_sizes(records))[0].digest == "m3"


async def test_a_keeper_saves_what_was_noted(tmp_path: Path) -> None:
    file = SizeFile(tmp_path)
    history = await asyncio.to_thread(file.load)
    keeper = StateWriter(history.snapshot, file.save, saved=history.snapshot(), clock=SystemClock())
    assert await keeper.flush()
    assert not await asyncio.to_thread(file.path.exists)  # Nothing to save yet.
    history.note("d", "text", 123)
    assert await keeper.flush()
    again: SizeHistory = await asyncio.to_thread(file.load)
    assert again.peak_bytes("d", "text") == 123


def test_where_models_are_cached() -> None:
    home = Path("/home/a")
    assert hub_folder({}, home) == Path("/home/a/.cache/huggingface/hub")
    assert hub_folder({"XDG_CACHE_HOME": "/c"}, home) == Path("/c/huggingface/hub")
    assert hub_folder({"HF_HOME": "/h", "XDG_CACHE_HOME": "/c"}, home) == Path("/h/hub")
    assert hub_folder({"HF_HUB_CACHE": "/x", "HF_HOME": "/h"}, home) == Path("/x")


def test_the_usual_time_of_a_load_is_kept_and_one_slow_load_does_not_count_alone(
    tmp_path: Path,
) -> None:
    history = SizeHistory()
    for seconds in (2.0, 60.0, 2.25):
        history.note_load("abc", "text", seconds)
    SizeFile(tmp_path).save(history.snapshot())
    kept = SizeFile(tmp_path).load()
    assert kept.load_s("abc", "text") == 2.25
    assert kept.load_s("abc", "draft") is None
    assert kept.peak_bytes("abc", "text") is None
