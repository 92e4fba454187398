"""Run benchmarks one after the other and print a table of the JSON lines that they print.

Each line names what was measured, our figure, the baseline's, their ratio and the goal. Benchmarks
that run on any model run on a small random one and, where scripts/real_model has made it, on the
model of real size: the table has both side by side. `--model real`, `--model 89m` or
`--model FOLDER`, any number of times, runs them on these alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.models import REAL, SHAPES, random_model

TOP = Path(__file__).resolve().parent.parent
BENCHMARKS = TOP / "benchmarks"
SMALL = "small"
COLUMNS = ("ours", "beside", "ratio", "goal")
Entry: TypeAlias = dict[str, object]
MAIN = 'if __name__ == "__main__":'
ANY_MODEL = "any_model("
"""Stands in each benchmark that runs on a model of the caller's choice."""


def chosen(names: list[str], *, on_any_model: bool) -> list[Path]:
    texts = {path: path.read_text("utf-8") for path in sorted(BENCHMARKS.glob("*.py"))}
    wanted = (MAIN, ANY_MODEL) if on_any_model else (MAIN,)
    known = {path.stem: path for path, text in texts.items() if all(one in text for one in wanted)}
    unknown = [name for name in names if Path(name).stem not in known]
    if unknown:
        kind = " that runs on any model" if on_any_model else ""
        sys.exit(f"bench: no benchmark{kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[Path(name).stem] for name in names] or list(known.values())


def named(model: str) -> Path:
    if model in SHAPES:
        return random_model(model)
    folder = REAL if model == "real" else Path(model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        mend = "scripts/real_model makes it" if model == "real" else "it has no config.json"
        sys.exit(f"bench: no model in {folder}: {mend}")
    return folder


def results(script: Path, model: Path | None) -> list[Entry]:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script.stem}"],
        cwd=TOP,
        env=os.environ | ({} if model is None else {"KAKEYA_BENCH_MODEL": str(model)}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = []
    for line in run.stdout.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            print(line, flush=True)
            found.append(entry)
    if run.returncode or not found:
        found.append({"what": f"{script.stem}: FAILED (exit status {run.returncode})"})
    return found


def side_by_side(sizes: Mapping[str, Sequence[Entry]]) -> list[tuple[str, ...]]:
    """Rows of a table: lines of the same measure in one row, four cells for each size."""
    rows: dict[tuple[object, int], dict[str, Entry]] = {}
    for size, entries in sizes.items():
        seen: Counter[object] = Counter()
        for entry in entries:
            what = entry.get("what")
            rows.setdefault((what, seen[what]), {})[size] = entry
            seen[what] += 1
    return [
        (str(what), *(cell for size in sizes for cell in cells(row.get(size, {}))))
        for (what, _), row in rows.items()
    ]


def cells(entry: Entry) -> tuple[str, ...]:
    verdict = "met" if entry.get("met") else "MISSED"
    goal = f"{entry['goal']}: {verdict}" if "goal" in entry else ""
    return (*(shown(entry.get(column)) for column in ("ours", "baseline", "ratio")), goal)


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", type=named, action="append", default=[])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    models: dict[str, Path | None] = {folder.name: folder for folder in options.model}
    if not models:
        models = {SMALL: None} | ({REAL.name: REAL} if (REAL / "config.json").is_file() else {})
    table = Table("what", *(f"{size}: {one}" for size in models for one in COLUMNS))
    failed = False
    for script in chosen(options.names, on_any_model=bool(options.model)):
        fits_any = ANY_MODEL in script.read_text("utf-8")
        sizes: dict[str, list[Entry]] = {size: [] for size in models}
        for size, model in models.items():
            if fits_any or model is None:
                print(f"bench: {script.stem}, {size}", file=sys.stderr, flush=True)
                sizes[size] = results(script, model)
                failed |= any("FAILED" in str(entry.get("what")) for entry in sizes[size])
        for row in side_by_side(sizes):
            table.add_row(*row)
    Console().print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
