"""Run benchmarks one after the other and print a table of the JSON lines that they print.

Each line names what was measured, our figure, the baseline's, their ratio and the goal.
`--model real` runs them on the model that scripts/real_model makes, `--model FOLDER` on another;
without names, all benchmarks that can.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.models import REAL

TOP = Path(__file__).resolve().parent.parent
BENCHMARKS = TOP / "benchmarks"
COLUMNS = ("what", "ours", "baseline", "ratio", "goal", "met")
MAIN = 'if __name__ == "__main__":'
ANY_MODEL = "any_model("
"""Stands in each benchmark that runs on a model of the caller's choice."""


def chosen(names: list[str], model: Path | None) -> list[Path]:
    texts = {path: path.read_text("utf-8") for path in sorted(BENCHMARKS.glob("*.py"))}
    wanted = (MAIN,) if model is None else (MAIN, ANY_MODEL)
    known = {path.stem: path for path, text in texts.items() if all(one in text for one in wanted)}
    unknown = [name for name in names if Path(name).stem not in known]
    if unknown:
        kind = "" if model is None else " that runs on any model"
        sys.exit(f"bench: no benchmark{kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[Path(name).stem] for name in names] or list(known.values())


def named(model: str) -> Path:
    folder = REAL if model == "real" else Path(model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        mend = "scripts/real_model makes it" if model == "real" else "it has no config.json"
        sys.exit(f"bench: no model in {folder}: {mend}")
    return folder


def results(script: Path, model: Path | None) -> list[dict[str, object]]:
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


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> int:
    table = Table(*COLUMNS)
    failed = False
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", type=named)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for script in chosen(options.names, options.model):
        print(f"bench: {script.stem}", file=sys.stderr, flush=True)
        for entry in results(script, options.model):
            failed |= "FAILED" in str(entry.get("what"))
            table.add_row(*(shown(entry.get(column)) for column in COLUMNS))
    Console().print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
