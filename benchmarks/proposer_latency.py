"""Goal 5: how long one n-gram draft takes, at any length of the text.

The baseline is a plain backwards scan. Both draft the same tokens wherever the longest match is
not longer than the scan looks for.

    .venv/bin/python -m benchmarks.proposer_latency
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import texts
from benchmarks.lookup import scan
from benchmarks.report import emit, interleaved, median
from kakeya.decoding.ngram.ngram import NGramIndex

SIZE = 8
LENGTHS = (100, 1_000, 10_000, 100_000)
GOAL_US = 2.0
GOAL_TIMES = 500.0


def seconds_per_call(work: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - started) / calls


def drafting_us(text: list[int]) -> Callable[[], float]:
    """A measure of one draft at the end of `text`."""
    index = NGramIndex()
    index.extend(text)
    return lambda: 1e6 * seconds_per_call(lambda: index.draft(SIZE), 2_000)


def scanning_us(text: list[int]) -> Callable[[], float]:
    calls = max(1, 20_000 // len(text))
    return lambda: 1e6 * seconds_per_call(lambda: scan(text, SIZE, overlapped=False), calls)


def appending_us(text: list[int]) -> float:
    """What one committed token costs the index."""
    index = NGramIndex()
    started = time.perf_counter()
    index.extend(text)
    return 1e6 * (time.perf_counter() - started) / len(text)


def main() -> None:
    code, log = texts.python_code(max(LENGTHS)), texts.tool_log()
    worst, times, rows = 0.0, 0.0, {}
    for length in LENGTHS:
        for name, text in (
            ("no match", texts.no_repetition(length)),
            ("code", code[:length]),
            ("log", (log * (length // len(log) + 1))[:length]),
        ):
            taken = interleaved({"ours": drafting_us(text), "scan": scanning_us(text)})
            ours, theirs = median(taken["ours"]), median(taken["scan"])
            worst = max(worst, ours)
            rows[f"{length} {name}"] = [round(ours, 2), round(theirs, 1)]
            if (length, name) == (10_000, "no match"):
                times = theirs / ours
    emit(
        "n-gram draft, us, worst case of 100..100k tokens; ratio at 10k without a match",
        ours=worst,
        baseline=rows["10000 no match"][1],
        ratio=times,
        goal=f"< {GOAL_US} us at any length, >= {GOAL_TIMES:.0f}x the scan at 10k",
        met=worst < GOAL_US and times >= GOAL_TIMES,
        append_us=round(appending_us(code), 2),
        us_ours_and_scan=rows,
    )


if __name__ == "__main__":
    main()
