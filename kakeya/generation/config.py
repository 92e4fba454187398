"""Settings of the models that a node serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Several, number, one_of, setting, whole
from kakeya.generation.spec import ModelSpec, parse_model, parse_proposer

WAIT_S = 120.0
"""How long a request without a deadline waits for its model, where no setting says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """The models of a node; without any it serves the embedded one with n-gram drafts."""

    serve: tuple[ModelSpec, ...] = setting(
        "serve a model as verifier (the default role), proposer or embedder; any number of times",
        Several(parse_model),
        (),
        argument="[NAME=]ID_OR_PATH[:ROLE]",
        key="models.serve",
        flag="--model",
    )
    proposers: tuple[ModelSpec, ...] = setting(
        "draft for peers with n-grams or a model; any number of times",
        Several(parse_proposer),
        (),
        argument="ngram|[NAME=]ID_OR_PATH",
        key="models.proposers",
    )
    awake: Literal["offered", "working", "never"] = setting(
        "how long a Mac is kept from sleeping: while models are offered, only while they work, or "
        "never",
        one_of("offered", "working", "never"),
        "offered",
        key="models.awake",
    )

    rows: int = setting(
        "the most generations of a model that run at the same time and share its forwards, where "
        "more of them give more tokens per second and memory has room for their KV",
        whole(1, 256, "generations"),
        64,
        key="models.rows",
    )
    wait_s: float = setting(
        "how long a request without a deadline waits for its model to load; longer than the load "
        "of the largest model from the slowest disk",
        number(1, 3600, "seconds"),
        WAIT_S,
        key="models.wait_s",
    )

    def specs(self) -> tuple[ModelSpec, ...]:
        """List all models. Raises ConfigError if a model id occurs twice."""
        seen: dict[str, ModelSpec] = {}
        embedded = (parse_model("kakeya-tiny"), parse_proposer("ngram"))
        for spec in self.serve + self.proposers or embedded:
            other = seen.setdefault(spec.model_id, spec)
            if other is not spec:
                raise ConfigError(
                    f"model {spec.model_id} is named twice, as {other.source} ({other.role}) and "
                    f"{spec.source} ({spec.role}); one node serves a model id once: give one of "
                    f"them another name, NAME={spec.source}"
                )
        return tuple(seen.values())
