"""KV from pages and into them: never other bits than a cold prefill, and never a failure."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.engine.kv.blocks import Take, plan_take, room_tokens
from kakeya.engine.model import LoadedFacts
from kakeya.engine.steps.pieces import Pieces, grid_floor
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.frames import Done, KvExported, KvImported, Progress, StopReason, Tokens
from kakeya.generation.kv import KvOffer, KvPages, PageRef
from kakeya.generation.request import DecodeJob
from kakeya.memory.pages.reader import PageReader
from tests.engine.child_engine import ToyModel
from tests.engine.kv_rig import Prefixes, logits_bits
from tests.engine.rig import Rig, load_rig, tools
from tests.mlx.random_models import VOCAB

SIZE = 64
GRID = ((0, 32), (128, 16))
"""As of a device whose bits depend on the pieces: two to a block, and four from the third on."""
ARCHITECTURES = ("llama", "qwen3", "gemma3", "mamba", "falcon_h1")


@dataclasses.dataclass
class Gridded:
    """A model that is to be prefilled on a grid of this test."""

    model: object
    facts: LoadedFacts

    def open(self) -> object:
        return self.model.open()  # type: ignore[attr-defined]


def text(tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(tokens)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    root = tmp_path_factory.mktemp("models")
    made = {name: load_rig(root / name, name) for name in ARCHITECTURES}
    for name, rig in tuple(made.items()):
        facts = dataclasses.replace(rig.model.facts, prefill_grid=GRID)
        made[f"{name}-grid"] = Rig(Gridded(rig.model, facts), tools())  # type: ignore[arg-type]
    return made


@pytest.fixture
def rig(models: dict[str, Rig]) -> Rig:
    return Rig(models["llama-grid"].model, tools())


@pytest.fixture
def prefixes(tmp_path: Path) -> Iterator[Prefixes]:
    with Prefixes(tmp_path) as made:
        yield made


NAMES = ("llama", "llama-grid", "gemma3-grid", "mamba-grid")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_has_the_bits_that_would_be_computed(
    models: dict[str, Rig], prefixes: Prefixes, name: str
) -> None:
    rig, history = Rig(models[name].model, tools()), text(300)
    cold = prefixes.run(rig, history, kv_key="k")
    assert cold.exported == [0, 1, 2, 3, 4]
    expected = logits_bits(rig, "k", history[-1])
    for most, imported in ((5, 299), (4, 256), (2, 128), (1, 64)):
        warm = prefixes.run(rig, history, most=most, kv_key="k")
        assert warm.imported == warm.done.usage.cached_tokens == imported
        assert logits_bits(rig, "k", history[-1]) == expected


CUT_NAMES = ("llama", "llama-grid", "qwen3-grid", "gemma3-grid", "mamba-grid", "falcon_h1-grid")


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_prompts_that_share_beginnings_get_the_bits_that_each_gets_cold(
    models: dict[str, Rig], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The law, whatever lies in the pages and wherever they were cut: blocks, tails, parts."""
    name = data.draw(st.sampled_from(CUT_NAMES))
    base = text(240, seed=7)
    places = st.lists(st.integers(1, 230), max_size=3, unique=True).map(sorted)
    common = data.draw(places)
    with Prefixes(tmp_path_factory.mktemp("pages")) as prefixes:
        for _ in range(3):
            shared = data.draw(st.integers(1, 200))
            own = text(data.draw(st.integers(2, 40)), seed=data.draw(st.integers(0, 3)))
            history = base[:shared] + own
            cuts = tuple(common if data.draw(st.booleans()) else data.draw(places))
            rig = Rig(models[name].model, tools())
            prefixes.run(rig, history, kv_key="warm", cuts=cuts)
            rig.run(DecodeJob(token_ids=history, max_tokens=0, kv_key="cold", cuts=cuts))
            expected = logits_bits(rig, "cold", history[-1])
            assert logits_bits(rig, "warm", history[-1]) == expected


