"""Drafts change speed, never output: every draft source, selection and cache class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.remote.draft_book import BookCounts
from kakeya.decoding.serve.service import ProposerService
from kakeya.engine.model import CHUNK_LIMIT_S, LEAST_CHUNK_TOKENS, LoadedFacts
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.frames import Progress, StopReason, Tokens
from kakeya.generation.request import DecodeJob, DraftSource, Sampling
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier
from tests.arithmetic import own_arithmetic
from tests.decoding.servers import serving
from tests.engine.rig import Rig, collect, load_rig, tools

NGRAM = (DraftSource(kind="ngram"),)
CYCLE = [5, 9, 13, 2, 7] * 6
KEYED = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=11)
MIN_P = Sampling(temperature=1.1, min_p=0.2, seed=12)
ARCHITECTURES = ("llama", "qwen3", "gemma3", "mamba")


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    root = tmp_path_factory.mktemp("models")
    made = {name: load_rig(root / name, name) for name in ARCHITECTURES}
    made["llama-4bit"] = load_rig(root / "llama-4bit", "llama", quantize_bits=4)
    return made


@pytest.fixture(params=[*ARCHITECTURES, "llama-4bit"])
def rig(request: pytest.FixtureRequest, rigs: dict[str, Rig]) -> Rig:
    rig = rigs[request.param]
    return Rig(rig.model, tools())


def job(**changes: object) -> DecodeJob:
    values: dict[str, object] = {"token_ids": CYCLE, "max_tokens": 40}
    return DecodeJob(**{**values, **changes})  # type: ignore[arg-type]


def reference(rig: Rig, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm's own loop."""
    network = rig.model.open()._model.network
    steps = generate_step(mx.array(prompt), network, max_tokens=count)
    return [int(token) for token, _ in steps]


def test_plain_decoding_is_mlx_lms_greedy(rig: Rig) -> None:
    tokens, done = rig.run(job())
    assert tokens == reference(rig, CYCLE, 40)
    assert done.reason is StopReason.MAX_TOKENS
    assert done.usage.verified == 0


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), KEYED, pytest.param(MIN_P, marks=pytest.mark.slow)],
    ids=["greedy", "keyed", "min_p"],
)
def test_ngram_drafts_never_change_tokens(rig: Rig, sampling: Sampling) -> None:
    plain, _ = rig.run(job(sampling=sampling))
    drafted, done = rig.run(job(sampling=sampling, draft_sources=NGRAM))
    assert drafted == plain
    assert done.usage.accepted <= done.usage.verified <= done.usage.drafted


class RecordingDrafter:
    """Drafts one token over and over and notes how the verifier selects."""

    def __init__(self) -> None:
        self.told: set[tuple[int | None, float]] = set()

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
        self.told.add((seed, temperature))
        return Draft(source="m", tokens=(5,) * size, forward_passes=size)


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (Sampling(seed=11), (None, 0.0)),
        (Sampling(temperature=0.75, seed=2**64 - 1), (2**64 - 1, 0.75)),
    ],
    ids=["greedy", "keyed"],
)
def test_a_peer_is_told_the_noise_of_a_sampled_decode(
    rigs: dict[str, Rig], sampling: Sampling, told: tuple[int | None, float]
) -> None:
    rig = Rig(rigs["llama"].model, tools())
    plain, _ = rig.run(job(sampling=sampling, max_tokens=20))
    drafter = RecordingDrafter()
    with serving(ProposerService({"m": drafter})) as address:
        peer = DraftSource(kind="remote", address=address, model_id="m", extended=True)
        drafted, done = rig.run(job(sampling=sampling, max_tokens=20, draft_sources=(peer,)))
    assert drafter.told == {told}
    assert drafted == plain
    assert done.usage.drafted > 0


def test_a_full_attention_model_really_verifies_blocks(rigs: dict[str, Rig]) -> None:
    _, done = Rig(rigs["llama"].model, tools()).run(job(draft_sources=NGRAM))
    assert done.usage.verified > 0


def test_a_recurrent_model_never_verifies_blocks(rigs: dict[str, Rig]) -> None:
    _, done = Rig(rigs["mamba"].model, tools()).run(job(draft_sources=NGRAM))
    assert done.usage.verified == 0


