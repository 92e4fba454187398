"""A real model with random weights, and the tools of an engine around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakeya.decoding.control.controller import DraftController
from kakeya.decoding.processors.grammar import GrammarMatcher
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.steps.drafting import RemoteBooks
from kakeya.engine.steps.sequence import SequenceRun, SequenceTools, Violations
from kakeya.generation.frames import Done, EngineFrame, TokenLogprob, Tokens
from kakeya.generation.request import DecodeJob
from kakeya.mlx.loader import load
from kakeya.mlx.model import MlxModel
from kakeya.v1 import engine_pb2 as pb
from tests.mlx.random_models import write_model


class EagerController(DraftController):
    """Verifies every draft whole: equality must not depend on what pays."""

    def rows(self, draft, *, wait_s=0.0):
        return len(draft.tokens)

    def wants(self, source):
        return True

    def patience_s(self, source):
        return 5.0


@dataclass
class Rig:
    model: MlxModel
    tools: SequenceTools

    def run(self, job: DecodeJob) -> tuple[list[int], Done]:
        return collect(SequenceRun(self.model, self.tools, job, matcher_of(self.tools, job)))


def collect(run: SequenceRun) -> tuple[list[int], Done]:
    frames: list[EngineFrame] = list(run.frames())
    tokens = [token for f in frames if isinstance(f, Tokens) for token in f.token_ids]
    done = frames[-1]
    assert isinstance(done, Done)
    assert sum(isinstance(f, Done) for f in frames) == 1
    return tokens, done


def matcher_of(tools: SequenceTools, job: DecodeJob) -> GrammarMatcher | None:
    """A new matcher for the job's grammar."""
    if not job.grammar:
        return None
    assert tools.grammars is not None
    return tools.grammars.matcher(job.grammar)


def logprobs_in(run: SequenceRun) -> list[TokenLogprob]:
    """Those of all tokens of a run."""
    return [each for f in run.frames() if isinstance(f, Tokens) for each in f.logprobs]


def tools(*, eager: bool = True, kv_bytes: int = 1 << 30, rows: int = 8) -> SequenceTools:
    return SequenceTools(
        slots=KvSlots(kv_bytes),
        controller=EagerController() if eager else DraftController(),
        books=RemoteBooks(),
        violations=Violations(),
        max_draft_rows=rows,
    )


def load_rig(folder: Path, architecture: str, *, eager: bool = True, **options: object) -> Rig:
    write_model(folder, architecture, **options)
    return Rig(MlxModel(load(str(folder), architecture), 0.0, False), tools(eager=eager))


def frames_of(message: pb.DecodeResponse) -> tuple[pb.DecodeResponse, ...]:
    """The frames of one message of a decode, in order."""
    return (message, *message.following)