@pytest.mark.parametrize("name", CUT_NAMES)
@pytest.mark.parametrize("cut", [65, 150])
def test_what_is_shared_up_to_a_cut_is_computed_once_to_its_last_token(
    models: dict[str, Rig], prefixes: Prefixes, name: str, cut: int
) -> None:
    shared, rig = text(cut), Rig(models[name].model, tools())
    first = prefixes.run(rig, shared + text(50, seed=2), cuts=(cut,))
    assert (cut // SIZE, cut % SIZE) in first.filled
    for seed in (3, 4):
        follower = shared + text(70, seed=seed)
        warm = prefixes.run(rig, follower, cuts=(cut,), kv_key="warm")
        assert warm.imported >= cut
        rig.run(DecodeJob(token_ids=follower, max_tokens=0, kv_key="cold", cuts=(cut,)))
        expected = logits_bits(rig, "cold", follower[-1])
        assert logits_bits(rig, "warm", follower[-1]) == expected
    # So is a history that ends there, as a declared prompt does.
    assert prefixes.run(rig, [*shared, 0]).imported == cut


def test_kv_that_was_kept_is_exported_only_as_far_as_it_was_cut_alike(
    rig: Rig, prefixes: Prefixes
) -> None:
    history = text(3 * SIZE)
    prefixes.run(rig, history, kv_key="s", cuts=(70, 100))
    for cuts, expected in (((70, 100), [0, 1, 1, 1]), ((70, 90), [0, 1]), ((), [0])):
        prefixes.blocks.clear()
        again = prefixes.run(rig, history, kv_key="s", cuts=cuts)
        assert again.exported == expected, cuts
        prefixes.blocks.clear()
        rig.run(DecodeJob(token_ids=history, max_tokens=0, kv_key="s", cuts=(70, 100)))


def test_frames_come_in_an_order_that_the_agent_can_rely_on(rig: Rig, prefixes: Prefixes) -> None:
    history = text(200)
    prefixes.run(rig, history[:100])
    outcome = prefixes.run(rig, history, max_tokens=4)
    kinds = [type(frame) for frame in outcome.frames]
    assert kinds[0] is KvImported
    assert kinds[-1] is Done
    assert kinds.count(KvImported) == 1
    last_prefill = max(i for i, kind in enumerate(kinds) if kind is Progress)
    assert max(i for i, kind in enumerate(kinds) if kind is KvExported) < last_prefill
    assert kinds.index(Tokens) > last_prefill
    # Each right behind the piece that made it whole.
    computed = outcome.imported
    for before, frame in pairwise(outcome.frames):
        if isinstance(before, Progress):
            computed = before.computed_tokens
        if isinstance(frame, KvExported) and frame.index < 3:
            assert computed < (frame.index + 1) * SIZE


def test_prefill_alone_ends_without_a_token(rig: Rig, prefixes: Prefixes) -> None:
    history = text(2 * SIZE + 2)
    outcome = prefixes.run(rig, history, max_tokens=0)
    assert outcome.exported == [0, 1, 2]
    assert outcome.done.reason is StopReason.MAX_TOKENS
    assert not any(isinstance(frame, Tokens) for frame in outcome.frames)
    again = prefixes.run(rig, history, max_tokens=0)
    assert (again.imported, again.exported) == (2 * SIZE + 1, [])


def test_a_longer_prompt_takes_a_tail_up_to_the_grid_and_its_block_is_exported(
    rig: Rig, prefixes: Prefixes
) -> None:
    history = text(3 * SIZE)
    assert prefixes.run(rig, history[: SIZE + 56]).exported == [0, 1]
    longer = prefixes.run(rig, history)
    assert longer.imported == SIZE + 32
    assert longer.exported == [1, 2]
    with Prefixes(prefixes.arena._store._folder / "other") as other:
        cold = other.run(rig, history)
        assert cold.exported == [0, 1, 2]
        for text_of, pages in other.blocks.items():
            assert contents(prefixes.blocks[text_of]) == contents(pages)


def contents(pages: KvPages) -> bytes:
    with PageReader() as reader:
        return reader.read(pages.pages)


def test_kept_kv_that_reaches_further_is_continued_and_what_it_decoded_is_not_exported(
    rig: Rig, prefixes: Prefixes
) -> None:
    history = text(100)
    first = prefixes.run(rig, history, max_tokens=50, kv_key="s")
    answer = [t for f in first.frames if isinstance(f, Tokens) for t in f.token_ids]
    longer = history + answer + text(100, seed=2)
    second = prefixes.run(rig, longer, max_tokens=2, kv_key="s")
    assert second.imported == 0
    assert second.done.usage.cached_tokens >= 100 + len(answer) - 1
    assert second.exported == []
    # From blocks alone everything is computed on the grid again.
    third = prefixes.run(rig, longer, max_tokens=0)
    assert third.imported == SIZE + 32
    assert third.exported == [1, 2, 3]
    # And now the blocks reach further than what was kept for a while.
    fourth = prefixes.run(rig, [*longer, 5], max_tokens=2, kv_key="t")
    assert fourth.imported == grid_floor(rig.model.facts, len(longer) - 1)
    tokens, _ = Rig(rig.model, tools()).run(DecodeJob(token_ids=[*longer, 5], max_tokens=2))
    assert tokens == [t for f in fourth.frames if isinstance(f, Tokens) for t in f.token_ids]


def test_blocks_that_the_agent_lost_are_exported_from_kv_that_was_kept(
    rig: Rig, prefixes: Prefixes
) -> None:
    history = text(2 * SIZE + 20)
    prefixes.run(rig, history, max_tokens=3, kv_key="s")
    prefixes.blocks.clear()
    again = prefixes.run(rig, [*history, 9, 9], max_tokens=1, kv_key="s")
    assert again.done.usage.cached_tokens >= len(history)
    assert again.exported == [0, 1]
    prefixes.run(rig, history, kv_key="k")
    warm = logits_bits(rig, "k", history[-1])
    alone = Rig(rig.model, tools())
    alone.run(DecodeJob(token_ids=history, max_tokens=0, kv_key="k"))
    assert warm == logits_bits(alone, "k", history[-1])


def test_few_tokens_of_another_history_in_its_slot_do_not_keep_a_prompt_from_being_exported(
    rig: Rig, prefixes: Prefixes
) -> None:
    one, other = text(2 * SIZE + 20), text(2 * SIZE + 20, seed=2)
    prefixes.run(rig, one, kv_key="s")
    outcome = prefixes.run(rig, [*one[:3], *other[3:]], kv_key="s")
    assert (outcome.done.usage.cached_tokens, outcome.exported) == (0, [0, 1, 2])
    _, done = rig.run(DecodeJob(token_ids=[*one[:3], *one], max_tokens=0, kv_key="s"))
    assert done.usage.cached_tokens == 3  # there is nothing to export


def spoiled(pages: KvPages, how: str) -> KvPages:
    ref = pages.pages
    changes: dict[str, dict[str, object]] = {
        "freed": {"stamp": ref.stamp + 1},
        "slab gone": {"slab": "/kk-nobody-0"},
        "short": {"length": ref.length - 4},
        "long": {"length": ref.length + 4},
        "beyond the slab": {"first": ref.slab_pages + 5},
    }
    return dataclasses.replace(pages, pages=dataclasses.replace(ref, **changes[how]))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["freed", "slab gone", "short", "long", "beyond the slab"])