class Scripted:
    """Stands in for the n-gram index: drafts what a script says of the true continuation."""

    def __init__(self, truth: list[int], prompt: int, kind: str) -> None:
        self.truth, self.prompt, self.kind = truth, prompt, kind
        self.length = 0

    def extend(self, tokens: list[int]) -> None:
        self.length += len(tokens)

    def next_token(self) -> tuple[int | None, int]:
        tokens, match = self.draft(1)
        return (tokens[0], match) if tokens else (None, 0)

    def draft(self, size: int) -> tuple[list[int], int]:
        at = self.length - self.prompt
        right = self.truth[at : at + size]
        if self.kind == "oracle":
            return right, 9
        if self.kind == "wrong":
            return [(token + 1) % 96 for token in right], 9
        if self.kind == "half":
            return [t if i % 2 == 0 else (t + 1) % 96 for i, t in enumerate(right, at)], 9
        return [], 0


def script(run: SequenceRun, plain: Sequence[int], kind: str) -> None:
    """Have a run's own source of drafts say these, of the answer that it would give."""
    run._drafting._own._index = Scripted(plain, len(CYCLE), kind)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), pytest.param(KEYED, marks=pytest.mark.slow)],
    ids=["greedy", "keyed"],
)
def test_whatever_is_drafted_the_tokens_stay(rig: Rig, sampling: Sampling) -> None:
    plain, plain_done = rig.run(job(sampling=sampling))
    for kind in ("oracle", "wrong", "half", "empty"):
        run = SequenceRun(rig.model, rig.tools, job(sampling=sampling, draft_sources=NGRAM))
        script(run, plain, kind)
        tokens, done = collect(run)
        assert tokens == plain, kind
        if kind == "oracle" and done.usage.verified:
            assert done.usage.accepted == done.usage.verified
        if kind == "empty":
            assert done.usage.verified == 0
        if kind == "oracle" and run.state.verifiable_rows() > 1000:
            # Blocks of 8 drafts and their bonus token: 9 tokens a forward.
            assert plain_done.usage.forwards == len(plain)
            assert done.usage.forwards <= len(plain) // 9 + 3


