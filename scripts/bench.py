"""Run benchmarks one after the other and print a table of the JSON lines that they print.

Each line names what was measured, our figure, the baseline's, their ratio and the goal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

TOP = Path(__file__).resolve().parent.parent
BENCHMARKS = TOP / "benchmarks"
COLUMNS = ("what", "ours", "baseline", "ratio", "goal", "met")
MAIN = 'if __name__ == "__main__":'


def chosen(names: list[str]) -> list[Path]:
    paths = sorted(BENCHMARKS.glob("*.py"))
    known = {path.stem: path for path in paths if MAIN in path.read_text("utf-8")}
    unknown = [name for name in names if Path(name).stem not in known]
    if unknown:
        sys.exit(f"bench: no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[Path(name).stem] for name in names] or list(known.values())


def results(script: Path) -> list[dict[str, object]]:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script.stem}"],
        cwd=TOP,
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
    for script in chosen(sys.argv[1:]):
        print(f"bench: {script.stem}", file=sys.stderr, flush=True)
        for entry in results(script):
            failed |= "FAILED" in str(entry.get("what"))
            table.add_row(*(shown(entry.get(column)) for column in COLUMNS))
    Console().print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