def test_pages_that_went_cost_only_time(
    rig: Rig, prefixes: Prefixes, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    history = text(150)
    cold = prefixes.run(rig, history, max_tokens=8)
    offer = prefixes.offer(history, rig.model.facts)
    blocks = [*offer.kv_blocks[:1], spoiled(offer.kv_blocks[1], how), *offer.kv_blocks[2:]]
    fresh = [prefixes.prepare(rig.model.facts, SIZE) for _ in range(2)]
    exports = [
        spoiled(prefixes.pages(rig.model.facts, index, SIZE, filling), how)
        for index, filling in enumerate(fresh)
    ]
    with caplog.at_level(logging.WARNING, "kakeya.engine.kv.blocks"):
        damaged = KvOffer(blocks=tuple(blocks), exports=tuple(exports))
        job = DecodeJob(token_ids=history, max_tokens=8, offer=damaged)
        frames = list(SequenceRun(rig.model, rig.tools, job).frames())
    # Where the length alone is wrong, the blocks in front of it are of use.
    assert frames[0] == KvImported(tokens=SIZE if how in ("short", "long") else 0)
    # Pages that nobody committed have no stamp yet: it is not looked at where they are written.
    exported = [frame.index for frame in frames if isinstance(frame, KvExported)]
    assert exported == ([0, 1] if how == "freed" else [])
    assert [f for f in frames if isinstance(f, Tokens)] == [
        f for f in cold.frames if isinstance(f, Tokens)
    ]
    # Said once for what is read, and once for all that is written.
    said = {"short": 0, "long": 0, "freed": 1}.get(how, 2)
    assert len(caplog.records) == said


def test_pages_that_are_committed_are_never_written(rig: Rig, prefixes: Prefixes) -> None:
    history = text(100)
    prefixes.run(rig, history)
    pages = prefixes.blocks[tuple(history[:SIZE])]
    before = contents(pages)
    job = DecodeJob(token_ids=text(100, seed=2), max_tokens=1, offer=KvOffer(exports=(pages,)))
    frames = list(SequenceRun(rig.model, rig.tools, job).frames())
    assert not any(isinstance(frame, KvExported) for frame in frames)
    assert contents(pages) == before


def test_a_run_that_ends_early_tells_of_no_block_that_is_not_whole(
    rig: Rig, prefixes: Prefixes
) -> None:
    history = text(150)
    offer = prefixes.offer(history, rig.model.facts)
    job = DecodeJob(token_ids=history, max_tokens=1, offer=KvOffer(exports=offer.kv_exports))
    run = SequenceRun(rig.model, rig.tools, job)
    frames = run.frames()
    assert isinstance(next(frames), Progress)
    frames.close()  # type: ignore[attr-defined]
    run.finish()
    prefixes.commit(offer, [])
    assert prefixes.run(rig, history).exported == [0, 1, 2]


def test_no_slab_stays_mapped(rig: Rig, prefixes: Prefixes) -> None:
    history = text(200)
    prefixes.run(rig, history)
    prefixes.run(rig, history, max_tokens=2)
    # This process is the owner too: each of its slabs is mapped once, by it.
    for name in {pages.pages.slab for pages in prefixes.blocks.values()}:
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
        assert len(mapped) == 1


def test_an_engine_without_blocks_takes_nothing(rig: Rig, prefixes: Prefixes) -> None:
    history = text(100)
    prefixes.run(rig, history)
    bare = dataclasses.replace(rig.model.facts, kv_block_tokens=0, prefill_grid=())
    offer = prefixes.offer(history, rig.model.facts)
    job = DecodeJob(token_ids=history, max_tokens=2, offer=KvOffer(blocks=offer.kv_blocks))
    without = Rig(Gridded(rig.model, bare), tools())  # type: ignore[arg-type]
    frames = list(SequenceRun(without.model, without.tools, job).frames())
    assert frames[0] == KvImported(tokens=0)
    assert room_tokens(offer.kv_blocks[0], bare) == 0


def test_a_negative_number_of_tokens_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="max_tokens is -2"):
        SequenceRun(rig.model, rig.tools, DecodeJob(token_ids=[5], max_tokens=-2))


