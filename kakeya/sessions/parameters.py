"""The parameters of a GenerateRequest, checked before anything changes. Pure but for the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import Sampling
from kakeya.sessions.session import Session
from kakeya.v1 import runtime_pb2 as pb

MAX_TOKENS_LIMIT = 1 << 20
MAX_TEMPERATURE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParameters:
    """A checked request."""

    max_tokens: int
    sampling: Sampling


def read_parameters(
    request: pb.GenerateRequest, session: Session, rng: random.Random
) -> GenerateParameters:
    """Check a request against its session; an unset seed is drawn from `rng`.

    Raises InvalidArgument that names the field, its value and its range.
    """
    if not 1 <= request.max_tokens <= MAX_TOKENS_LIMIT:
        raise InvalidArgument(
            f"max_tokens is {request.max_tokens}, it must be in 1..{MAX_TOKENS_LIMIT}",
            param="max_tokens",
        )
    if not session.history_length:
        raise InvalidArgument(
            f"session {session.session_id} has no history to continue: append a prompt first",
            param="session_id",
        )
    return GenerateParameters(
        max_tokens=request.max_tokens,
        sampling=_read_sampling(request, session.facts.vocab_size, rng),
    )


def _read_sampling(request: pb.GenerateRequest, vocab_size: int, rng: random.Random) -> Sampling:
    if not 0.0 <= request.temperature <= MAX_TEMPERATURE:
        raise InvalidArgument(
            f"temperature is {request.temperature:g}, it must be in 0..{MAX_TEMPERATURE:g} "
            "(0 is greedy)",
            param="temperature",
        )
    if request.top_k > vocab_size:
        raise InvalidArgument(
            f"top_k is {request.top_k}, it must be in 0..{vocab_size} "
            "(the vocabulary; 0 keeps all of it)",
            param="top_k",
        )
    names = {field.name for field in fields(Sampling)}
    given = {field.name: value for field, value in request.ListFields() if field.name in names}
    return Sampling(**given if "seed" in given else {**given, "seed": rng.getrandbits(64)})
