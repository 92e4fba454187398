"""The predicted speed of a ring group against the measured one: two ranks, over shaped links.

Two network namespaces are two machines with a core each, and `tc` shapes the link between them to 1
and to 10 Gbit/s; at 0 it has no shape. One process on one core is the node that could hold the
model alone: its speed, and the round trip of the link, are all that the prediction is told. It is
timed while another one answers on the other core: cores share the memory of this machine, and two
machines do not. The models are kakeya-tiny and random ones of 113 M parameters. All of a model are
measured in turns, and one model after the other. Needs root and Linux; 5 minutes where it is quiet.

    .venv/bin/python -m benchmarks.ring_plan
    .venv/bin/python -m benchmarks.ring_plan --collectives    # sums over two ranks alone
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.models import EMBEDDED
from benchmarks.report import emit
from kakeya.backends.ring.own_share import weights_in
from kakeya.fleet.paths.connect_time import connect_rtt_s
from kakeya.fleet.placement.ring import RingSplit
from kakeya.fleet.placement.ring_speed import (
    RingCable,
    RingNode,
    RingSpeed,
    RingWeights,
    of_pipeline,
    of_tensor,
    sum_s,
)
from tests.mlx.random_models import write_model
from tests.mlx.ring.rig import Served, alone, apart
from tests.netns import LAN, Machine, network

PROMPT, TOKENS, REPEATS = 128, 24, 5
ENGINE = ("tests.mlx.ring.child_unchecked",)
SUM_BYTES = (2048, 16_384, 131_072, 262_144)
"""Of one token to 128 of a model with 512 numbers between two layers."""
GOAL = 0.2
"""By so much a prediction may be off."""
SHAPE: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "vocab_size": 16_384,
    "max_position_embeddings": 2048,
    "eos_token_id": 16_383,
}
MODELS = {
    "llama": RingSplit.TENSOR,
    "qwen2": RingSplit.PIPELINE,
    EMBEDDED.name: RingSplit.TENSOR,
}
"""The split of each model."""


class Pinned(Machine):
    """A machine with the core of its number."""

    def command(self, *arguments: str) -> list[str]:
        """How a command is run inside."""
        core = int(self.ip.rpartition(".")[2]) - 1
        return super().command("taskset", "-c", str(core), *arguments)


@dataclass
class Timed:
    """What each run took, in seconds: of a token that is decoded, and of one of a prompt."""

    served: Served
    token_s: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)

    def run(self, rng: random.Random, vocab_size: int, sent: Callable[[], int]) -> None:
        """A new prompt, and tokens behind it."""
        prompt = [rng.randrange(5, vocab_size - 2) for _ in range(PROMPT)]
        began_s = time.perf_counter()
        stream = self.served.stream(prompt, TOKENS)
        next(stream)
        first_s, before = time.perf_counter(), sent()
        more = sum(1 for _ in stream)
        if more < TOKENS // 2:
            return  # it said its end of text
        self.token_s.append((time.perf_counter() - first_s) / more)
        self.prompt_s.append((first_s - began_s) / PROMPT)
        self.sent_bytes.append((sent() - before) / more)

    def speed(self) -> tuple[float, float]:
        """Tokens/s, and those of prompts, of the best run: any other program takes from all."""
        return 1 / min(self.token_s), 1 / min(self.prompt_s)


def node(weights: RingWeights, tokens_per_s: float, prompts_per_s: float) -> RingNode:
    """A node with the measured speed of one core."""
    return RingNode(
        node_id="mini",
        label="mini",
        address="",
        lend_bytes=0,
        weights_per_s=tokens_per_s * (weights.read_bytes + weights.head_bytes),
        products_per_s=prompts_per_s * weights.products,
    )


def predicted(weights: RingWeights, one: RingNode, split: RingSplit, cable: RingCable) -> RingSpeed:
    """The speed of two such nodes."""
    ranks, around = [one, one], [cable, cable]
    if split is RingSplit.TENSOR:
        return of_tensor(weights, ranks, around)
    half = weights.layers // 2
    return of_pipeline(weights, ranks, [half, weights.layers - half], around)


@contextmanager
def shaped(gbit: int) -> Iterator[tuple[Machine, ...]]:
    """Two machines with a core each and such a link, 0 = of no shape."""
    with network(2) as made:
        machines = tuple(Pinned(**vars(one)) for one in made)
        for one in machines if gbit else ():
            shape = ("rate", f"{gbit}gbit", "burst", "64kb", "latency", "20ms")
            command = ("tc", "-n", one.name, "qdisc", "add", "dev", LAN, "root", "tbf", *shape)
            subprocess.run(command, check=True, timeout=30)
        yield machines


def measure_cable(machines: Sequence[Machine], gbit: int) -> RingCable:
    """The link, by the time that TCP takes to connect."""
    with machines[1].entered():
        import socket

        with socket.create_server((machines[1].ip, 7071)), machines[0].entered():
            rtt_s = connect_rtt_s(f"{machines[1].ip}:7071")
    assert rtt_s is not None
    return RingCable(a="a", b="b", rtt_s=rtt_s, bytes_per_s=(gbit or 100) * 1e9 / 8 * 0.94)


def sent_by(machine: Machine) -> Callable[[], int]:
    """The bytes that left a machine so far."""

    def sent() -> int:
        with machine.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{LAN}:"))
        return int(line.partition(":")[2].split()[8])

    return sent


@dataclass
class Rig:
    """One process and a group over each link, of one model."""

    name: str
    weights: RingWeights
    vocab_size: int
    one: Timed
    beside: Timed
    """The same on the other core."""
    groups: dict[int, tuple[Timed, Sequence[Machine]]]
    """By Gbit/s."""

    def turn(self, rng: random.Random) -> None:
        """Time each once."""
        with ThreadPoolExecutor() as both:
            for timed in (self.one, self.beside):
                both.submit(timed.run, random.Random(rng.random()), self.vocab_size, int)
        for timed, machines in self.groups.values():
            timed.run(rng, self.vocab_size, sent_by(machines[0]))

    def forget(self) -> None:
        """Leave out what was timed so far, which warmed up."""
        for timed in (self.one, self.beside, *(timed for timed, _ in self.groups.values())):
            timed.token_s, timed.prompt_s, timed.sent_bytes = [], [], []


@contextmanager
def started(name: str, gbits: Sequence[int], folder: Path) -> Iterator[Rig]:
    """One process and the groups, which serve."""
    model = EMBEDDED
    if name != EMBEDDED.name:
        changes = {**SHAPE, "model_type": name}
        model = write_model(folder / name, "llama", changes=changes, scale=0.1)
    config = json.loads((model / "config.json").read_text())
    with ExitStack() as stack:
        both = []
        for core in (0, 1):
            os.sched_setaffinity(0, {core})
            both.append(Timed(stack.enter_context(alone(model, ENGINE))))
        os.sched_setaffinity(0, {0, 1})
        groups = {}
        for gbit in gbits:
            machines = stack.enter_context(shaped(gbit))
            split = ("--ring", MODELS[name])
            ranks = stack.enter_context(apart(machines, model, *split, engine=ENGINE))
            groups[gbit] = (Timed(ranks[0].serves()), machines)
            print(f"{name}: a group over {gbit} Gbit/s serves", flush=True)
        yield Rig(name, weights_in(model), config["vocab_size"], *both, groups)


def tell(rig: Rig) -> None:
    """Print the lines of each group."""
    split, one, weights = MODELS[rig.name], rig.one, rig.weights
    for gbit, (timed, machines) in rig.groups.items():
        cable = measure_cable(machines, gbit)
        speed = predicted(weights, node(weights, *one.speed()), split, cable)
        foretold = (speed.tokens_per_second, speed.prefill_tokens_per_second)
        link = f"{gbit} Gbit/s" if gbit else "no shape"
        for what, alone_per_s, group_per_s, told in zip(
            ("decode", "prefill"), one.speed(), timed.speed(), foretold, strict=True
        ):
            emit(
                f"{rig.name}, {split} over 2 ranks, {link}, {what} tokens/s, "
                "predicted against measured",
                ours=told,
                baseline=group_per_s,
                ratio=told / group_per_s,
                goal=f"within {GOAL:.0%}",
                met=abs(told / group_per_s - 1) <= GOAL,
                one_core=round(alone_per_s, 1),
                group_against_one_core=round(group_per_s / alone_per_s, 2),
                rtt_us=round(cable.rtt_s * 1e6),
                collectives_per_token=speed.waits,
                sent_bytes_per_token=round(statistics.median(timed.sent_bytes)),
                foretold_bytes_per_token=speed.sent_bytes,
            )


def sums() -> None:
    """A rank that sums arrays over the ring; rank 0 prints bytes and the best seconds of each."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    for size in SUM_BYTES:
        best_s = math.inf
        for _ in range(20):
            array = mx.ones(size // 4)
            mx.eval(array)
            began_s = time.perf_counter()
            for _ in range(48):
                array = mx.distributed.all_sum(array, group=group) * 0.5
            mx.eval(array)
            best_s = min(best_s, (time.perf_counter() - began_s) / 48)
        if group.rank() == 0:
            print(size, best_s, flush=True)


def tell_sums(gbit: int, folder: Path) -> None:
    """Print the line of each size of a sum."""
    with shaped(gbit) as machines:
        hosts = folder / f"hosts-{gbit}"
        hosts.write_text(json.dumps([[f"{machine.ip}:5757"] for machine in machines]))
        ranks = [
            subprocess.Popen(
                machine.command(sys.executable, "-m", "benchmarks.ring_plan", "sums"),
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, machine in enumerate(machines)
        ]
        lines = ranks[0].communicate(timeout=120)[0].splitlines()
        ranks[1].communicate(timeout=60)
        cable = measure_cable(machines, gbit)
    for size, best_s in (map(float, line.split()) for line in lines):
        told_s = sum_s([cable, cable], int(size))
        emit(
            f"a sum of {size / 1024:.0f} KiB over 2 ranks, {gbit} Gbit/s, microseconds, "
            "predicted against the best measured",
            ours=told_s * 1e6,
            baseline=best_s * 1e6,
            ratio=told_s / best_s,
            goal=f"within {GOAL:.0%}",
            met=abs(told_s / best_s - 1) <= GOAL,
            rtt_us=round(cable.rtt_s * 1e6),
        )


def main() -> None:
    """Start all, measure in turns, print."""
    if sys.argv[1:2] == ["sums"]:
        sums()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--gbit", type=int, action="append")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kkr") as folder:
        if options.collectives:
            for gbit in options.gbit or (1, 10):
                tell_sums(gbit, Path(folder))
            return
        for name in options.model or MODELS:
            with started(name, options.gbit or (0, 1, 10), Path(folder)) as rig:
                measure(rig, options.repeats)
                tell(rig)


def measure(rig: Rig, repeats: int) -> None:
    """Time all in turns."""
    rng = random.Random(1)
    for count in range(repeats + 1):
        rig.turn(rng)
        if not count:
            rig.forget()


if __name__ == "__main__":
    main()
