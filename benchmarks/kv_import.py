"""Taking the KV of a prompt from pages against computing it: the two ways to begin an answer.

One model thread's work on a 3.7 M parameter model with random weights and a prompt of 1001 tokens,
of which 1000 are prefilled: mapping the pages, copying three whole blocks and a tail of 232 tokens
into a fresh sequence and unmapping, against prefill on the engine's own grid. Export is measured
too, as a share of the prefill that it goes along with. In turns, medians.

    python -m benchmarks.kv_import
"""

from __future__ import annotations

from benchmarks.kv_prompt import prompt
from benchmarks.report import emit, interleaved, median

_GOAL = 100.0


def main() -> None:
    with prompt() as text:
        taken = interleaved(
            {
                "import": lambda: text.take(text.blocks),
                "prefill": text.prefill,
                "prefill and export": text.prefill_and_export,
            },
            repeats=15,
        )
        facts, size = text.facts, sum(block.pages.length for block in text.blocks)
    middle = {name: median(values) for name, values in taken.items()}
    ratio = median([p / i for p, i in zip(taken["prefill"], taken["import"], strict=True)])
    emit(
        "import of 1000 tokens of KV from pages against their prefill, ms",
        ours=1000 * middle["import"],
        baseline=1000 * middle["prefill"],
        ratio=ratio,
        goal=f">={_GOAL:.0f}x faster",
        met=ratio >= _GOAL,
        prefill_and_export_ms=round(1000 * middle["prefill and export"], 2),
        best_import_ms=round(1000 * min(taken["import"]), 3),
        best_prefill_ms=round(1000 * min(taken["prefill"]), 2),
        bytes=size,
        grid=facts.prefill_grid,
        blas=facts.blas_accelerated,
    )


if __name__ == "__main__":
    main()
