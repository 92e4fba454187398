"""The scheduler's rounds: who shares a forward, who joins and leaves, whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvariantBroken
from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.draft.proposer import Draft
from kakeya.engine.model import SequenceState
from kakeya.engine.steps.scheduler import Scheduler
from kakeya.generation.request import DecodeJob, DraftSource, Sampling
from tests.engine.adapter_rig import Answer, Ending
from tests.engine.child_engine import ToyState
from tests.engine.rig import Rig, load_rig, tools
from tests.engine.virtual_rig import VirtualRig, expected
from tests.laws import law

PROMPTS = [[5, 6, 7], [9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [80, 81], [7] * 40]
NGRAM = (DraftSource(kind="ngram"),)


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    root = tmp_path_factory.mktemp("models")
    return {name: load_rig(root / name, name) for name in ("llama", "gemma3", "mamba")}


@pytest.fixture
def rig(rigs: dict[str, Rig]) -> Rig:
    return Rig(rigs["llama"].model, tools())


class Watched:
    """A model that notes how many rows each shared forward has, and fails one on demand."""

    def __init__(self, rig: Rig, *, fails_at: int = -1) -> None:
        self._model = rig.model
        self.facts = rig.model.facts
        self.adapters = None
        self.rows: list[int] = []
        self._fails_at = fails_at

    def open(self) -> SequenceState:
        return self._model.open()

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        if len(self.rows) == self._fails_at:
            raise RuntimeError("boom")
        self.rows.append(len(states))
        self._model.launch_together(states, tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def jobs(count: int = len(PROMPTS), **more: object) -> list[DecodeJob]:
    return [
        DecodeJob(
            token_ids=prompt,
            max_tokens=12 + 5 * at,
            sampling=Sampling(temperature=at % 2, seed=at),
            **more,  # type: ignore[arg-type]
        )
        for at, prompt in enumerate(PROMPTS[:count])
    ]


def run_together(rig: Rig, model: object, todo: list[DecodeJob]) -> list[Answer]:
    ending = Ending(Scheduler(model, rig.tools, max_running=8), len(todo))  # type: ignore[arg-type]
    answers = [Answer() for _ in todo]
    for job, answer in zip(todo, answers, strict=True):
        ending.submit(job, answer)
    ending.scheduler.run()
    return answers


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_join_and_leave_one_forward_and_get_what_each_gets_alone(
    rigs: dict[str, Rig], name: str
) -> None:
    rig = Rig(rigs[name].model, replace(tools(), timer=lambda: 0.0))
    alone = [rig.run(job)[0] for job in jobs()]
    model = Watched(rig)
    answers = run_together(rig, model, jobs())
    assert [answer.tokens for answer in answers] == alone
    assert max(model.rows) == len(PROMPTS)
    assert min(model.rows) == 2
    forwards = [answer.done.usage.forwards for answer in answers if answer.done]
    assert forwards == [len(tokens) for tokens in alone]


PARAMS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 95, 96, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
MIXED = st.lists(
    st.builds(
        DecodeJob,
        token_ids=st.builds(
            lambda first, size: [(first + 7 * at) % 96 for at in range(size)],
            st.integers(0, 95),
            st.sampled_from([1, 3, 40, 120]),
        ),
        max_tokens=st.integers(1, 40),
        sampling=PARAMS,
        stop_token_ids=st.frozensets(st.integers(0, 95), max_size=3),
        draft_sources=st.sampled_from([(), NGRAM]),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@given(todo=MIXED)
@law(48)
def test_rows_that_choose_in_different_ways_get_what_each_gets_alone(
    rigs: dict[str, Rig], name: str, todo: list[DecodeJob]
) -> None:
    rig = Rig(rigs[name].model, tools())
    alone = [rig.run(job) for job in todo]
    answers = run_together(rig, rig.model, todo)
    assert [answer.tokens for answer in answers] == [tokens for tokens, _ in alone]
    reasons = [answer.done and answer.done.reason for answer in answers]
    assert reasons == [done.reason for _, done in alone]


def test_a_model_that_cannot_batch_takes_turns(rigs: dict[str, Rig]) -> None:
    rig = rigs["mamba"]
    alone = [rig.run(job)[0] for job in jobs()]
    model = Watched(rig)
    assert [answer.tokens for answer in run_together(rig, model, jobs())] == alone
    assert model.rows == []


def test_rows_with_drafts_leave_for_their_block_and_come_back(rig: Rig) -> None:
    todo = [
        DecodeJob(token_ids=[5, 9, 13, 2, 7] * 6, max_tokens=40, draft_sources=NGRAM),
        *jobs(3),
        DecodeJob(token_ids=[8, 3] * 9, max_tokens=40, draft_sources=NGRAM),
    ]
    alone = [rig.run(job)[0] for job in todo]
    model = Watched(rig)
    answers = run_together(rig, model, todo)
    assert [answer.tokens for answer in answers] == alone
    assert answers[0].done is not None
    assert answers[0].done.usage.verified > 0
    assert model.rows


@pytest.mark.parametrize("fails_at", [0, 4])
def test_after_a_shared_forward_that_failed_the_same_rows_go_on_by_turns(
    rig: Rig, fails_at: int
) -> None:
    alone = [rig.run(job)[0] for job in jobs()]
    model = Watched(rig, fails_at=fails_at)
    rig.tools = replace(rig.tools, timer=lambda: 0.0)
    assert [answer.tokens for answer in run_together(rig, model, jobs())] == alone
    assert len(model.rows) == fails_at


class Failing:
    """Shared forwards of a virtual rig that fail from one time to another."""

    def __init__(self, rig: VirtualRig, begins_s: float, ends_s: float) -> None:
        self.failed_at_s: list[float] = []
        self.shared_at_s: list[float] = []
        self._rig, self._begins_s, self._ends_s = rig, begins_s, ends_s
        self._honest = rig.model.launch_together
        rig.model.launch_together = self._launch  # type: ignore[method-assign]

    def _launch(self, states: Sequence[ToyState], tokens: Sequence[int | None]) -> None:
        now_s = self._rig.now_s
        if self._begins_s <= now_s < self._ends_s:
            self.failed_at_s.append(now_s)
            raise RuntimeError("boom")
        self.shared_at_s.append(now_s)
        self._honest(states, tokens)


def test_sequences_share_forwards_again_when_these_do_not_fail_any_more() -> None:
    rig = VirtualRig()
    failing = Failing(rig, 1.0, 6.0)
    told = [rig.submit(token_ids=[at, 1, 2], max_tokens=1500) for at in range(3)]
    loads = []
    rig.at(5.0, lambda: loads.append(rig.scheduler.load().batch_rows))
    rig.at(9.0, lambda: loads.append(rig.scheduler.load().batch_rows))
    rig.run()
    for one in told:
        assert one.tokens == expected(one.job.token_ids, 1500)
    # Tried after one, two and four seconds, and with success then.
    assert failing.failed_at_s == pytest.approx([1.0, 2.0, 4.0], abs=0.1)
    assert min(at_s for at_s in failing.shared_at_s if at_s > 1.0) == pytest.approx(8.0, abs=0.1)
    assert loads == [1, 3]


def test_where_one_row_fails_alone_too_the_others_share_forwards_at_once() -> None:
    rig = VirtualRig()
    told = [rig.submit(token_ids=[at, 1, 2], max_tokens=100) for at in range(3)]
    honest, rows, faulty = rig.model.launch_together, [], []

    def launch_together(states, tokens):
        if len(rows) == 20 and not faulty:
            faulty.append(states[1])
            states[1].launch = lambda token, *, keeps_logits=False: 1 / 0
            raise RuntimeError("boom")
        rows.append(len(states))
        honest(states, tokens)

    rig.model.launch_together = launch_together  # type: ignore[method-assign]
    rig.run()
    assert [one.error is not None for one in told] == [False, True, False]
    assert rows[:20] == [3] * 20
    # A step of their own meanwhile, and then together again.
    assert rows[20:] == [2] * (len(rows) - 20)
    assert len(rows) > 90


def test_a_fault_of_one_row_ends_that_row_only(rig: Rig) -> None:
    class Faulty(Watched):
        opened = 0

        def open(self) -> SequenceState:
            state = super().open()
            self.opened += 1
            if self.opened == 2:
                collected = iter(range(5))
                honest = state.collect
                state.collect = lambda: honest() if next(collected, None) is not None else boom()
            return state

    def boom() -> int:
        raise RuntimeError("boom")

    alone = [rig.run(job)[0] for job in jobs()]
    answers = run_together(rig, Faulty(rig), jobs())
    faulty = [at for at, answer in enumerate(answers) if answer.error is not None]
    assert len(faulty) == 1
    for at, answer in enumerate(answers):
        assert answer.tokens == (alone[at][:5] if at in faulty else alone[at])
    assert isinstance(answers[faulty[0]].error, InvariantBroken)


def test_kv_of_a_row_is_kept_and_continued_as_if_it_had_been_alone(rig: Rig) -> None:
    first = run_together(rig, rig.model, jobs(kv_key=""))
    alone = [answer.tokens for answer in first]
    run_together(rig, rig.model, [keyed(job, at) for at, job in enumerate(jobs())])
    longer = [
        DecodeJob(token_ids=[*job.token_ids, *tokens], max_tokens=6, kv_key=f"k{at}")
        for at, (job, tokens) in enumerate(zip(jobs(), alone, strict=True))
    ]
    fresh = [rig.run(DecodeJob(token_ids=job.token_ids, max_tokens=6))[0] for job in longer]
    continued = run_together(rig, rig.model, longer)
    assert [answer.tokens for answer in continued] == fresh
    cached = [answer.done.usage.cached_tokens for answer in continued if answer.done]
    assert cached == [len(job.token_ids) - 1 for job in longer]


def keyed(job: DecodeJob, at: int) -> DecodeJob:
    return DecodeJob(
        token_ids=job.token_ids,
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        kv_key=f"k{at}",
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("after", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_rows_that_are_parked_again_and_again_get_what_each_gets_alone(
    rigs: dict[str, Rig], name: str, after: int
) -> None:
    """In a prompt, with a step in flight and between blocks; no token is computed twice."""
    rig = Rig(rigs[name].model, tools())
    batch = DecodeJob(
        token_ids=[5, 9, 13, 2, 7] * 30, max_tokens=40, draft_sources=NGRAM, priority=4, client="b"
    )
    other = DecodeJob(token_ids=[3, 1, 2], max_tokens=60, priority=4, client="o")
    urgent = [
        DecodeJob(token_ids=[at] * 40, max_tokens=3, priority=0, client="u") for at in range(1, 5)
    ]
    alone = [rig.run(job)[0] for job in (batch, other, *urgent)]
    scheduler = Scheduler(rig.model, rig.tools, max_running=2)
    ending = Ending(scheduler, 2 + len(urgent))
    answers = [Answer() for _ in range(2 + len(urgent))]
    left = list(zip(urgent, answers[2:], strict=True))
    most = []

    def see(_count: int) -> None:
        most.append(scheduler.limits.room.parked_bytes)

    def come(count: int) -> None:
        see(count)
        while left and count >= after:
            ending.submit(*left.pop())
            if len(left) % 2:
                return

    for answer in answers:
        answer.after = see  # who is urgent speaks while another is set aside for it
    answers[1].after = come
    answers[0].after = come
    ending.submit(other, answers[1])
    ending.submit(batch, answers[0])
    scheduler.run()
    assert [answer.tokens for answer in answers] == alone
    assert not left
    done = answers[1].done
    assert done is not None
    assert done.usage.forwards == 60
    assert rig.tools.violations.position == rig.tools.violations.cache_length == 0
    assert max(most) > 0 or name == "mamba"


@given(
    fixed=st.floats(0.05, 2.0),
    row=st.floats(0.02, 1.0),
    block=st.floats(0.0, 1.0),
    sharers=st.integers(2, 16),
    right=st.integers(0, 8),
    drafters=st.integers(1, 16),
)
@settings(deadline=None, max_examples=60)
def test_with_drafts_all_together_are_never_slower_than_without(
    fixed, row, block, sharers, right, drafters
):
    """However many of them draft: what the others' forward loses is paid for."""
    drafters = min(drafters, sharers)
    shared_s = fixed + row * sharers
    costs = {rows: fixed + row + block * (rows - 1) for rows in (1, 2, 3, 5, 9, 17)}
    controller = DraftController()
    controller.seed_costs(costs)
    draft = Draft(source="ngram", tokens=(1,) * 8, match_length=9)
    for _ in range(60):
        controller.observe_verified(draft, 8, right)
    for _ in range(60):
        controller.observe_shared(sharers, shared_s)
    controller.share(sharers)
    rows = controller.rows(draft)
    if rows == 0:
        return
    tokens = sharers - drafters + drafters * (1 + min(rows, right))
    seconds = drafters * (fixed + row + block * rows)
    if drafters < sharers:
        seconds += fixed + row * (sharers - drafters)
    # Acceptance is a learned estimate, a little below or above what it is.
    assert tokens / seconds >= 0.95 * sharers / shared_s


def test_a_block_must_beat_a_rows_share_of_the_forward() -> None:
    controller = DraftController()
    controller.seed_costs({1: 1.0, 2: 1.2, 3: 1.4, 5: 1.8, 9: 2.5, 17: 4.0})
    draft = Draft(source="ngram", tokens=(1, 2, 3, 4), match_length=9)
    for _ in range(30):
        controller.observe_verified(draft, 4, 2)
    assert controller.rows(draft) > 0
    for _ in range(30):
        controller.observe_shared(8, 1.6)
    controller.share(8)
    assert controller.rows(draft) == 0
    controller.share(1)
    assert controller.rows(draft) > 0
