"""What a node can lend to a ring group, and how fast it says that it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.chips import chip_speed, has_thunderbolt5
from kakeya.backends.ring.own_share import OwnShare, lendable_bytes
from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.units import MIB
from kakeya.generation.facts import ModelFacts
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import (
    COLD,
    TEXT_TARGET,
    Resident,
    ResidentKey,
    State,
)

TINY = str(EMBEDDED_FOLDER / "kakeya-tiny")


def ledger(*residents: Resident, free_mb: int = 1000) -> Snapshot:
    return Snapshot(
        budget_bytes=4000 * MIB,
        committed_bytes=0,
        free_bytes=free_mb * MIB,
        available_bytes=None,
        level=PressureLevel.NOMINAL,
        residents=residents,
        tenants=(),
        foreign={},
        waiting=(),
    )


def resident(size_mb: int) -> Resident:
    return Resident(
        key=ResidentKey("text-generate", "m"),
        role=TEXT_TARGET,
        state=State.READY,
        estimate_bytes=size_mb * MIB,
    )


def test_models_that_may_leave_make_room_and_pinned_and_lent_ones_do_not() -> None:
    pinned = replace(resident(200), warmth=replace(COLD, is_pinned=True))
    lent = replace(resident(100), role=replace(TEXT_TARGET, is_lent=True))
    loading = replace(resident(50), state=State.LOADING)
    assert lendable_bytes(ledger(resident(700), pinned, lent, loading)) == 1700 * MIB
    assert lendable_bytes(ledger(resident(7000))) == 4000 * MIB
    assert lendable_bytes(ledger(free_mb=-5)) == 0


async def test_a_measured_model_tells_the_speed_and_without_one_it_is_assumed() -> None:
    facts = ModelFacts(
        model_id="tiny",
        model_path=TINY,
        vocab_size=1,
        context_tokens=1,
        eos_token_ids=(),
        tokens_per_second=100.0,
        prefill_tokens_per_second=2000.0,
    )
    sources = {"tiny": TINY}
    model = cast("ResidentModel", SimpleNamespace(facts=facts))
    own = OwnShare(ledger, lambda: [model], sources)
    share = await own.describe()
    weights = await own.weights("tiny", takes_paths=False)
    assert share.speed_from == "measured"
    assert share.weights_per_s == 100 * (weights.read_bytes + weights.head_bytes)
    assert share.products_per_s == 2000 * weights.products
    assert (weights.kind, weights.has_tensor, weights.has_pipeline) == ("qwen3", True, False)
    assert (await OwnShare(ledger, tuple, sources).describe()).speed_from in ("assumed", "chip")


async def test_a_model_is_found_by_its_name_and_by_its_folder_if_the_caller_may() -> None:
    own = OwnShare(ledger, tuple, {"a": TINY, "b": "/no/such.gguf"})
    assert (await own.weights("a", takes_paths=False)).model_id == "a"
    assert (await own.weights(TINY, takes_paths=True)).model_id == "kakeya-tiny"
    with pytest.raises(NotFound):
        await own.weights(TINY, takes_paths=False)
    with pytest.raises(NotFound):
        await own.weights("/no/such/folder", takes_paths=True)
    with pytest.raises(NotFound, match="not on this machine"):
        await own.weights("no-such/model-here", takes_paths=True)
    with pytest.raises(InvalidArgument, match="llama-server"):
        await own.weights("b", takes_paths=False)


def test_chips_are_known_by_their_names() -> None:
    assert chip_speed("Apple M4 Pro").weights_per_s > chip_speed("Apple M4").weights_per_s
    assert not chip_speed("Neoverse-N1").is_known
    assert has_thunderbolt5("Apple M4 Pro")
    assert not has_thunderbolt5("Apple M4")
