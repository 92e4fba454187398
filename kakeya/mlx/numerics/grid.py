"""The prefill grid: the pieces of a prompt, and everything else that the bits of its KV depend on.

On most devices a row's bits depend on how many rows are computed with it (OpenBLAS and Metal pick
kernels by it), so two engines compute the same KV only where both cut prompts alike. So pieces
depend on the device:

    any number of rows gives the same bits    pieces as measured: their ends make no difference
    else                                      pieces by a rule that no measurement enters, only the
                                              shapes of the model and the kind of the machine

A restart, and a peer on a machine of the same kind, then finds blocks with the very bits that it
would compute.

Pieces are as long as throughput asks: each reads every weight once, whatever its length. How long
others wait beside it is no concern of the grid: a piece is computed a few layers at a time.
"""

from __future__ import annotations

import json
import platform
import sys
from functools import cache
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kakeya.core.units import MIB
from kakeya.mlx.kv.blocks import KvBlocks
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.numerics.blas import blas_name

Grid = tuple[tuple[int, int], ...]
"""(position, tokens): pieces are of so many tokens from that position on; the first is 0."""

_CPU_TOKENS = 128
"""Rows from which OpenBLAS is at most a tenth below its best rate; with more, attention and
activations leave the caches, and less of a text can be taken from KV that ends elsewhere."""
_WIDE_BYTES = 8 * MIB
"""A weight of more bytes leaves the caches between two products: twice the rows then pay."""
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
FAR_TOKENS = 1280
"""Behind so many, pieces may attend otherwise (`attention`); a block begins there."""
SCORE_BYTES = 4 * MIB
"""The most scores that are computed at once there: a few such arrays live at a time."""


def is_row_exact(model: LoadedModel, blocks: KvBlocks) -> bool:
    """Whether a row's bits do not depend on how many rows are computed with it.

    So it is for full attention and plain products on the CPU of Linux, with the BLAS that mlx's
    wheel brings along. OpenBLAS, Accelerate and every GPU choose another way for other numbers of
    rows; and whatever is below them, a window that a single row goes round in, recurrent layers,
    and the sorting of tokens by expert sum in another order.
    """
    has_experts = any(isinstance(module, _EXPERTS) for module in model.network.modules())
    is_plain = blocks.is_full_attention and not has_experts
    return is_plain and sums_alike()


def sums_alike() -> bool:
    """Whether products and attention sum a row in the same order, however many rows there are."""
    return is_cpu() and sys.platform == "linux" and not blas_name()


@cache
def is_split_far() -> bool:
    """Whether several tokens behind FAR_TOKENS attend in two parts.

    On the CPU; not where bits do not depend on the number of rows: a single row attends otherwise.
    """
    return is_cpu() and not sums_alike()


def nominal_grid(model: LoadedModel, blocks: KvBlocks) -> Grid:
    """The grid of a model on a machine of this kind; equal on every start."""
    is_wide = not is_cpu() or _widest_bytes(model.network) > _WIDE_BYTES
    return ((0, blocks.block_tokens if is_wide else min(_CPU_TOKENS, blocks.block_tokens)),)


def exactness(model: LoadedModel, grid: Grid) -> str:
    """Properties that must be equal for equal bits of KV, beside model and text, as canonical JSON.

    An empty grid says that pieces do not matter.
    """
    said = {
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "system": platform.system(),
        "machine": platform.machine(),
        "device": "cpu" if is_cpu() else "gpu",
        "architecture": str(mx.device_info().get("architecture", "")),
        "blas": blas_name(),
        "dtype": model.dtype,
        "grid": [list(piece) for piece in grid] or "any",
        "weights": model.layout,
        "split_from": [FAR_TOKENS, SCORE_BYTES] if is_split_far() else "never",
    }
    if sys.platform == "darwin":
        # Accelerate and the compiler of Metal's kernels come with the system.
        said["release"] = platform.mac_ver()[0]
    return json.dumps(said, sort_keys=True, separators=(",", ":"))


def is_cpu() -> bool:
    """Whether mlx computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _widest_bytes(network: nn.Module) -> int:
    """Bytes of the largest weight that all tokens of a piece are multiplied with.

    Not of those that make logits, which a piece does not need: they are as large as an embedding.
    """
    embeddings, skipped = (nn.Embedding, nn.QuantizedEmbedding), _EXPERTS
    tables = {m.weight.size for m in network.modules() if isinstance(m, embeddings)}
    weights = [m.get("weight") for m in network.modules() if not isinstance(m, skipped)]
    multiplied = [w for w in weights if w is not None and w.ndim > 1 and w.size not in tables]
    return max((int(weight.nbytes) for weight in multiplied), default=0)
