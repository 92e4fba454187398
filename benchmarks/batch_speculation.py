"""Eight streams with n-gram drafts against the same eight without: drafting and batching together.

.venv/bin/python -m benchmarks.batch_speculation
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

from benchmarks.models import random_model  # noqa: E402
from benchmarks.plain import known_costs, known_model  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.engine.kv.slots import KvSlots  # noqa: E402
from kakeya.engine.steps.drafting import RemoteBooks  # noqa: E402
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler  # noqa: E402
from kakeya.engine.steps.sequence import SequenceTools, Violations  # noqa: E402
from kakeya.generation.frames import Done, EngineFrame  # noqa: E402
from kakeya.generation.request import DecodeJob, DraftSource, Sampling  # noqa: E402
from kakeya.mlx.model import MlxModel  # noqa: E402

ROWS = 8
TOKENS = 128
NGRAM = (DraftSource(kind="ngram"),)


class Bench:
    """One model and one kind of text; what drafting learns stays, as in an engine."""

    def __init__(self, model: MlxModel, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self._controller = known_costs(model)
        rng = random.Random(11)
        self._prompts = [[rng.randrange(1, 3000) for _ in range(32 + row)] for row in range(ROWS)]
        self.accepted = self.blocks = 0
        self.thread_s: dict[bool, list[float]] = {True: [], False: []}
        """CPU time of the model thread in each run with drafts, and without."""

    def run(self, sources: Sequence[DraftSource]) -> float:
        """Tokens per second of eight generations that begin at once, prompts included."""
        tools = SequenceTools(
            slots=KvSlots(1 << 30),
            controller=self._controller,
            books=RemoteBooks(),
            violations=Violations(),
            max_draft_rows=16,
        )
        scheduler = Scheduler(self._model, tools, max_running=ROWS)
        ended: list[Done] = []

        def on_frame(frame: EngineFrame) -> None:
            if isinstance(frame, Done):
                ended.append(frame)
                if len(ended) == ROWS:
                    scheduler.stop()

        for row, prompt in enumerate(self._prompts):
            sampling = Sampling(temperature=self._temperature, seed=row)
            job = DecodeJob(
                token_ids=prompt, max_tokens=TOKENS, draft_sources=tuple(sources), sampling=sampling
            )
            scheduler.submit(QueueTicket(job, on_frame, fail))
        started, thread_s = time.perf_counter(), time.thread_time()
        scheduler.run()
        took_s = time.perf_counter() - started
        self.thread_s[bool(sources)].append(time.thread_time() - thread_s)
        if sources:
            self.accepted = sum(done.usage.accepted for done in ended)
            self.blocks = sum(done.usage.forwards for done in ended)
        return ROWS * TOKENS / took_s


def fail(problem: Exception) -> None:
    raise problem


def compare(name: str, bench: Bench, repeats: int = 12) -> None:
    """In turns, of which every second one begins with the other: what ran before has its effect."""
    measures: dict[str, Callable[[], float]] = {
        "off": lambda: bench.run(()),
        "on": lambda: bench.run(NGRAM),
    }
    for measure in measures.values():
        measure()
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(repeats):
        for which in ("off", "on") if turn % 2 else ("on", "off"):
            taken[which].append(measures[which]())
    thread_s = {drafts: sum(taken_s[1:]) for drafts, taken_s in bench.thread_s.items()}
    ratio = median([on / off for on, off in zip(taken["on"], taken["off"], strict=True)])
    emit(
        f"8 streams with n-gram drafts, tokens/s, {name}",
        ours=median(taken["on"]),
        baseline=median(taken["off"]),
        ratio=ratio,
        goal=">= 1 of drafts off",
        met=ratio >= 1,
        thread_ratio=round(thread_s[False] / thread_s[True], 3),
        accepted=bench.accepted,
        forwards=bench.blocks,
    )


def main() -> None:
    model = known_model(str(random_model("3m")))
    compare("3m, cyclic text", Bench(model, 0.0))
    compare("3m, random text", Bench(model, 1.0), repeats=24)


if __name__ == "__main__":
    main()
