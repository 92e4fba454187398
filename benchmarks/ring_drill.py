"""Ring groups that agents bring up, on machines that are network namespaces (Linux and root).

    losses    how long after a loss in the middle of an answer the leader knows that the group is
              not up, how long until it is up again, and whether the answer is the same
    busy      how often a group is lost while so many programs compute beside it
    splits    the model of `scripts/real_model` (9 heads, 3 KV heads) over 3 ranks, refused over 2
              and 4, and a random qwen3_moe as a pipeline of 1 and 3 layers: answers against those
              of one process

.venv/bin/python -m benchmarks.ring_drill losses [--times 3] [--kind "rank 1 stopped"]
.venv/bin/python -m benchmarks.ring_drill busy [--seconds 60] [--programs 40]
.venv/bin/python -m benchmarks.ring_drill splits
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models import EMBEDDED, REAL
from benchmarks.report import emit, percentile
from benchmarks.shelf_drill.__main__ import found
from kakeya.cli.child import NodeProcess
from kakeya.cli.node_api import NodeApi
from tests import netns
from tests.mlx.random_models import QWEN3_MOE, write_model
from tests.node.test_three_namespaces import HTTP, Mini

FLAGS = ("--exchange-interval", "1")
GROUP = "shared"
PROMPTS = ("import os\n\n\ndef main(", "The sea is", "class Ring:\n    def __init__(self")
STREAMED_TOKENS = 300
_UP_S = 300.0
_LOOK_S = 0.05
_GOAL_S = 10.0
MOE = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}


def ask(address: str, prompt: str, tokens: int, model: str, **more: object) -> str:
    """One answer, whole."""
    return "".join(stream(address, prompt, tokens, model, **more))


def stream(address: str, prompt: str, tokens: int, model: str, **more: object) -> Iterator[str]:
    """One answer in pieces."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_UP_S)
    with contextlib.closing(connection):
        said = json.dumps({**body, "stream": True})
        connection.request("POST", "/v1/completions", said, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"refused: {answer.read().decode()[:400]}")
        while line := answer.readline():
            if line.startswith(b"data: {"):
                told = json.loads(line[6:])
                if "error" in told:
                    yield f"error: {told['error']}"
                for choice in told.get("choices", ()):
                    yield choice["text"]


class Fleet:
    """Machines with a node each, of which some have a group; this thread is on the first."""

    def __init__(self, minis: Sequence[Mini]) -> None:
        self.minis = minis
        self.api = NodeApi(address=HTTP)

    def ring(self, *arguments: str) -> tuple[int, str]:
        """`kakeya ring` on the first machine: its exit status, and what it says."""
        program = ("-m", "kakeya.cli.main", "ring", *arguments)
        data = str(self.minis[0].data)
        done = self.minis[0].machine.python(*program, "--data-dir", data, limit_s=_UP_S)
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr

    def up(self, model: str, ranks: int, *flags: str) -> tuple[int, str]:
        """Bring a group up on the first machines."""
        nodes = ",".join(mini.node_id for mini in self.minis[:ranks])
        return self.ring("up", model, "--nodes", nodes, "--name", GROUP, *flags)

    def led(self) -> dict[str, Any]:
        """The group as its leader has it."""
        groups = self.api.get("/api/v1/status")["rings"]["led"]
        return dict(groups[0]) if groups else {"state": "none", "restarts": 0}

    def waits_for(self, *states: str) -> float:
        """The moment at which the group is in one of these states."""
        until = time.monotonic() + _UP_S
        while self.led()["state"] not in states:
            if time.monotonic() > until:
                raise SystemExit(f"the group is not {states}: {self.led()}")
            time.sleep(_LOOK_S)
        return time.monotonic()

    def pids(self) -> list[int]:
        """Rank 0, and rank 1 as its own node has it."""
        models = self.api.get("/api/v1/status")["models"]
        own = [int(one["pid"]) for one in models if one["model_id"] == GROUP]
        with self.minis[1].machine.entered():
            ranks = self.api.get("/api/v1/status")["rings"]["ranks"]
        return [*own, *(int(rank["pid"]) for rank in ranks)]