# --- what of the blocks is taken, by their lengths alone

FACTS = dataclasses.replace(
    ToyModel("", Path()).facts, kv_block_tokens=SIZE, kv_block_bytes=4 * SIZE, prefill_grid=GRID
)


def block(index: int, tokens: int = SIZE, meant: int = 0, state: int = 0) -> KvPages:
    """Pages with room for so many tokens."""
    ref = PageRef(
        slab="/kk-a-0",
        slab_pages=4,
        page_bytes=4096,
        first=index,
        pages=1,
        length=4 * tokens + state,
        stamp=1,
    )
    return KvPages(index=index, pages=ref, has_state=state > 0, tokens=meant)


def taken(blocks: Sequence[KvPages], total: int, facts: LoadedFacts = FACTS) -> tuple[int, int]:
    plan = plan_take(blocks, facts, Pieces(facts, total))
    return plan.tokens, len(plan.blocks)


@pytest.mark.parametrize(
    ("blocks", "total", "expected"),
    [
        ([], 100, (0, 0)),
        ([block(0), block(1)], 300, (128, 2)),
        ([block(0), block(1)], 128, (128, 2)),
        ([block(0), block(2)], 300, (64, 1)),  # a gap
        ([block(1)], 300, (0, 0)),
        # A history that ends within a block takes it up to the grid.
        ([block(0), block(1)], 100, (96, 2)),
        ([block(0), block(1)], 70, (64, 1)),
        # A tail that ends with the history is taken whole.
        ([block(0), block(1, 36, 36)], 100, (100, 2)),
        ([block(0), block(1, 33, 33)], 97, (97, 2)),
        ([block(0), block(1, 36, 36)], 101, (96, 2)),
        ([block(0), block(1, 20, 20)], 101, (64, 1)),
        # Of pages that hold more, a part may be meant.
        ([block(0), block(1, 50, 36)], 100, (96, 2)),
        ([block(0), block(1, SIZE, 36)], 200, (96, 2)),
        ([block(0), block(1, 36, 36), block(2)], 300, (96, 2)),
        # From the third block on, the grid is finer.
        ([block(0), block(1), block(2, 50, 50)], 300, (176, 3)),
    ],
)
def test_blocks_are_taken_as_far_as_their_bits_are_those_of_a_prefill(
    blocks: list[KvPages], total: int, expected: tuple[int, int]
) -> None:
    assert taken(blocks, total) == expected


