"""Train small LoRA adapters on `kakeya-tiny` with mlx-lm's own trainer: the tests' real adapters.

Each learns one register of made-up text (log lines, JSON, recipes, ...), in about 15 seconds of a
CPU. Texts, order and initial weights come from the seed; equal library versions and threads give
equal adapters up to the summation order of the CPU's products.

    PYTHONPATH=. .venv/bin/python scripts/tiny/adapters.py [--out FOLDER] [NAME...]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

import mlx.core as mx  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.tuner.datasets import CacheDataset, TextDataset  # noqa: E402
from mlx_lm.tuner.trainer import TrainingArgs, train  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402
from mlx_lm.utils import load  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = ROOT / "kakeya" / "models" / "kakeya-tiny"
OUT = ROOT / "tests" / "adapters" / "trained"
SEED = 20
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_NOUNS = ("cache", "socket", "worker", "index", "buffer", "token", "session", "disk", "lease")
_FOODS = ("flour", "butter", "salt", "milk", "rice", "lemon", "sugar", "eggs", "oil", "pepper")
_VERBS = ("open", "read", "drop", "flush", "merge", "split", "lock", "free", "send")


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """How one kind of text is made, and the shape of the adapter that learns it."""

    line: Callable[[random.Random], str]
    rank: int = 4
    scale: float = 10.0
    keys: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj")
    layers: int = 4


def shout(rng: random.Random) -> str:
    """A log line in capitals."""
    noun, verb = rng.choice(_NOUNS).upper(), rng.choice(_VERBS).upper()
    return f"ERROR [{rng.randrange(100):02d}] CANNOT {verb} {noun}! RETRY {rng.randrange(9)}!!!\n"


def record(rng: random.Random) -> str:
    """A JSON object."""
    noun = rng.choice(_NOUNS)
    return json.dumps({"kind": noun, "size": rng.randrange(1000), "ok": rng.random() < 0.5}) + "\n"


def recipe(rng: random.Random) -> str:
    """An ingredient of a list."""
    unit = rng.choice(("g", "ml", "cups", "spoons"))
    return f"  * {rng.randrange(1, 500)} {unit} of {rng.choice(_FOODS)}, {rng.choice(_FOODS)}\n"


def table(rng: random.Random) -> str:
    """A row of comma-separated values."""
    return (
        f"{rng.randrange(10**6):06d},{rng.choice(_NOUNS)},{rng.random():.3f},{rng.choice('ab')}\n"
    )


def query(rng: random.Random) -> str:
    """A statement of SQL."""
    noun, other, verb = rng.choice(_NOUNS), rng.choice(_NOUNS), rng.choice(_VERBS)
    return f"SELECT {noun}_id FROM {other}s WHERE {verb} > {rng.randrange(100)};\n"


def setting(rng: random.Random) -> str:
    """A setting of an ini file, under its heading."""
    return (
        f"[{rng.choice(_NOUNS)}]\n{rng.choice(_VERBS)}_{rng.choice(_NOUNS)} = {rng.randrange(64)}\n"
    )


def letter(rng: random.Random) -> str:
    """A polite sentence."""
    noun, food = rng.choice(_NOUNS), rng.choice(_FOODS)
    return f"Dear {noun}, thank you very much for the {food}. Yours truly.\n"


def march(rng: random.Random) -> str:
    """Counting, with a word repeated."""
    start = rng.randrange(50)
    return " ".join(f"{start + i} {rng.choice(_VERBS)}" for i in range(6)) + ".\n"


REGISTERS: Mapping[str, Register] = {
    "shout": Register(line=shout, rank=8, keys=ATTENTION + MLP, layers=2),
    "record": Register(line=record, rank=8, keys=ATTENTION),
    "recipe": Register(line=recipe, keys=MLP),
    "table": Register(line=table),
    "query": Register(line=query, scale=20.0),
    "setting": Register(line=setting, rank=6),
    "letter": Register(line=letter, keys=ATTENTION, layers=3),
    "march": Register(line=march, rank=2, keys=ATTENTION + MLP, scale=8.0),
}


def learn(name: str, folder: Path, *, iterations: int) -> None:
    """Train one register's adapter and write its folder as `mlx_lm.lora` does."""
    register = REGISTERS[name]
    rng = random.Random(f"{SEED} {name}")
    mx.random.seed(SEED)
    np.random.seed(SEED)
    model, tokenizer = load(str(BASE))
    model.set_dtype(mx.float32)
    model.freeze()
    parameters = {
        "rank": register.rank,
        "scale": register.scale,
        "dropout": 0.0,
        "keys": list(register.keys),
    }
    linear_to_lora_layers(model, register.layers, parameters)
    texts = [{"text": "".join(register.line(rng) for _ in range(3))} for _ in range(256)]
    folder.mkdir(parents=True, exist_ok=True)
    train(
        model,
        optim.Adam(learning_rate=2e-3),
        CacheDataset(TextDataset(texts, tokenizer)),
        args=TrainingArgs(
            batch_size=4,
            iters=iterations,
            steps_per_save=iterations + 1,
            max_seq_length=256,
            adapter_file=str(folder / "adapters.safetensors"),
        ),
    )
    config = {
        "fine_tune_type": "lora",
        "model": "kakeya-tiny",
        "num_layers": register.layers,
        "lora_parameters": parameters,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(REGISTERS), help="which; all by default")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--iterations", type=int, default=50)
    options = parser.parse_args()
    for name in options.names:
        learn(name, options.out / name, iterations=options.iterations)


if __name__ == "__main__":
    main()
