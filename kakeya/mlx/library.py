"""A model for a program that decodes by itself; see docs/library.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal
from kakeya.decoding.remote.vocabulary import VocabularyMismatch
from kakeya.fleet.placement.ring import probe_ring_environment, ring_path_available
from kakeya.generation.request import Sampling
from kakeya.generation.spec import is_gguf, parse_model, parse_proposer, resolve
from kakeya.mlx.numerics.blas import preload_blas

if TYPE_CHECKING:
    from kakeya.mlx.diffusion.group import GroupProposer
    from kakeya.mlx.local_verifier import LocalVerifier


def mlx_verifier(
    model: str | Path,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    states_for: str | Path = "",
) -> LocalVerifier:
    """Load a model in this process, as the verifier of a `SpeculativeDecoder`.

    `model` is a folder with config.json, *.safetensors and tokenizer files, a Hugging Face id, or
    a model of the package such as "kakeya-tiny". By default it selects the most likely token; the
    same seed gives the same tokens, with drafts and without. `states_for` is a drafter that reads
    its hidden states, such as "kakeya-tiny-dlm"; "" = none are kept.

    On Linux call it before mlx is imported: it loads a faster BLAS than mlx brings. Raises
    ConfigError for a model that cannot be loaded, InvalidArgument for sampling out of range.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    try:
        spec = parse_model(str(model))
        drafter = parse_proposer(str(states_for)) if states_for else None
    except Illegal as problem:
        raise ConfigError(f"model {str(model)!r}: {problem}") from problem
    source = resolve(spec)
    read_by = (drafter.model_id, Path(resolve(drafter))) if drafter else None
    if is_gguf(source):
        raise ConfigError(f"{source} is a GGUF file; mlx reads a folder with *.safetensors")
    preload_blas(1)
    # Here, because they import mlx.
    from kakeya.mlx.loader import load
    from kakeya.mlx.local_verifier import LocalVerifier

    return LocalVerifier(load(source, spec.model_id, blas_threads=0, states_for=read_by), sampling)


@contextmanager
def mlx_pair(
    verifier: str | Path, drafter: str | Path, **sampling: float
) -> Iterator[tuple[LocalVerifier, GroupProposer] | None]:
    """Verify in one process of an mlx.distributed group, and draft in the other.

    Gives the verifier and its proposer at rank 0, and lets rank 1 go on when that is done with
    them; there it drafts meanwhile, and gives None at once afterwards. The drafter reads the
    verifier's hidden states. `sampling` is that of `mlx_verifier`; drafts are greedy.

    Raises ConfigError where no two processes are in one group (start them with `mlx.launch -n 2`),
    VocabularyMismatch for models whose token ids mean other text, and as `mlx_verifier`.
    """
    try:
        served = parse_proposer(str(drafter))
    except Illegal as problem:
        raise ConfigError(f"drafter {str(drafter)!r}: {problem}") from problem
    folder = resolve(served)
    preload_blas(1)
    import mlx.core as mx

    from kakeya.mlx.diffusion.group import GroupProposer, serve_group
    from kakeya.mlx.diffusion.model import DiffusionModel
    from kakeya.mlx.loader import vocabulary_digest

    ring = probe_ring_environment(init=mx.distributed.init)
    seats = [replace(ring, rank=rank).ring_address() for rank in (0, 1)]
    if ring.world_size != 2 or not ring_path_available(*seats):
        raise ConfigError(
            f"a pair is two processes of one group, started by mlx.launch -n 2: {ring.render()}"
        )
    group = mx.distributed.init()
    if ring.rank == 1:
        model = DiffusionModel(folder, served.model_id)
        serve_group(model, model.facts.base_fingerprint, group, 0)
        yield None
        return
    made = mlx_verifier(verifier, states_for=drafter, **sampling)  # type: ignore[arg-type]
    proposer = GroupProposer(served.model_id, group, 1, made.hidden_states)
    try:
        if made.vocabulary_digest != vocabulary_digest(Path(folder)):
            raise VocabularyMismatch(
                f"{verifier} and {drafter} have other vocabularies: token ids mean other text"
            )
        yield made, proposer
    finally:
        proposer.close()
