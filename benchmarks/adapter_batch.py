"""Eight different adapters in a batch of eight against the model's own batch of eight.

The adapters have rank 8 and change every linear layer, which is the most that one can cost. Beside
it: what sharing a forward gives at all, against sequences that take turns, and mlx-lm's own
batch_generate on the same prompts.

    .venv/bin/python -m benchmarks.adapter_batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

import numpy as np  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from benchmarks.models import EMBEDDED, random_model  # noqa: E402
from benchmarks.plain import plain_network  # noqa: E402
from benchmarks.report import emit, interleaved, median  # noqa: E402
from kakeya.adapters.files.packed import PackedAdapter, PackedTensor, Precision  # noqa: E402
from kakeya.decoding.control.controller import DraftController  # noqa: E402
from kakeya.engine.adapters.slots import SlottedAdapter  # noqa: E402
from kakeya.engine.kv.slots import KvSlots  # noqa: E402
from kakeya.engine.steps.drafting import RemoteBooks  # noqa: E402
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler  # noqa: E402
from kakeya.engine.steps.sequence import SequenceTools, Violations  # noqa: E402
from kakeya.generation.frames import Done, EngineFrame  # noqa: E402
from kakeya.generation.request import DecodeJob  # noqa: E402
from kakeya.mlx.loader import load  # noqa: E402
from kakeya.mlx.lora import AdapterSlots  # noqa: E402
from kakeya.mlx.model import MlxModel  # noqa: E402

ROWS = 8
RANK = 8
TOKENS = 96
LAYERS = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (256, 128),
    "self_attn.v_proj": (256, 128),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (256, 704),
    "mlp.up_proj": (256, 704),
    "mlp.down_proj": (704, 256),
}
"""Of both models: features in and out."""


class Loaded:
    """What sequences ask for their adapters; slot n holds the one named n."""

    def enter(self, adapter_id: str) -> SlottedAdapter:
        """Nothing is counted here."""
        return SlottedAdapter(adapter_id, int(adapter_id), adapter_id)

    def leave(self, use: SlottedAdapter) -> None:
        """Nothing is counted here."""


class Bench:
    """One model with eight adapters, and the loops that are compared on it."""

    def __init__(self, folder: str) -> None:
        self.plain = plain_network(folder)
        self.loaded = load(folder, "bench", adapter_slots=ROWS, adapter_rank=RANK)
        self.model = MlxModel(self.loaded, 0.0, True)
        self.turns = MlxModel(self.loaded, 0.0, True)
        self.turns._facts = replace(self.turns.facts, batch_rows=1)  # noqa: SLF001
        self.prompts = [[(31 * row + 7 * at) % 3000 for at in range(24 + row)] for row in range(8)]

    def load_adapters(self) -> None:
        """Fill the slots."""
        assert isinstance(self.loaded.adapters, AdapterSlots)
        self.loaded.adapters.grow(ROWS)
        for slot in range(1, ROWS + 1):
            self.loaded.adapters.load(slot, random_adapter(slot))

    def run(self, model: MlxModel, adapters: list[str]) -> float:
        """Tokens per second of eight generations that begin at once, prompts included."""
        tools = SequenceTools(
            slots=KvSlots(1 << 30),
            controller=DraftController(),
            books=RemoteBooks(),
            violations=Violations(),
            max_draft_rows=16,
            adapters=Loaded(),  # type: ignore[arg-type]
        )
        scheduler = Scheduler(model, tools, max_running=ROWS)
        ended: list[Done] = []

        def on_frame(frame: EngineFrame) -> None:
            if isinstance(frame, Done):
                ended.append(frame)
                if len(ended) == ROWS:
                    scheduler.stop()

        for prompt, adapter_id in zip(self.prompts, adapters, strict=True):
            job = DecodeJob(token_ids=prompt, max_tokens=TOKENS, adapter_id=adapter_id)
            scheduler.submit(QueueTicket(job, on_frame, fail))
        started = time.perf_counter()
        scheduler.run()
        return ROWS * TOKENS / (time.perf_counter() - started)

    def theirs(self) -> float:
        """Tokens per second of mlx-lm's batch generator on the same prompts."""
        started = time.perf_counter()
        generator = BatchGenerator(self.plain)
        generator.insert(self.prompts, [TOKENS] * ROWS)
        while generator.next_generated():
            pass
        generator.close()
        return ROWS * TOKENS / (time.perf_counter() - started)


def fail(problem: Exception) -> None:
    raise problem


def random_adapter(seed: int) -> PackedAdapter:
    """An adapter of every linear layer."""
    rng = np.random.default_rng(seed)
    tensors = tuple(
        PackedTensor(
            path=f"model.layers.{layer}.{name}",
            a=rng.normal(0, 0.05, (taken, RANK)).astype(np.float32),
            b=rng.normal(0, 0.05, (RANK, given)).astype(np.float32),
            a_scales=None,
            b_scales=None,
        )
        for layer in range(4)
        for name, (taken, given) in LAYERS.items()
    )
    return PackedAdapter(rank=RANK, scale=1.0, precision=Precision.EXACT, base="", tensors=tensors)


def rounds(bench: Bench) -> dict[str, Callable[[], float]]:
    none = [""] * ROWS
    different = [str(slot) for slot in range(1, ROWS + 1)]
    return {
        "base": lambda: bench.run(bench.model, none),
        "adapters": lambda: bench.run(bench.model, different),
        "one": lambda: bench.run(bench.model, ["1"] * ROWS),
        "turns": lambda: bench.run(bench.turns, none),
        "mlx_lm": bench.theirs,
    }


def compare(name: str, folder: str) -> None:
    bench = Bench(folder)
    bench.load_adapters()
    taken = {key: median(rates) for key, rates in interleaved(rounds(bench), repeats=7).items()}
    ratio = taken["adapters"] / taken["base"]
    emit(
        f"8 different adapters in a batch of 8, tokens/s, {name}",
        ours=taken["adapters"],
        baseline=taken["base"],
        ratio=ratio,
        goal=">= 0.7 of the base model's batch of 8",
        met=ratio >= 0.7,
        same_adapter=round(taken["one"] / taken["base"], 3),
    )
    emit(
        f"8 sequences in one forward, tokens/s, {name}",
        ours=taken["base"],
        baseline=taken["turns"],
        ratio=taken["base"] / taken["turns"],
        goal="> 1 of taking turns",
        met=taken["base"] > taken["turns"],
        mlx_lm_batch=round(taken["mlx_lm"], 1),
        of_mlx_lm_batch=round(taken["base"] / taken["mlx_lm"], 3),
    )


def main() -> None:
    compare("3m", str(random_model("3m")))
    compare("kakeya-tiny", str(EMBEDDED))


if __name__ == "__main__":
    main()