@pytest.mark.parametrize(
    ("blocks", "total", "expected"),
    [
        ([block(0, state=8), block(1, state=8)], 300, (128, 2)),
        ([block(0, state=8), block(1)], 300, (64, 1)),  # no state behind the second
        ([block(0), block(1), block(2, state=8)], 300, (192, 3)),
        ([block(0, state=8), block(1, state=8)], 100, (64, 1)),  # it is behind the history
        ([block(0, state=8), block(1, 36, 36, state=8)], 100, (100, 2)),
        ([block(0, state=8), block(1, 36, 36, state=8)], 101, (64, 1)),
        ([block(0, state=8), block(1, 50, 36, state=8)], 100, (64, 1)),
    ],
)
def test_state_is_taken_only_from_where_it_was(
    blocks: list[KvPages], total: int, expected: tuple[int, int]
) -> None:
    facts = dataclasses.replace(FACTS, kv_state_bytes=8)
    assert taken(blocks, total, facts) == expected


def test_of_a_model_that_is_all_state_only_the_last_block_is_needed() -> None:
    facts = dataclasses.replace(FACTS, kv_state_bytes=8, kv_block_bytes=0)
    last = block(4, 0, state=8)
    assert plan_take([block(1, 0, state=8), last], facts, Pieces(facts, 400)) == Take(
        5 * SIZE, (last,)
    )
    tail, total = block(4, 0, 50, state=8), 4 * SIZE + 50
    assert plan_take([tail], facts, Pieces(facts, total)).tokens == total


@given(st.integers(0, 2000), st.integers(0, 2000), st.booleans())
def test_pieces_begin_at_the_grids_boundaries(tokens: int, more: int, is_free: bool) -> None:
    facts = dataclasses.replace(FACTS, prefill_grid=() if is_free else GRID)
    floor = grid_floor(facts, tokens)
    assert floor <= tokens
    assert grid_floor(facts, floor) == floor
    if is_free:
        assert floor == tokens
        return
    assert tokens - floor < facts.prefill_chunk_at(floor)
    # A prefill from the beginning passes it.
    at = 0
    while at < floor:
        chunk = facts.prefill_chunk_at(at)
        at = (at // chunk + 1) * chunk
    assert at == floor
    assert grid_floor(facts, tokens + more) >= floor