@pytest.mark.parametrize("kind", ["wrong", "empty"])
def test_a_text_that_nothing_matches_is_decoded_as_without_drafts(
    rigs: dict[str, Rig], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft, no price and no question of what could be verified at each token."""
    rig = Rig(rigs["llama"].model, tools())
    plain, _ = rig.run(job())
    controller = rig.tools.controller
    monkeypatch.setattr(controller, "rows", lambda draft: 0)
    run = SequenceRun(rig.model, rig.tools, job(draft_sources=NGRAM))
    script(run, plain, kind)
    asked: list[int] = []
    verifiable_rows = run.state.verifiable_rows
    monkeypatch.setattr(
        MlxVerifier, "verifiable_rows", lambda _: asked.append(1) or verifiable_rows()
    )
    tokens, done = collect(run)
    assert tokens == plain
    (tally,) = done.usage.sources
    # A match of one length that is wrong is looked at once.
    assert tally.drafts == len(asked) == (1 if kind == "wrong" else 0)
    assert tally.shadow_hits == 0


class ForeignBook:
    """A peer that drafts ids which the vocabulary does not have."""

    counts = BookCounts()

    def prepare(self, history: Sequence[int]) -> None:
        pass

    def poll(self, history: list[int], size: int, *, wait_s: float) -> Draft:
        return Draft(source="peer", tokens=(4_000_000_000,) * size)

    def ahead(self, history: list[int], block: tuple[int, ...]) -> None: ...

    def follow(self, history: list[int]) -> None: ...

    def take_late(self) -> list[tuple[int, Draft]]:
        return []

    def close(self) -> None: ...


def test_ids_outside_the_vocabulary_are_never_verified(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    plain, _ = rig.run(job())
    run = SequenceRun(rig.model, rig.tools, job(draft_sources=NGRAM))
    run._drafting._own = None
    run._drafting._books["ngram"] = ForeignBook()  # type: ignore[assignment]
    tokens, done = collect(run)
    assert tokens == plain
    assert done.usage.verified == 0


@own_arithmetic
def test_the_kv_after_drafts_equals_a_fresh_prefill(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    run = SequenceRun(rig.model, rig.tools, job(draft_sources=NGRAM, kv_key="s", max_tokens=40))
    collect(run)
    kept = rig.tools.slots.take("s")
    assert kept is not None
    fresh = rig.model.open()
    fresh.prefill(kept.tokens)
    for mine, theirs in zip(kept.state._cache, fresh._cache, strict=True):
        for a, b in zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert bool(mx.array_equal(a, b))


def test_a_stop_token_inside_a_block_ends_it_there(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    plain, _ = rig.run(job())
    stop = plain[7]
    first = plain.index(stop)
    run = SequenceRun(
        rig.model, rig.tools, job(draft_sources=NGRAM, stop_token_ids=frozenset({stop}), kv_key="s")
    )
    script(run, plain, "oracle")
    tokens, done = collect(run)
    assert tokens == plain[: first + 1]
    assert done.reason is StopReason.STOP_TOKEN
    kept = rig.tools.slots.take("s")
    assert kept is not None
    assert len(kept.tokens) <= len(CYCLE) + first + 1


def test_kept_kv_is_continued_and_changes_nothing(rig: Rig) -> None:
    whole, _ = rig.run(job(max_tokens=30))
    first, _ = rig.run(job(max_tokens=12, kv_key="s"))
    rest, done = rig.run(
        job(token_ids=CYCLE + first, max_tokens=18, kv_key="s", draft_sources=NGRAM)
    )
    assert first + rest == whole
    assert done.usage.cached_tokens in (0, len(CYCLE) + 11, len(CYCLE) + 12)


def test_what_was_there_of_a_prompt_is_told_before_the_first_token(rigs: dict[str, Rig]) -> None:
    """Also of one that is whole there: who breaks an answer off hears of it no later."""
    rig = Rig(rigs["llama"].model, tools())
    rig.run(job(max_tokens=12, kv_key="s"))
    for length, cached in ((len(CYCLE), len(CYCLE) - 1), (20, 19)):
        run = SequenceRun(rig.model, rig.tools, job(token_ids=CYCLE[:length], kv_key="s"))
        frames = run.frames()
        told = next(frames)
        assert isinstance(told, Progress)
        assert (told.computed_tokens, told.cached_tokens) == (cached, cached)
        assert isinstance(next(frames), Tokens)
        run.finish()


def test_a_changed_history_reuses_only_what_agrees(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    rig.run(job(max_tokens=12, kv_key="s"))
    other = [*CYCLE[:20], 50, 51, 52]
    cold, _ = rig.run(job(token_ids=other, max_tokens=12))
    warm, done = rig.run(job(token_ids=other, max_tokens=12, kv_key="s"))
    assert warm == cold
    assert done.usage.cached_tokens == 20


def test_prefill_comes_in_chunks_with_progress(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    facts, prompt = rig.model.facts, [(3 * i) % 96 for i in range(270)]
    frames = list(SequenceRun(rig.model, rig.tools, job(token_ids=prompt, max_tokens=2)).frames())
    progress = [f.computed_tokens for f in frames if isinstance(f, Progress)]
    assert progress[-1] == len(prompt) - 1
    for start, end in pairwise([0, *progress[:-1]]):
        assert end - start == facts.prefill_chunk_at(start)


def paced(rig: Rig, **facts: float) -> LoadedFacts:
    return replace(
        rig.model.facts, prefill_chunk_tokens=256, kv_block_tokens=256, prefill_grid=(), **facts
    )


def test_chunks_get_finer_behind_a_long_context_so_that_each_stays_within_its_time(
    rigs: dict[str, Rig],
) -> None:
    facts = paced(rigs["llama"], prefill_tokens_per_second=5000.0, prefill_context_s=1.7e-7)
    chunks = [facts.prefill_chunk_at(length) for length in range(0, 8192, 16)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 256
    assert set(chunks) <= {256, 128, 64}
    for length, chunk in zip(range(0, 8192, 16), chunks, strict=True):
        assert chunk * (1 / 5000.0 + 1.7e-7 * length) <= CHUNK_LIMIT_S


def test_chunks_never_get_so_fine_that_a_forward_costs_more_than_its_rows(
    rigs: dict[str, Rig],
) -> None:
    facts = paced(rigs["llama"], prefill_tokens_per_second=10.0, prefill_context_s=1.0)
    assert facts.prefill_chunk_at(100_000) == LEAST_CHUNK_TOKENS
    unmeasured = paced(rigs["llama"], prefill_tokens_per_second=0.0, prefill_context_s=0.0)
    assert unmeasured.prefill_chunk_at(100_000) == 256


def test_the_grid_of_a_prompt_is_that_of_its_positions(rigs: dict[str, Rig]) -> None:
    """Chunks end where the finer grid's do, so a continued prompt meets the same pieces."""
    rig = Rig(Paced(rigs["llama"].model, 64, 1 / 0.001, 0.001), tools())
    prompt = [(3 * i) % 96 for i in range(400)]
    frames = list(SequenceRun(rig.model, rig.tools, job(token_ids=prompt, max_tokens=2)).frames())
    ends = [f.computed_tokens for f in frames if isinstance(f, Progress)]
    at = 0
    for end in ends[:-1]:
        chunk = rig.model.facts.prefill_chunk_at(at)
        assert end % chunk == 0
        assert end - at <= chunk
        at = end
    assert ends[-1] == len(prompt) - 1
    assert ends[0] > ends[-2] - ends[-3]


class Paced:
    """A model whose prefill was measured as slow as a test needs it."""

    def __init__(self, model: MlxModel, chunk: int, rate: float, context_s: float) -> None:
        self._model = model
        self.facts = replace(
            model.facts,
            prefill_chunk_tokens=chunk,
            prefill_tokens_per_second=rate,
            prefill_context_s=context_s,
            prefill_grid=(),
        )

    def open(self) -> MlxVerifier:
        return self._model.open()


def test_context_makes_prefill_slower_where_layers_grow_with_it(rigs: dict[str, Rig]) -> None:
    for architecture in ("llama", "mamba"):
        state = rigs[architecture].model.open()
        state.prefill([1])
        assert state.pretend(100) == (architecture == "llama")
        assert state.length == state.layer_length() == (100 if architecture == "llama" else 1)
        state.prefill([2, 3])
        assert state.length == state.layer_length()
    assert rigs["mamba"].model.facts.prefill_context_s == 0
    assert rigs["llama"].model.facts.prefill_context_s >= 0


def test_the_context_ends_a_generation(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    prompt = [(5 * i) % 96 for i in range(505)]
    tokens, done = rig.run(job(token_ids=prompt, max_tokens=100, draft_sources=NGRAM))
    assert len(tokens) == 7
    assert done.reason is StopReason.CONTEXT_FULL


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [96]}, "outside the vocabulary of 96"),
        ({"token_ids": [1] * 512}, "context is 512"),
        ({"max_tokens": -1}, "0 = only prefill"),
    ],
)
def test_bad_jobs_are_refused_before_anything_runs(
    rigs: dict[str, Rig], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        SequenceRun(rigs["llama"].model, tools(), job(**changes))


def test_an_abandoned_run_keeps_its_kv_consistent(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, tools())
    whole, _ = rig.run(job(max_tokens=30))
    run = SequenceRun(rig.model, rig.tools, job(max_tokens=30, kv_key="s"))
    got: list[int] = []
    for frame in run.frames():
        if isinstance(frame, Tokens):
            got += frame.token_ids
        if len(got) >= 10:
            break
    run.finish()
    rest, done = rig.run(job(token_ids=CYCLE + got, max_tokens=30 - len(got), kv_key="s"))
    assert got + rest == whole
    assert done.usage.cached_tokens >= len(CYCLE) + len(got) - 1


class PricedController(DraftController):
    """Knows what rows cost and learns nothing from this machine's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_costs({1: 1.0, 2: 1.5, 3: 1.8, 5: 2.4, 9: 3.6, 17: 6.0})

    def observe_forward(self, rows: int, seconds: float) -> None: ...


def test_text_without_matches_is_decoded_plainly(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, replace(tools(), controller=PricedController()))
    prompt = list(range(90))
    sampling = Sampling(temperature=5.0, seed=3)
    plain, _ = rig.run(job(token_ids=prompt, sampling=sampling, max_tokens=150))
    tokens, done = rig.run(
        job(token_ids=prompt, sampling=sampling, draft_sources=NGRAM, max_tokens=150)
    )
    assert tokens == plain
    assert done.usage.verified < 15


def test_drafts_that_hold_are_found_out_and_used(rigs: dict[str, Rig]) -> None:
    rig = Rig(rigs["llama"].model, replace(tools(), controller=PricedController()))
    plain, _ = rig.run(job(max_tokens=200))
    run = SequenceRun(rig.model, rig.tools, job(max_tokens=200, draft_sources=NGRAM))
    script(run, plain, "oracle")
    tokens, done = collect(run)
    assert tokens == plain
    assert done.usage.forwards < 40