@contextmanager
def fleet(count: int, folder: Path) -> Iterator[Fleet]:
    """So many machines."""
    with netns.network(count) as machines:
        minis = [
            Mini(f"mini-{number}", machine, folder / str(number))
            for number, machine in enumerate(machines, 1)
        ]
        with machines[0].entered():
            asyncio.run(found(minis, FLAGS))
            made = Fleet(minis)
            until = time.monotonic() + 60
            while len(made.api.get("/api/v1/fleet")["nodes"]) < count and time.monotonic() < until:
                time.sleep(0.5)
            yield made


def losing(fleet: Fleet, kind: str) -> Callable[[], None]:
    """Lose a part of the group; how to undo it."""
    member, pids = fleet.minis[1], fleet.pids()
    assert member.node is not None
    what, _, how = kind.rpartition(" ")
    if kind == "cable pulled" or kind == "link silent":
        member.machine.cut(silently=how == "silent")
        return member.machine.heal
    if kind == "agent killed":
        os.kill(member.node.pid, signal.SIGKILL)
        return lambda: _again(member)
    pid = member.node.pid if what == "agent" else pids[int(what[-1])]
    number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
    os.kill(pid, number)
    return lambda: _go_on(pid)


def _again(member: Mini) -> None:
    assert member.node is not None
    member.node.stop(15.0, signal.SIGKILL)
    member.start(*FLAGS)


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


KINDS = (
    *(f"rank {rank} {how}" for how in ("killed", "stopped") for rank in (0, 1)),
    *("agent killed", "agent stopped", "cable pulled", "link silent"),
)


def lose(fleet: Fleet, kind: str, whole: str) -> tuple[float, float, bool]:
    """Seconds until a loss is known and until the group is up again; whether the answer that was
    under way is the same."""
    parts: list[str] = []
    has_begun = threading.Event()

    def hear() -> None:
        with fleet.minis[0].machine.entered():
            for part in stream(HTTP, PROMPTS[0], STREAMED_TOKENS, GROUP):
                parts.append(part)
                if len(parts) == 5:
                    has_begun.set()

    hearing = threading.Thread(target=hear, daemon=True)
    hearing.start()
    has_begun.wait(60)
    before = fleet.led()["restarts"]
    undo = losing(fleet, kind)
    began = time.monotonic()
    known = fleet.waits_for("starting", "waiting")
    undo()
    back = fleet.waits_for("up")
    assert fleet.led()["restarts"] >= before
    hearing.join(_UP_S)
    heard = "".join(parts)
    if heard != whole:
        pairs = zip(heard, whole, strict=False)
        place = next(
            (at for at, (a, b) in enumerate(pairs) if a != b), min(map(len, (heard, whole)))
        )
        print(f"after {place} letters {heard[place:][:200]!r}, not {whole[place:][:60]!r}")
    return known - began, back - began, heard == whole


def losses(folder: Path, kinds: Sequence[str], times: int) -> None:
    """Measure each kind in turns."""
    with fleet(2, folder) as made:
        status, said = made.up(EMBEDDED.name, 2)
        print(said, flush=True)
        if status:
            raise SystemExit(status)
        whole = ask(HTTP, PROMPTS[0], STREAMED_TOKENS, GROUP)
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        backs: dict[str, list[float]] = {kind: [] for kind in kinds}
        same = 0
        for _ in range(times):
            for kind in kinds:
                known_s, back_s, is_same = lose(made, kind, whole)
                print(f"{kind}: {known_s:.2f} s, up again {back_s:.1f} s, {is_same}", flush=True)
                taken[kind].append(known_s)
                backs[kind].append(back_s)
                same += is_same
        for kind in kinds:
            longest = max(taken[kind])
            emit(
                f"{kind}: seconds until the leader knows, median and longest",
                ours=percentile(taken[kind], 0.5),
                baseline=longest,
                ratio=longest / _GOAL_S,
                goal=f"within {_GOAL_S:g} s",
                met=longest <= _GOAL_S,
                up_again_s=round(percentile(backs[kind], 0.5), 1),
                times=times,
                same_answers=f"{same} of {times * len(kinds)}",
            )


