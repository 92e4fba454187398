"""Batches, optimisers and the training loop, in two worker processes with one set of weights."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from tiny.corpus import SEED
from tiny.model import Decoder

WORKERS = 2


class Windows:
    """Windows of a token stream without replacement; number n is the same in every run."""

    def __init__(self, stream: np.ndarray, length: int, salt: int) -> None:
        self.stream, self.length, self.salt = stream, length, salt
        self.per_epoch = (len(stream) - 1) // length - 1
        self._epoch, self._order, self._shift = -1, np.empty(0, np.int64), 0

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            generator = np.random.default_rng([SEED, self.salt, epoch])
            self._order = generator.permutation(self.per_epoch)
            self._shift = int(generator.integers(self.length))
            self._epoch = epoch

    def batch(self, first: int, count: int) -> Tensor:
        """Windows first .. first+count-1 as int64 [count, length + 1]: inputs and one target."""
        rows = []
        for number in range(first, first + count):
            self._enter(number // self.per_epoch)
            start = int(self._order[number % self.per_epoch]) * self.length + self._shift
            rows.append(self.stream[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def text_batches(stream: np.ndarray, plan: Plan) -> Batches:
    """Batches of a plan's steps: short windows, then long ones."""
    short, long = Windows(stream, plan.length, 2), Windows(stream, plan.long_length, 3)

    def batch_of(step: int) -> Tensor:
        windows = long if plan.is_long(step) else short
        rows = plan.batch_tokens // windows.length
        return windows.batch(step * rows, rows)

    return batch_of


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, by five quintic Newton-Schulz steps."""
    x = gradient.bfloat16() if has_bfloat16() else gradient
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    out: Tensor = (x.T if tall else x).float()
    return out


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for the matrices inside the layers."""

    def __init__(self, weights: list[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move each matrix along its orthogonalised momentum."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                kept = state.setdefault("momentum", torch.zeros_like(weight))
                kept.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(kept, group["momentum"]))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


@dataclass(frozen=True)
class Plan:
    """One training run: sizes in tokens, rates at the plateau."""

    steps: int
    batch_tokens: int = 8192
    micro_tokens: int = 2048
    length: int = 256
    long_length: int = 2048
    long_steps: int = 0
    warmup: int = 50
    cooldown: float = 0.35
    matrix_rate: float = 0.03
    other_rate: float = 4e-3
    decay: float = 0.02

    def rate(self, step: int) -> float:
        """The fraction of the full rates at a step: warm-up, plateau, linear fall to 2 %."""
        fall = max(1, int(self.steps * self.cooldown))
        left = (self.steps - step) / fall
        return min(1.0, (step + 1) / self.warmup, 0.02 + 0.98 * left)

    def is_long(self, step: int) -> bool:
        """Whether the step trains on long windows: the last `long_steps` do."""
        return step >= self.steps - self.long_steps


class Optimisers:
    """Muon for matrices, Adam for the embedding and the gains, with one rate schedule."""

    def __init__(self, model: Decoder, plan: Plan) -> None:
        inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.muon = Muon(inner, plan.matrix_rate, plan.decay)
        self.adam = torch.optim.AdamW(
            outer, plan.other_rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True
        )
        self.rates = (plan.matrix_rate, plan.other_rate)
        self.outer = outer

    def step(self, fraction: float) -> None:
        """Apply the collected gradients at a fraction of the full rates, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.outer, 1.0)
        for optimiser, rate in zip((self.muon, self.adam), self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * fraction
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of both optimisers."""
        return [self.muon.state_dict(), self.adam.state_dict()]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Take over a checkpoint's state."""
        self.muon.load_state_dict(state[0])
        self.adam.load_state_dict(state[1])


Loss = Callable[[Tensor], Tensor]
Batches = Callable[[int], Tensor]


class Progress:
    """Lines with step, tokens, speed, loss and time left; `unit` turns nats into bits per byte."""

    def __init__(self, name: str, plan: Plan, start: int, unit: float) -> None:
        self.name, self.plan, self.start, self.unit = name, plan, start, unit
        self.begun, self.mean = time.monotonic(), math.nan

    def add(self, step: int, loss: float, every: int = 25) -> None:
        """Note a step's loss (nats per token) and print now and then."""
        self.mean = loss if math.isnan(self.mean) else 0.96 * self.mean + 0.04 * loss
        done = step + 1 - self.start
        if (step + 1) % every == 0 or step + 1 == self.plan.steps:
            seconds = time.monotonic() - self.begun
            speed = done * self.plan.batch_tokens / seconds
            left = (self.plan.steps - step - 1) * seconds / done
            print(
                f"{self.name} step {step + 1}/{self.plan.steps} "
                f"tokens {(step + 1) * self.plan.batch_tokens / 1e6:.2f} M "
                f"{speed:.0f} tokens/s loss {self.mean * self.unit:.4f} bits/byte "
                f"ETA {left / 60:.1f} min",
                flush=True,
            )


def train(
    name: str, work: Path, model: Decoder, plan: Plan, batch_of: Batches, loss_of: Loss
) -> None:
    """Run a plan, from the checkpoint `name`.pt when there is one, and leave the last one there.

    Each worker of the process group takes its share of a batch's windows.
    """
    optimisers = Optimisers(model, plan)
    checkpoint = work / f"{name}.pt"
    start = restore(checkpoint, model, optimisers)
    progress = Progress(name, plan, start, 1 / (math.log(2) * bytes_per_token(work)))
    workers, rank = distributed.get_world_size(), distributed.get_rank()
    for step in range(start, plan.steps):
        batch = batch_of(step)
        rows, length = batch.shape
        loss = 0.0
        micro = max(1, plan.micro_tokens // (length - 1))
        for part in torch.split(batch.tensor_split(workers)[rank], micro):
            share = loss_of(part) * (part.shape[0] / rows)
            torch.autograd.backward(share)
            loss += share.item()
        sum_gradients(model)
        optimisers.step(plan.rate(step))
        if rank == 0:
            progress.add(step, loss * workers)
            if (step + 1) % 250 == 0 or step + 1 == plan.steps:
                save(checkpoint, model, optimisers, step + 1)


def sum_gradients(model: Decoder) -> None:
    """Add up the workers' gradients, so that all take the same step."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def in_workers(stage: Callable[..., None], work: Path, *rest: object) -> None:
    """Run a stage in WORKERS processes of one thread each: faster here than two threads."""
    meeting = work / "meeting"
    meeting.unlink(missing_ok=True)
    arguments = (stage, meeting, work, *rest)
    spawn(_worker, arguments, nprocs=WORKERS)  # type: ignore[no-untyped-call]


def _worker(rank: int, stage: Callable[..., None], meeting: Path, *rest: object) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS
    )
    stage(*rest)
    distributed.destroy_process_group()


def save(path: Path, model: Decoder, optimisers: Optimisers, step: int) -> None:
    """Write a checkpoint in one move."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optim": optimisers.state(), "step": step}, part)
    part.replace(path)


def restore(path: Path, model: Decoder, optimisers: Optimisers) -> int:
    """Load a checkpoint if there is one; the number of steps already done."""
    if not path.exists():
        return 0
    found = torch.load(path, weights_only=True)
    model.load_state_dict(found["model"])
    optimisers.load(found["optim"])
    return int(found["step"])


def bytes_per_token(work: Path, name: str = "train") -> float:
    """Mean bytes that a token of a stream stands for."""
    sizes = json.loads((work / "split.json").read_text())
    return float(sizes[f"{name}_bytes"] / sizes[f"{name}_tokens"])


@functools.cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (6 times float32's speed)."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text()


def autocast() -> torch.autocast:
    """Matrix products in bfloat16 where the CPU has instructions for it, else float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16())
