"""The models that benchmarks run on.

Random weights of chosen sizes, with kakeya-tiny's tokenizer: their greedy texts are cyclic, so
drafting on them shows the ceiling. Folders are made once, below the system's temporary directory.
Real text is benchmarked on kakeya-tiny, and on the model of real size that `scripts/real_model`
makes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent.parent / "kakeya" / "models" / "kakeya-tiny"
REAL = Path(
    os.environ.get("KAKEYA_REAL_MODEL")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakeya" / "real-model"
)
"""The folder of the model of real size, once `scripts/real_model` has made it."""
REAL_EMBEDDER = REAL.parent / "real-embedder"
"""The same of a real encoder, by `scripts/real_model embedder`."""
REAL_GGUF = REAL.parent / "real-gguf" / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The same weights as llama.cpp takes them, by `scripts/real_model gguf`."""
NAMED = os.environ.get("KAKEYA_BENCH_MODEL")
"""The model folder of `scripts/bench --model`, for benchmarks that take any model."""
SHAPES = {
    "05m": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352},
    "3m": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704},
    "89m": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "360m": {
        "num_hidden_layers": 32,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 49152,
    },
}


def any_model(size: str) -> Path:
    """The folder that `scripts/bench --model` names, else that of a random model, or of
    kakeya-tiny for `tiny`."""
    if NAMED:
        return Path(NAMED)
    return EMBEDDED if size == "tiny" else random_model(size)


def repeats(usual: int) -> int:
    """How often to measure: less often on a model that was named, which may take minutes."""
    return min(3, usual) if NAMED else usual


def random_model(size: str) -> Path:
    """Make or find the folder of a random model: `05m`, `3m`, `89m` or `360m`.

    They have 0.7, 3.7, 88.9 and 362 M parameters.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    folder = Path(tempfile.gettempdir()) / f"kakeya-bench-{size}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(exist_ok=True)
    config = json.loads((EMBEDDED / "config.json").read_text()) | SHAPES[size]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(config))
    known = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    embedding = model.model.embed_tokens
    # Tokens without text are never chosen: their logits are 0.
    embedding.weight = mx.where(
        mx.arange(config["vocab_size"])[:, None] < known, embedding.weight, 0
    )
    weights = dict(tree_flatten(model.parameters()))
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def quantized(source: Path, bits: int) -> Path:
    """Make or find a folder with the weights of another one in so many bits, in groups of 64."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    folder = Path(tempfile.gettempdir()) / f"kakeya-bench-{source.name}-{bits}bit"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder / path.name)
    network, config = load_model(source)
    form = {"group_size": 64, "bits": bits}
    nn.quantize(network, **form)
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization": form}))
    return folder


def sized_model(folder: Path, weights_mb: int, *, seed: int = 1) -> Path:
    """Write a random model whose weights take about so many MiB in 32 bits; returns its folder.

    Two layers with wide inner parts: its keys and values stay small, whatever it weighs.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    config = json.loads((EMBEDDED / "config.json").read_text()) | {"num_hidden_layers": 2}
    hidden = config["hidden_size"]
    fixed = 4 * hidden * (config["vocab_size"] + 2 * 768)
    inner = max(64, ((weights_mb << 20) - fixed) // (4 * 2 * 3 * hidden))
    config["intermediate_size"] = inner // 64 * 64
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    weights = {name: value.astype(mx.float16) for name, value in tree_flatten(model.parameters())}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def random_adapter(folder: Path, *, seed: int, rank: int = 8) -> Path:
    """Write a random LoRA adapter of kakeya-tiny's attention, as mlx_lm.lora does."""
    import mlx.core as mx

    config = json.loads((EMBEDDED / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys)}
    mx.random.seed(seed)
    arrays = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inner, outer) in sizes.items():
            path = f"model.layers.{layer}.self_attn.{name}_proj"
            arrays[f"{path}.lora_a"] = mx.random.normal((inner, rank)) * 0.05
            arrays[f"{path}.lora_b"] = mx.random.normal((rank, outer)) * 0.01
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    described = {
        "fine_tune_type": "lora",
        "num_layers": config["num_hidden_layers"],
        "lora_parameters": {"rank": rank, "scale": 20.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
