"""N-gram speculation against mlx-lm's generate_step, in one process, of one model.

Three texts: the cyclic text of a random model (the ceiling), source code that the embedded model
continues after seeing it (self-repetitive, real), and high-temperature text in which nothing
repeats (what drafting must not slow down). Tokens are compared with plain decoding each time.

    .venv/bin/python -m benchmarks.speculation
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.models import EMBEDDED, NAMED, any_model, repeats  # noqa: E402
from benchmarks.plain import known_costs, known_model, plain_network  # noqa: E402
from benchmarks.report import emit, interleaved, median  # noqa: E402
from kakeya.engine.kv.slots import KvSlots  # noqa: E402
from kakeya.engine.steps.drafting import RemoteBooks  # noqa: E402
from kakeya.engine.steps.sequence import SequenceRun, SequenceTools, Violations  # noqa: E402
from kakeya.generation.frames import Tokens  # noqa: E402
from kakeya.generation.request import DecodeJob, DraftSource, Sampling  # noqa: E402

TOKENS = 64 if NAMED else 256
NGRAM = (DraftSource(kind="ngram"),)
CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"


"""
LIST = "Shopping list: apple, pear, plum, cherry, grape, lemon, melon, peach, fig, date\n" * 2
_EDIT = f"Original:\n{CODE}\nEdited:\n"
ECHO = f"{_EDIT}{CODE.replace('Point', 'Spot')}\n{_EDIT}"
"""Prompts after which a model copies what it has read."""


class Bench:
    """One model, the tools of an engine, and the loops that are compared on it."""

    def __init__(self, folder: str) -> None:
        self.plain = plain_network(folder)
        self.model = known_model(folder)
        self.tools = SequenceTools(
            slots=KvSlots(0),
            controller=known_costs(self.model),
            books=RemoteBooks(),
            violations=Violations(),
            max_draft_rows=16,
        )

    def ours(self, prompt: list[int], sampling: Sampling, drafts: bool) -> list[int]:
        """Tokens of our loop."""
        job = DecodeJob(
            token_ids=prompt,
            max_tokens=TOKENS,
            sampling=sampling,
            draft_sources=NGRAM if drafts else (),
        )
        frames = SequenceRun(self.model, self.tools, job).frames()
        return [t for f in frames if isinstance(f, Tokens) for t in f.token_ids]

    def theirs(self, prompt: list[int], sampler: Callable[[mx.array], mx.array] | None) -> None:
        """Run generate_step to the end."""
        steps = generate_step(mx.array(prompt), self.plain, max_tokens=TOKENS, sampler=sampler)
        for _ in steps:
            pass


def rate(work: Callable[[], object]) -> Callable[[], float]:
    """Tokens per second of one run."""

    def measure() -> float:
        started = time.perf_counter()
        work()
        return TOKENS / (time.perf_counter() - started)

    return measure


def compare(name: str, folder: str, prompt: list[int], temperature: float, goal: float) -> None:
    bench = Bench(folder)
    sampling = Sampling(temperature=temperature, seed=5)
    sampler = None
    if temperature > 0:

        def sampler(logprobs: mx.array) -> mx.array:
            return mx.random.categorical(logprobs / temperature)

    identical = bench.ours(prompt, sampling, True) == bench.ours(prompt, sampling, False)
    taken = interleaved(
        {
            "drafted": rate(lambda: bench.ours(prompt, sampling, True)),
            "plain": rate(lambda: bench.ours(prompt, sampling, False)),
            "mlx_lm": rate(lambda: bench.theirs(prompt, sampler)),
        },
        repeats=repeats(7),
    )
    ours, theirs = median(taken["drafted"]), median(taken["mlx_lm"])
    emit(
        "n-gram speculation, tokens/s",
        model=name,
        ours=ours,
        baseline=theirs,
        ratio=ours / theirs,
        goal=f">= {goal} of generate_step",
        met=ours / theirs >= goal and identical,
        plain=round(median(taken["plain"]), 1),
        of_plain=round(ours / median(taken["plain"]), 2),
        identical=identical,
    )


def main() -> None:
    sized = any_model("3m")
    if NAMED:
        tokenizer = Tokenizer.from_file(str(sized / "tokenizer.json"))
        code = tokenizer.encode(CODE * 4).ids
        for what, text in (("list repeated", LIST), ("file echoed with an edit", ECHO)):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            compare(f"{what}, {sized.name}", str(sized), ids, 0.0, 1.5)
        compare(f"repeated code, {sized.name}", str(sized), code, 0.0, 2.5)
        compare(f"no match, {sized.name}", str(sized), list(range(100, 160)), 3.0, 0.95)
        return
    code = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(CODE * 4).ids
    three = str(sized)
    compare("cyclic text, 3m", three, list(range(40)), 0.0, 2.5)
    compare("repeated code, kakeya-tiny", str(EMBEDDED), code, 0.0, 2.5)
    compare("no match, kakeya-tiny", str(EMBEDDED), list(range(100, 160)), 3.0, 0.95)
    compare("no match, 3m", three, list(range(40)), 3.0, 0.95)


if __name__ == "__main__":
    main()
