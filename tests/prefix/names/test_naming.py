"""Names of KV: by all of the weights that an engine read, made once, kept over a restart."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.generation.facts import ModelFacts
from kakeya.prefix.names import naming as prefix_names
from kakeya.prefix.names.naming import PrefixNames
from kakeya.prefix.names.weights import weights_state
from tests.prefix.names.test_weights import model
from tests.prefix.test_prefixes import FACTS


def no_adapter(_adapter_id: str) -> str:
    raise AssertionError


async def facts_of(folder: Path) -> ModelFacts:
    state = await asyncio.to_thread(weights_state, folder)
    return replace(FACTS, model_path=str(folder), weights_state=state)


async def test_one_other_byte_of_the_weights_is_another_name(tmp_path: Path) -> None:
    names = PrefixNames(no_adapter)
    folder = model(tmp_path / "m")
    first = await names.find(await facts_of(folder), 1, "")
    assert first is not None
    data = bytearray(100_000)
    data[33_333] = 1
    model(folder, bytes(data))
    second = await names.find(await facts_of(folder), 2, "")
    assert second is not None
    assert second.seed != first.seed
    model(folder)
    third = await names.find(await facts_of(folder), 3, "")
    assert third is not None
    assert third.seed == first.seed


async def test_what_a_model_without_a_name_yet_may_use_counts_as_usable() -> None:
    names = PrefixNames(no_adapter)

    async def seed_of(model_id: str, weights: str) -> bytes:
        facts = replace(FACTS, model_id=model_id, base_fingerprint=weights)
        naming = await names.find(facts, 1, "")
        assert naming is not None
        return naming.seed

    other = await PrefixNames(no_adapter).find(replace(FACTS, model_id="b"), 1, "")
    assert other is not None
    old, new = await seed_of("a", "old"), await seed_of("a", "new")
    known = {
        old: {"model_id": "a"},
        new: {"model_id": "a"},
        other.seed: {"model_id": "b"},
        other.ending_seed: {"model_id": "b (logits)"},
        b"renamed": {"model_id": "c"},
    }

    def useless(*served: str) -> set[bytes]:
        return known.keys() - names.usable(known, served, tuple)

    assert useless("a", "b") == {old}
    await seed_of("b", FACTS.base_fingerprint)
    assert useless("a", "b") == {old, b"renamed"}
    assert useless("b") == {old, new, b"renamed"}
    await seed_of("b", "others")
    assert useless("a", "b") == known.keys() - {new}


async def test_what_an_engine_read_and_lies_there_no_more_has_no_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = PrefixNames(no_adapter)
    folder = model(tmp_path / "m")
    facts = await facts_of(folder)
    model(folder, b"others")
    for _ in range(2):
        assert await names.find(facts, 1, "") is None
    assert await names.find(replace(facts, weights_state=""), 2, "") is None
    said = [record.getMessage() for record in caplog.records]
    assert sum("no safe name" in one for one in said) == 2


async def test_digests_are_kept_over_a_restart_and_damaged_ones_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = model(tmp_path / "m"), tmp_path / "weights.json"
    names = PrefixNames(no_adapter, file=file)
    first = await names.find(await facts_of(folder), 1, "")
    assert first is not None
    await names.aclose()

    def unwanted(*_: object) -> str:
        raise AssertionError("the digest is known")

    with monkeypatch.context() as patched:
        patched.setattr(prefix_names, "weights_digest", unwanted)
        again = await PrefixNames(no_adapter, file=file).find(await facts_of(folder), 2, "")
    assert again is not None
    assert again.seed == first.seed
    for damage in (b"{", b"[]", json.dumps({"x": 5}).encode()):
        file.write_bytes(damage)
        names = PrefixNames(no_adapter, file=file)
        anew = await names.find(await facts_of(folder), 3, "")
        await names.aclose()
        assert anew is not None
        assert anew.seed == first.seed


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 1), (50.0, 5)])
async def test_a_request_waits_for_a_digest_no_longer_than_its_prefill_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, tokens: int
) -> None:
    may_end = threading.Event()

    def made_later(*_: object) -> str:
        assert may_end.wait(20)
        return "0" * 64

    monkeypatch.setattr(prefix_names, "weights_digest", made_later)
    names = PrefixNames(no_adapter)
    facts = replace(await facts_of(model(tmp_path / "m")), prefill_tokens_per_second=rate)
    assert await names.find(facts, 1, "", tokens=tokens) is None
    warming = asyncio.create_task(names.has_name(facts))  # one that is cut off ends no digest
    await asyncio.wait((warming,), timeout=0.01)
    warming.cancel()
    await asyncio.gather(warming, return_exceptions=True)
    may_end.set()
    assert await names.find(facts, 1, "") is not None
    assert await names.has_name(facts)
    await names.aclose()
