"""A model for a program that decodes by itself; see docs/library.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal
from kakeya.generation.request import Sampling
from kakeya.generation.spec import is_gguf, parse_model, resolve
from kakeya.mlx.numerics.blas import preload_blas

if TYPE_CHECKING:
    from kakeya.mlx.local_verifier import LocalVerifier


def mlx_verifier(
    model: str | Path,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
) -> LocalVerifier:
    """Load a model in this process, as the verifier of a `SpeculativeDecoder`.

    `model` is a folder with config.json, *.safetensors and tokenizer files, a Hugging Face id, or
    a model of the package such as "kakeya-tiny". By default it selects the most likely token; the
    same seed gives the same tokens, with drafts and without.

    On Linux call it before mlx is imported: it loads a faster BLAS than mlx brings. Raises
    ConfigError for a model that cannot be loaded, InvalidArgument for sampling out of range.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    try:
        spec = parse_model(str(model))
    except Illegal as problem:
        raise ConfigError(f"model {str(model)!r}: {problem}") from problem
    source = resolve(spec)
    if is_gguf(source):
        raise ConfigError(f"{source} is a GGUF file; mlx reads a folder with *.safetensors")
    preload_blas(1)
    # Here, because they import mlx.
    from kakeya.mlx.loader import load
    from kakeya.mlx.local_verifier import LocalVerifier

    return LocalVerifier(load(source, spec.model_id, blas_threads=0), sampling)
