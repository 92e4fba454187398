"""KV that has to go lies in pages, and comes back bit for bit: nothing is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import KakeyaError, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.frames import Done, EngineFrame, KvPark, Progress, Tokens
from kakeya.generation.request import DecodeJob, Sampling
from kakeya.memory.pages.shared_arena import Filling
from tests.engine.kv_rig import Lender, Prefixes
from tests.engine.rig import Rig, collect, load_rig, tools
from tests.engine.virtual_rig import VirtualRig, expected

BATCH = {
    "token_ids": [(7 * at) % 96 for at in range(300)],
    "max_tokens": 60,
    "priority": 4,
    "sampling": Sampling(temperature=0.9, seed=5),
}
URGENT = {"token_ids": [(5 * at) % 96 for at in range(290)], "max_tokens": 12, "priority": 0}
MODELS = ("llama", "falcon_h1", "gemma3")


class Agent:
    """Prepares pages as the agent does, and gives them back when it is told to."""

    def __init__(self, pages: Prefixes) -> None:
        self.pages = pages
        self.lends = True
        self.held: list[Filling] = []
        self.spoilt: list[Filling] = []
        self.asked = 0

    def park(self, scheduler: Scheduler, park_id: int, frame: KvPark) -> None:
        self.end()
        if not frame.lengths:
            return
        self.asked += 1
        if self.lends:
            self.held = [
                self.pages.arena.prepare(self.pages.tenant, length, self.pages.holder)
                for length in frame.lengths
            ]
        refs = tuple(filling.ref for filling in self.held)
        # What answers another question is not taken.
        scheduler.call(lambda: scheduler.lend(park_id, frame.number + 1, refs[:1]))
        scheduler.call(lambda: scheduler.lend(park_id, frame.number, refs))

    def spoil(self) -> None:
        """Give the pages to somebody else."""
        for filling in self.held:
            filling.commit()
        self.held, self.spoilt = [], self.held

    def end(self) -> None:
        for filling in self.held:
            filling.rollback()
        for filling in self.spoilt:
            self.pages.arena.pool.free(filling.block)
        self.held, self.spoilt = [], []


class Run:
    """A scheduler on this thread, with room for one of two; it ends with the last of its jobs."""

    def __init__(self, rig: Rig, agent: Agent) -> None:
        self.rig, self.agent = rig, agent
        facts = rig.model.facts
        self.tools = tools(eager=False, kv_bytes=facts.kv_bytes(512))
        self.scheduler = Scheduler(rig.model, self.tools, max_running=4)
        self.frames: dict[int, list[EngineFrame]] = {}
        self.errors: dict[int, KakeyaError] = {}
        self.tickets: dict[int, QueueTicket] = {}
        self.open = 0

    def submit(self, park_id: int, job: dict[str, object], **calls: Callable[[], None]) -> None:
        """`on_3` is called with the third frame, `on_end` with the end."""
        frames = self.frames[park_id] = []

        def put(frame: EngineFrame) -> None:
            if isinstance(frame, KvPark):
                self.agent.park(self.scheduler, park_id, frame)
                return
            frames.append(frame)
            calls.get(f"on_{len(frames)}", lambda: None)()
            if isinstance(frame, Done):
                self.close()

        def fail(error: KakeyaError) -> None:
            self.errors[park_id] = error
            self.close()

        self.open += 1
        decode = DecodeJob(park_id=park_id, **job)  # type: ignore[arg-type]
        self.tickets[park_id] = QueueTicket(decode, put, fail)
        self.scheduler.submit(self.tickets[park_id])

    def close(self) -> None:
        self.open -= 1
        if not self.open:
            self.scheduler.stop()

    def tokens(self, park_id: int) -> list[int]:
        frames = self.frames[park_id]
        return [token for f in frames if isinstance(f, Tokens) for token in f.token_ids]

    def is_empty(self) -> bool:
        room = self.scheduler.limits.room
        return room.lent_bytes == room.parked_bytes == 0 and not self.scheduler.load().waiting


def alone(rig: Rig, job: dict[str, object]) -> tuple[list[int], Done]:
    return collect(SequenceRun(rig.model, tools(eager=False), DecodeJob(**job)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    root = tmp_path_factory.mktemp("models")
    return {name: load_rig(root / name, name, eager=False) for name in MODELS}


@pytest.fixture
def agent(pages: Prefixes) -> Iterator[Agent]:
    free = pages.arena.pool.free_pages
    agent = Agent(pages)
    yield agent
    agent.end()
    assert pages.arena.pool.free_pages == free


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("llama", 2),
        ("llama", 8),
        ("llama", 30),
        ("falcon_h1", 30),
        ("gemma3", 2),
        ("gemma3", 8),
        ("gemma3", 30),
    ],
    ids=[
        "in its prompt",
        "at its first words",
        "later",
        "with recurrent state",
        "with a window in its prompt",
        "with a window at its first words",
        "with a window that went round",
    ],
)
def test_it_goes_on_bit_for_bit_and_nothing_is_computed_again(rigs, agent, name, at):
    rig = rigs[name]
    whole, done = alone(rig, BATCH)
    run = Run(rig, agent)
    run.submit(1, {**BATCH, "kv_key": "k"}, **{f"on_{at}": lambda: run.submit(2, URGENT)})
    run.scheduler.run()
    assert not run.errors
    assert agent.asked == 1
    assert agent.held == []  # it gave them back when it went on
    assert run.tokens(1) == whole
    assert run.tokens(2) == alone(rig, URGENT)[0]
    ended = run.frames[1][-1]
    assert isinstance(ended, Done)
    assert ended.usage.forwards == done.usage.forwards
    computed = [f.computed_tokens for f in run.frames[1] if isinstance(f, Progress)]
    assert computed == sorted(set(computed))
    kept = run.tools.slots.take("k")
    if name == "llama":  # the other's state alone is more than the bound
        assert kept is not None
        assert kept.tokens == [*BATCH["token_ids"], *whole][: len(kept.tokens)]
    assert run.is_empty()


@pytest.mark.parametrize("why", ["no pages", "spoilt"])
def test_where_that_cannot_be_it_is_told_that_it_can_go_on(rigs, agent, why):
    rig = rigs["llama"]
    agent.lends = why != "no pages"
    run = Run(rig, agent)
    urgent = {"on_6": agent.spoil} if why == "spoilt" else {}
    run.submit(1, {**BATCH, "kv_key": "k"}, on_30=lambda: run.submit(2, URGENT, **urgent))
    run.scheduler.run()
    assert agent.asked == 1
    assert isinstance(run.errors[1], MemoryRefused)
    assert run.errors[1].retry_after_s is not None
    assert run.tools.slots.take("k") is None
    said = run.tokens(1)
    assert 0 < len(said) < BATCH["max_tokens"]
    assert said == alone(rig, BATCH)[0][: len(said)]
    assert run.tokens(2) == alone(rig, URGENT)[0]
    assert run.is_empty()


def test_one_that_is_given_up_while_its_kv_lies_in_pages_leaves_nothing(rigs, agent):
    run = Run(rigs["llama"], agent)

    def give_up() -> None:
        assert run.scheduler.limits.room.parked_bytes == 0
        run.tickets[1].cancel()
        run.open -= 1

    run.submit(1, {**BATCH, "kv_key": "k"}, on_30=lambda: run.submit(2, URGENT, on_6=give_up))
    run.scheduler.run()
    assert agent.asked == 1
    assert not run.errors
    assert len(run.tokens(1)) < BATCH["max_tokens"]
    assert run.tools.slots.take("k") is None  # what its state holds is not its KV
    assert run.is_empty()


JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0, 2),
            "length": st.integers(1, 700),
            "max_tokens": st.integers(1, 120),
            "priority": st.integers(0, 4),
            "client": st.sampled_from("ab"),
            "kv_key": st.sampled_from(["", "k"]),
            "cancel_s": st.none() | st.floats(0, 4),
            "lent_after_s": st.none() | st.sampled_from([0.001, 0.02, 0.2, 1.0]),
        }
    ),
    min_size=2,
    max_size=8,
)


@settings(deadline=None, max_examples=40)
@given(jobs=JOBS, places=st.integers(1, 3), blocks=st.integers(4, 6))
def test_whenever_pages_come_all_get_what_they_get_alone(pages, jobs, places, blocks):
    """Late, never, or as soon as they are asked for; and no page stays behind."""
    rig = VirtualRig(places=places, kv_bytes=blocks * KV_BLOCK_TOKENS)
    scheduler, room = rig.scheduler, rig.scheduler.limits.room
    free = pages.arena.pool.free_pages
    lender = Lender(rig, pages, lambda told: jobs[told.job.park_id - 1]["lent_after_s"])

    def check() -> None:
        assert room.lent_bytes + room.parked_bytes <= rig.slots.budget_bytes
        assert scheduler.load().running <= places

    rig.check = check
    told = []
    for number, job in enumerate(jobs, 1):
        values = {key: job[key] for key in ("max_tokens", "priority", "client", "kv_key")}
        prompt = [(number + 7 * at) % 100 for at in range(job["length"])]
        told.append(rig.submit(job["at_s"], token_ids=prompt, park_id=number, retries=2, **values))
        if job["cancel_s"] is not None:
            rig.cancel(job["cancel_s"], told[-1])
    rig.run()
    for one, job in zip(told, jobs, strict=True):
        whole = expected(one.job.token_ids, one.job.max_tokens)
        assert one.tokens == whole[: len(one.tokens)]
        if one.done is not None:
            assert one.tokens == whole
        else:
            assert job["cancel_s"] is not None
    lender.end()
    assert room.lent_bytes == room.parked_bytes == 0
    assert pages.arena.pool.free_pages == free
