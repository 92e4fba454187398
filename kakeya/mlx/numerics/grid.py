"""The prefill grid: the pieces of a prompt, and everything else that the bits of its KV depend on.

On most devices a row's bits depend on how many rows are computed with it (OpenBLAS and Metal pick
kernels by it), so two engines compute the same KV only where both cut prompts alike. A piece should
take as long as a cancellation may go unnoticed; its time is measured, and no two starts measure the
same. So pieces depend on the device:

    any number of rows gives the same bits    pieces as measured: their ends make no difference
    else                                      pieces by a rule that no measurement enters: those of
                                              a nominal machine of this kind

A restart, and a peer on a machine of the same kind, then finds blocks with the very bits that it
would compute. The price is that a piece takes longer than it should where a machine is slower than
the nominal one, which is therefore a slow one of its kind: pieces of half the length cost little.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kakeya.core.units import MIB
from kakeya.engine.model import CHUNK_LIMIT_S, LEAST_CHUNK_TOKENS
from kakeya.mlx.kv.blocks import KvBlocks
from kakeya.mlx.loader import LoadedModel, text_config
from kakeya.mlx.numerics.blas import blas_name

Grid = tuple[tuple[int, int], ...]
"""(position, tokens): pieces are of so many tokens from that position on; the first is 0."""

_CPU_OPERATIONS_PER_S = 1e10
"""Prefill of a core with a fast BLAS: a quarter of the rate of a current core that is alone."""
_NO_BLAS_FACTOR = 0.1
_METAL_OPERATIONS_PER_S = 2e12
"""Prefill of the GPU of a base M-series chip, which reaches about half of its peak in prefill."""
_METAL_FACTORS = {"s": 4.0, "d": 8.0}
"""By the last letter of Metal's architecture: Max, Ultra. All others count as the base."""
_CUDA_OPERATIONS_PER_S = 5e13
_LEAST_ON_GPU = 32
"""Rows of one tile of Metal's quantized product: fewer take as long."""
_ACTIVE_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_LOOKED_UP = (nn.Embedding, nn.QuantizedEmbedding)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_WORD_BITS = 32
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
    rate = _operations_per_s()
    config = text_config(model.config)
    heads = config.get("num_attention_heads")
    return plan_grid(
        2 * _weights_of_a_token(model.network, config) / rate,
        2 * blocks.full_widths * (heads if isinstance(heads, int) else 1) / rate,
        limit_s=CHUNK_LIMIT_S,
        least=LEAST_CHUNK_TOKENS if is_cpu() else min(blocks.block_tokens, _LEAST_ON_GPU),
        block_tokens=blocks.block_tokens,
        context_tokens=model.context_tokens,
    )


def plan_grid(
    token_s: float,
    context_s: float,
    *,
    limit_s: float,
    least: int,
    block_tokens: int,
    context_tokens: int,
) -> Grid:
    """Cut each piece as a power of two of tokens that take at most `limit_s`, but at least `least`.

    A token takes `token_s`, and `context_s` for each token in front of it. Pieces change only
    where a block begins, so no piece lies in two blocks.
    """
    grid: list[tuple[int, int]] = []
    chunk, position = block_tokens, 0
    while position < context_tokens:
        end = position + block_tokens
        while chunk > least and chunk * (token_s + context_s * end) > limit_s:
            chunk //= 2
        if not grid or grid[-1][1] != chunk:
            grid.append((position, chunk))
        if chunk <= least:
            break
        position = end
    return tuple(grid)


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


def _operations_per_s() -> float:
    """Operations a second of the nominal machine."""
    if is_cpu():
        return _CPU_OPERATIONS_PER_S * (1 if blas_name() else _NO_BLAS_FACTOR)
    if sys.platform != "darwin":
        return _CUDA_OPERATIONS_PER_S
    architecture = str(mx.device_info().get("architecture", ""))
    return _METAL_OPERATIONS_PER_S * _METAL_FACTORS.get(architecture[-1:], 1.0)


def _weights_of_a_token(network: nn.Module, config: Mapping[str, Any]) -> float:
    """The count of weights that a token is multiplied with; of experts, those of its own."""
    total = 0.0
    for module in network.modules():
        weight = module.get("weight")
        if weight is None or weight.ndim < 2 or isinstance(module, _LOOKED_UP):
            continue
        count = float(weight.size)
        if weight.dtype == mx.uint32:
            count *= _WORD_BITS / module.bits
        if isinstance(module, _EXPERTS):
            count *= min(1.0, _active_experts(config) / weight.shape[0])
        total += count
    return total


def _active_experts(config: Mapping[str, Any]) -> int:
    """The count of experts of a layer that a token is sent to."""
    found = [config.get(key) for key in _ACTIVE_KEYS]
    return next((value for value in found if isinstance(value, int) and value > 0), 1)
