"""The soak of the whole fleet: a day in virtual time, an hour of real nodes, and a verdict.

virtual   25 nodes of the product's own gossip code, 24 hours, 30 random faults in each
real      3 nodes in network namespaces (Linux, root) under traffic, 60 minutes of random faults

Everything is drawn from the seed: the virtual day repeats exactly, the hour does so but for the
times of a real machine. FOLDER gets `events.log`, `samples.jsonl` (every process, each 10 s),
`table.txt` (each minute), and the logs of the nodes. The exit status is 0 if every row holds.

scripts/soak --hour [--seed N] [--folder FOLDER]
scripts/soak --minutes 10 --virtual-hours 0
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.samples import write_table
from benchmarks.soak.slopes import Verdict
from benchmarks.soak.virtual_day import run_day

_HOUR_MIN, _DAY_H = 60.0, 24


def main() -> int:
    """Run what is asked for; 0 if all of it holds."""
    options = _options()
    folder: Path = options.folder or Path(f"soak-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.mkdir(parents=True)
    head = [f"seed {options.seed}, {time.strftime('%F %T')}"]
    rows: list[Verdict] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        with (folder / "events.log").open("a") as file:
            file.write(line + "\n")

    tell(head[0])
    if options.virtual_hours:
        logging.getLogger("kakeya").setLevel(logging.CRITICAL)  # lost messages are no news here
        day, done = run_day(options.seed, options.virtual_hours, tell)
        rows += day
        head.append(f"virtual: {options.virtual_hours} h, {done.total()} faults: {dict(done)}")
        write_table(folder / "table.txt", head, rows)
    if options.minutes:
        from benchmarks.soak.real_hour import real_hour  # needs what only tests need

        def keep(real: Sequence[Verdict]) -> None:
            write_table(folder / "table.txt", [*head, "the hour is not over"], [*rows, *real])

        rows += real_hour(folder, options.minutes, options.seed, tell, keep)
    broken = sum(row.is_met is False for row in rows)
    unseen = sum(row.is_met is None for row in rows)
    verdict = f"{broken} rows do not hold" if broken else "all that was judged holds"
    head.append(f"verdict: {verdict}, {unseen} of {len(rows)} rows are not judged")
    write_table(folder / "table.txt", head, rows)
    tell((folder / "table.txt").read_text())
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hour", action="store_true", help="the whole soak, which is also the default")
    add("--minutes", type=float, default=_HOUR_MIN, help="of real nodes; 0 = none")
    add("--virtual-hours", type=int, default=_DAY_H, help="0 = none")
    add("--seed", type=int, default=secrets.randbelow(10**6))
    add("--folder", type=Path, help="a new one for what it finds; soak-DATE where it is left out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
