"""Pieces of prompts that are computed layer by layer, and together: the very bits of each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.mlx.batch import prompts
from kakeya.mlx.batch.batch import at_once, hand_over
from kakeya.mlx.batch.prompts import LayeredForward, can_split, pieces_check
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.verifier import MlxVerifier
from tests.arithmetic import own_arithmetic
from tests.laws import law
from tests.mlx.random_models import write_model

KINDS = ("llama", "gemma3", "mamba")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    found = {}
    for kind in KINDS:
        folder = write_model(tmp_path_factory.mktemp("models") / kind, kind)
        found[kind] = load(str(folder), kind)
        hand_over(found[kind].network)
    return found


def text(count: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 90 for at in range(count)]


def held(state: MlxVerifier) -> list[np.ndarray]:
    """What the caches hold, as numbers."""
    found = []
    for layer in kv_layers.layers_of(state.cache):
        parts = kv_layers.arrays(layer)
        if kv_layers.grows(layer):
            parts = [part[:, :, : layer.offset] for part in parts]
        found += [np.array(part.astype(mx.float32)) for part in parts]
    return found


def is_same(one: MlxVerifier, other: MlxVerifier) -> bool:
    pairs = zip(held(one), held(other), strict=True)
    return one.length == other.length and all(np.array_equal(a, b) for a, b in pairs)


def whole(model: LoadedModel, *pieces: list[int]) -> MlxVerifier:
    state = MlxVerifier(model)
    for piece in pieces:
        state.prefill(piece)
    return state


def finish(forward: LayeredForward, between: Callable[[], object] = lambda: None) -> None:
    while not forward.advance():
        between()


@law(30, part=3)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    parts=st.integers(1, 9),
)
def test_in_any_parts_a_piece_has_the_bits_of_one_that_is_computed_at_once(
    models: dict[str, LoadedModel], kind: str, sizes: list[int], parts: int
) -> None:
    model, pieces = models[kind], [text(size, at) for at, size in enumerate(sizes)]
    state, other = MlxVerifier(model), whole(model, text(9))
    for piece in pieces:
        finish(LayeredForward(model, [state], [piece], parts), lambda: other.verify([5]))
    assert is_same(state, whole(model, *pieces))


@own_arithmetic
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_a_model_of_one_layer_computes_pieces_in_one_part(tmp_path: Path, parts: int) -> None:
    folder = write_model(tmp_path, "llama", changes={"num_hidden_layers": 1})
    model = load(str(folder), "one")
    hand_over(model.network)
    pieces = [text(20, 7), text(33, 8), text(1, 9)]
    states = [whole(model, text(10, at)) for at in range(3)]
    forward = LayeredForward(model, states, pieces, parts)
    assert forward.parts == 1
    finish(forward)
    finish(LayeredForward(model, states[:1], [text(40)], parts))
    alone = [whole(model, text(10, at), piece) for at, piece in enumerate(pieces)]
    alone[0].prefill(text(40))
    assert all(map(is_same, states, alone))
    assert [state.verify([5, 6]) for state in states] == [state.verify([5, 6]) for state in alone]
    assert at_once(pieces_check(model)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_that_is_given_up_leaves_no_trace(
    models: dict[str, LoadedModel], kind: str
) -> None:
    model = models[kind]
    state = whole(model, text(40))
    for parts in range(1, 9):
        forward = LayeredForward(model, [state], [text(30, parts)], 8)
        for _ in range(min(parts, forward.parts - 1)):
            forward.advance()
        forward.leave(state)
        assert is_same(state, whole(model, text(40)))
        finish(forward)
        assert state.length == 40
    state.prefill(text(20, 5))
    assert is_same(state, whole(model, text(40), text(20, 5)))


def test_a_piece_is_appended_without_a_copy_of_the_kv(models: dict[str, LoadedModel]) -> None:
    model = models["llama"]
    state = whole(model, text(40))

    def places() -> list[int]:
        parts = [part for layer in state.cache for part in (layer.keys, layer.values)]
        return [np.array(part, copy=False).ctypes.data for part in parts]

    before = places()
    finish(LayeredForward(model, [state], [text(30)], 8))
    assert places() == before
    assert state.length == 70


@own_arithmetic
@law(30, part=3)
@given(
    kind=st.sampled_from(("llama", "gemma3")),
    befores=st.lists(st.integers(0, 50), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 50), min_size=5, max_size=5),
    parts=st.integers(1, 9),
)
def test_pieces_of_several_prompts_have_the_bits_that_each_has_alone(
    models: dict[str, LoadedModel], kind: str, befores: list[int], sizes: list[int], parts: int
) -> None:
    model = models[kind]
    alone, together, pieces = [], [], []
    for at, (before, size) in enumerate(zip(befores, sizes, strict=False)):
        first = [text(before, at)] if before else []
        pieces.append(text(size, 50 + at))
        together.append(whole(model, *first))
        alone.append(whole(model, *first, pieces[-1]))
    finish(LayeredForward(model, together, pieces, parts))
    assert all(map(is_same, alone, together))


@own_arithmetic
def test_the_others_go_on_where_one_leaves_a_shared_forward(
    models: dict[str, LoadedModel],
) -> None:
    model = models["llama"]
    states = [whole(model, text(10, at)) for at in range(3)]
    pieces = [text(20, 7), text(20, 8), text(20, 9)]
    forward = LayeredForward(model, states, pieces, 8)
    forward.advance()
    forward.leave(states[1])
    finish(forward)
    for at in (0, 2):
        assert is_same(states[at], whole(model, text(10, at), pieces[at]))
    assert is_same(states[1], whole(model, text(10, 1)))


@own_arithmetic
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_one_that_left_a_shared_forward_goes_on_beside_it(
    models: dict[str, LoadedModel], kind: str
) -> None:
    """As a request does that goes on from the KV of a cancelled one, while others are computed."""
    model = models[kind]
    states = [whole(model, text(10, first)) for first in (3, 1)]
    forward = LayeredForward(model, states, [text(20, 7), text(20, 8)], 8)
    forward.leave(states[0])
    said = states[0].verify([5, 6, 7])
    finish(forward)
    alone = whole(model, text(10))
    assert said == alone.verify([5, 6, 7])
    assert is_same(states[0], alone)
    assert states[0].verify([8]) == alone.verify([8])
    assert is_same(states[1], whole(model, text(10, 1), text(20, 8)))


@own_arithmetic
def test_the_least_piece_that_may_be_shared_is_found_by_bits(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["llama"]
    assert at_once(pieces_check(model)) == 1, "here any number of rows has the same bits"
    monkeypatch.setattr(prompts, "sums_alike", lambda: False)
    assert at_once(pieces_check(model)) == 16
    honest = MlxVerifier.prefill

    def otherwise(self: MlxVerifier, tokens: list[int]) -> None:
        """Of few rows, as OpenBLAS's kernels for small products."""
        honest(self, tokens if len(tokens) >= 30 else [token + 1 for token in tokens])

    monkeypatch.setattr(MlxVerifier, "prefill", otherwise)
    assert at_once(pieces_check(model)) == 32
    monkeypatch.setattr(
        MlxVerifier, "prefill", lambda self, tokens: honest(self, [tokens[0] + 1, *tokens[1:]])
    )
    assert at_once(pieces_check(model)) == 0


def test_a_model_that_fails_with_several_prompts_shares_none(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "sums_alike", lambda: False)
    monkeypatch.setattr(prompts, "RowCaches", None)
    assert at_once(pieces_check(models["llama"])) == 0


def test_a_cache_of_an_unknown_class_is_not_worked_on_in_parts(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    assert all(map(can_split, models.values()))
    odd = load(str(write_model(tmp_path, "llama")), "odd")

    class Remembers(type(odd.make_cache()[0])):  # type: ignore[misc]
        pass

    odd.network.make_cache = lambda: [Remembers() for _ in odd.network.layers]
    assert not can_split(odd)
