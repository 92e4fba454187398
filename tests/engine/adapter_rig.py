"""kakeya-tiny with slots, its eight trained adapters, and a scheduler that many jobs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.core.errors import KakeyaError
from kakeya.engine.adapters.pages import ReadAdapter
from kakeya.engine.adapters.slots import EngineAdapters, SlottedAdapter
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.engine.steps.sequence import SequenceTools
from kakeya.generation.frames import Done, EngineFrame, TokenLogprob, Tokens
from kakeya.generation.request import DecodeJob
from kakeya.mlx.loader import load
from kakeya.mlx.model import MlxModel
from tests.engine.rig import matcher_of, tools

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ROOT / "kakeya" / "models" / "kakeya-tiny"
TRAINED = ROOT / "tests" / "adapters" / "trained"
FOLDERS = sorted(path for path in TRAINED.iterdir() if path.is_dir())
NAMES = [folder.name for folder in FOLDERS]


@dataclass(eq=False)
class Answer:
    """What one job came to; `after` gets each number of tokens as it is reached."""

    after: Callable[[int], None] = lambda count: None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None
    error: KakeyaError | None = None

    def put(self, frame: EngineFrame) -> None:
        if isinstance(frame, Tokens):
            self.tokens += frame.token_ids
            self.logprobs += frame.logprobs
            self.after(len(self.tokens))
        elif isinstance(frame, Done):
            self.done = frame

    def fail(self, error: KakeyaError) -> None:
        self.error = error


@dataclass
class AdapterRig:
    model: MlxModel
    tools: SequenceTools
    adapters: EngineAdapters

    def run(self, *jobs: tuple[DecodeJob, Answer], rows: int = 16) -> list[list[int]]:
        """Run jobs that begin at once, on this thread, until all have ended."""
        with_end = Ending(Scheduler(self.model, self.tools, max_running=rows), len(jobs))
        for job, answer in jobs:
            with_end.submit(job, answer)
        with_end.scheduler.run()
        return [answer.tokens for _, answer in jobs]

    def alone(self, job: DecodeJob) -> list[int]:
        return self.run((job, Answer()))[0]


class Ending:
    """Stops a scheduler when as many jobs as were told have ended."""

    def __init__(self, scheduler: Scheduler, jobs: int) -> None:
        self.scheduler = scheduler
        self.left = jobs

    def submit(self, job: DecodeJob, answer: Answer) -> QueueTicket:
        def put(frame: EngineFrame) -> None:
            answer.put(frame)
            if isinstance(frame, Done):
                self.end()

        def fail(error: KakeyaError) -> None:
            answer.fail(error)
            self.end()

        grammar = matcher_of(self.scheduler._tools, job)
        ticket = QueueTicket(job, put, fail, grammar)
        self.scheduler.submit(ticket)
        return ticket

    def end(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.scheduler.stop()


def adapter_rig(model: MlxModel) -> AdapterRig:
    """Fresh tools and empty slots around a model."""
    assert model.adapters is not None
    adapters = EngineAdapters(model.adapters)
    made = tools(eager=False)
    return AdapterRig(model, SequenceTools(**{**_fields(made), "adapters": adapters}), adapters)


def take(
    adapters: EngineAdapters, adapter_id: str, packed: bytes, instead_of: str = ""
) -> SlottedAdapter:
    """Load an adapter that lies in our own memory."""
    return adapters.load(adapter_id, ReadAdapter(packed), instead_of)


def tiny(*, slots: int = 9, rank: int = 8) -> MlxModel:
    return MlxModel(load(str(TINY), "tiny", adapter_slots=slots, adapter_rank=rank), 0.0, False)


def _fields(made: SequenceTools) -> dict[str, object]:
    return {name: getattr(made, name) for name in SequenceTools.__slots__}
