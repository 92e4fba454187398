"""Hidden states: those of one whole forward, however the text was computed, and up to a peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import ConfigError
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.serve.service import ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService
from kakeya.generation.request import DecodeJob, DraftSource
from kakeya.mlx.diffusion.tap import StateRows, StateTap
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier
from tests.decoding.servers import serving
from tests.engine.rig import Rig, tools
from tests.mlx.diffusion.rig import write_drafter
from tests.mlx.random_models import write_model

TEXT = [4 + 11 * place % 80 for place in range(40)]
CLOSE = 2e-3


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("d"), verifier_hidden_size=64, vocab_size=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("v") / "llama", "llama")


@pytest.fixture(scope="module")
def tapped(folder: Path, drafter: Path) -> LoadedModel:
    return load(str(folder), "v", states_for=("d", drafter))


def job(*sources: DraftSource) -> DecodeJob:
    return DecodeJob(token_ids=TEXT, max_tokens=60, draft_sources=sources)


def whole(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """The rows of a text, of one forward."""
    assert model.tap is not None
    with model.tap.open() as outputs:
        model.forward(mx.array([list(tokens)]), model.make_cache())
    return np.array(model.tap.project(outputs)[0].astype(mx.float32))


def rows_of(states: HiddenStates | None) -> np.ndarray:
    assert states is not None
    return np.frombuffer(states.data, "<f2").reshape(-1, states.width).astype(np.float32)


def test_states_are_those_of_one_forward_over_the_text(tapped: LoadedModel) -> None:
    state, wanted = MlxVerifier(tapped), whole(tapped, TEXT)
    assert state.hidden_states(0, 40) is None
    state.prefill(TEXT[:9])
    state.launch(TEXT[9])
    state.collect()
    state.verify([*TEXT[10:13], 5, 6])
    assert state.trim(2)
    state.verify(TEXT[13:20])
    found = state.hidden_states(0, 40)
    assert found is not None
    assert (found.first, found.end) == (0, 20)
    assert np.abs(rows_of(found) - wanted[:20]).max() < CLOSE
    assert rows_of(state.hidden_states(5, 8)).tolist() == rows_of(found)[5:8].tolist()
    assert state.hidden_states(20, 40) is None


def test_a_tap_changes_no_bit(folder: Path, tapped: LoadedModel) -> None:
    plain = load(str(folder), "v")
    for model in (plain, tapped):
        model.forward(mx.array([TEXT]), model.make_cache())
    one, other = (MlxVerifier(model).step(mx.array([5])) for model in (plain, tapped))
    assert mx.array_equal(one, other)
    assert type(tapped.network.model.layers[0]) is type(plain.network.model.layers[0])


def test_rows_behind_a_gap_begin_anew(tapped: LoadedModel) -> None:
    state = MlxVerifier(tapped)
    state.prefill(TEXT[:9])
    state.step(mx.array([TEXT[9]]))
    state.appended()  # together with other sequences, which tells no states
    state.verify(TEXT[11:14])
    found = state.hidden_states(0, 40)
    assert found is not None
    assert (found.first, found.end) == (11, 14)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=90))
def test_rows_stay_with_their_tokens(tapped: LoadedModel, changes) -> None:
    assert tapped.tap is not None
    rows, held = StateRows(tapped.tap), dict[int, int]()
    for mark, (at, count) in enumerate(changes):
        rows.add(at, mx.full((count, tapped.tap.width), mark, mx.float16))
        held = {place: value for place, value in held.items() if place < at}
        held = held if at - 1 in held else {}
        held |= dict.fromkeys(range(at, at + count), mark)
    found = rows.read(0, 100)
    if not held:
        assert found is None
        return
    assert found is not None
    assert rows_of(found)[:, 0].tolist() == [held[at] for at in range(found.first, found.end)]
    assert found.end == max(held) + 1
    assert found.first == max(min(held), found.end - tapped.tap.most_rows)


def test_models_that_cannot_be_tapped_are_loaded_without(tmp_path: Path, drafter: Path) -> None:
    wide = write_drafter(tmp_path / "d", verifier_layers=(0, 9), verifier_hidden_size=64)
    model = load(str(write_model(tmp_path / "m", "llama")), "m", states_for=("d", wide))
    assert model.tap is None
    with pytest.raises(ConfigError, match=r"layers \[0, 9\] are asked for, and the model has 2"):
        StateTap(model.network, "d", wide)
    assert load(str(tmp_path / "m"), "m", states_for=("d", tmp_path / "m")).tap is None
    narrow = write_drafter(tmp_path / "n", verifier_hidden_size=12)
    with pytest.raises(ConfigError, match=r"d reads hidden states \[B, L, 12\]"):
        MlxVerifier(load(str(tmp_path / "m"), "m", states_for=("d", narrow))).prefill([5, 6])


class Reader:
    """Notes the states that come with each request; drafts what was right before, then wrong."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], HiddenStates]] = []

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float,
        num_steps: int,
        states: HiddenStates | None,
    ) -> Draft:
        if states is not None:
            self.asked.append((list(prefix), states))
        return Draft(source="d", tokens=(prefix[-1],) * min(3, size), forward_passes=1)


def test_an_engine_streams_the_states_of_committed_tokens(
    folder: Path, tapped: LoadedModel
) -> None:
    plain, _ = Rig(MlxModel(load(str(folder), "v"), 0.0, False), tools()).run(job())
    rig, reader = Rig(MlxModel(tapped, 0.0, False), tools()), Reader()
    assert rig.model.facts.states_for == "d"
    service = ProposerService({"d": reader, "other": reader})
    with serving(service, DraftStreamService(service)) as address:
        for name in ("other", "d"):
            peer = DraftSource(kind="remote", address=address, model_id=name, extended=True)
            drafted, _ = rig.run(job(peer))
            assert drafted == plain
            assert bool(reader.asked) == (name == "d")
    for prefix, states in reader.asked:
        assert states.end <= len(prefix)
        wanted = whole(tapped, prefix[: states.end])[states.first :]
        assert np.abs(rows_of(states) - wanted).max() < CLOSE