def busy(folder: Path, seconds: float, programs: int) -> None:
    """Count the losses of a group that has nothing but a busy machine."""
    spins = (sys.executable, "-c", "while True: pass")
    with fleet(2, folder) as made:
        print(made.up(EMBEDDED.name, 2)[1], flush=True)
        whole = ask(HTTP, PROMPTS[0], STREAMED_TOKENS, GROUP)
        beside = [subprocess.Popen(spins) for _ in range(programs)]
        try:
            until, asked, same = time.monotonic() + seconds, 0, 0
            while time.monotonic() < until:
                same += ask(HTTP, PROMPTS[0], STREAMED_TOKENS, GROUP) == whole
                asked += 1
            load, group = os.getloadavg()[0], made.led()
        finally:
            for one in beside:
                one.kill()
                one.wait()
        emit(
            f"losses of a group beside {programs} programs that compute, in {seconds:g} s",
            ours=group["restarts"],
            baseline=0,
            ratio=same / max(1, asked),
            goal="no loss",
            met=group["restarts"] == 0 and same == asked,
            answers=asked,
            load=round(load, 1),
            reason=group["reason"],
        )


async def said_alone(folder: Path, model: Path) -> list[str]:
    """The answers of one process."""
    async with NodeProcess(folder / model.name, "--model", str(model)) as node:
        ready = asyncio.to_thread(answers, node.http, model.name)
        return await ready


def answers(address: str, model: str) -> list[str]:
    """Greedy answers, and a seeded one."""
    greedy = [ask(address, prompt, 32, model) for prompt in PROMPTS]
    return [*greedy, ask(address, PROMPTS[1], 32, model, temperature=0.8, seed=7)]


def splits(folder: Path) -> None:
    """Bring up the groups, and compare."""
    changes = {**QWEN3_MOE, **MOE, "vocab_size": 3072}
    experts = write_model(folder / "experts", "qwen3", changes=changes, scale=0.2)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, experts / name)
    wanted = {model: asyncio.run(said_alone(folder, model)) for model in (REAL, experts)}
    with fleet(4, folder) as made:
        for ranks in (2, 4):
            status, said = made.up(str(REAL), ranks)
            emit(
                f"{REAL.name} over {ranks} ranks is refused: {said.strip().splitlines()[-1]}",
                ours=status,
                baseline=1,
                ratio=1,
                goal="refused with its reason",
                met=status == 1 and f"which {ranks} ranks cannot share equally" in said,
            )
        pipeline = ("--split", "pipeline", "--layers", "1,3")
        for model, ranks, flags in ((REAL, 3, ()), (experts, 2, pipeline)):
            status, said = made.up(str(model), ranks, *flags)
            print(said, flush=True)
            told = answers(HTTP, GROUP) if not status else []
            same = sum(one == other for one, other in zip(told, wanted[model], strict=False))
            emit(
                f"{model.name} over {ranks} ranks, {' '.join(flags) or 'tensor'}: answers of one "
                "process",
                ours=same,
                baseline=len(wanted[model]),
                ratio=same / len(wanted[model]),
                goal="all",
                met=same == len(wanted[model]),
            )
            if not status:
                print(made.ring("down", GROUP)[1], flush=True)


def main() -> None:
    """Run one drill."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("losses", "busy", "splits"))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--programs", type=int, default=40)
    options = parser.parse_args()
    if reason := netns.why_not():
        raise SystemExit(f"benchmarks.ring_drill: {reason}")
    with tempfile.TemporaryDirectory(prefix="kk-ring-") as temporary:
        folder = Path(temporary)
        if options.what == "losses":
            losses(folder, options.kind or KINDS, options.times)
        elif options.what == "busy":
            busy(folder, options.seconds, options.programs)
        else:
            splits(folder)


if __name__ == "__main__":
    main()
