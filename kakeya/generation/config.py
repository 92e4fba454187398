"""Settings of the models that a node serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kakeya.core.errors import ConfigError
from kakeya.core.settings import (
    Illegal,
    Several,
    nearest,
    number,
    one_of,
    setting,
    text,
    whole,
)
from kakeya.generation.manifest import Category, Manifest
from kakeya.generation.spec import (
    ModelRole,
    ModelSpec,
    named_model,
    parse_model,
    parse_proposer,
)

WAIT_S = 120.0
"""How long a request without a deadline waits for its model, where no setting says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable(Manifest):
    """A table [models.NAME]: a manifest, and where the model is if no list says it."""

    path: str = setting("the model: a name, a folder or a Hugging Face id", text, "")
    role: ModelRole | None = setting("its use (verifier)", one_of(*ModelRole), None)

    @property
    def usual_role(self) -> ModelRole:
        """The role of its model where no list says one."""
        is_embedder = self.category is Category.EMBEDDING
        return self.role or (ModelRole.EMBEDDER if is_embedder else ModelRole.VERIFIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """The models of a node; without any it serves the embedded one with n-gram drafts."""

    serve: tuple[ModelSpec, ...] = setting(
        "serve a model as verifier (the default role), proposer, embedder or, of a diffusers "
        "pipeline, diffusion; any number of times",
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

    llama_server: str = setting(
        "the program llama-server, which runs GGUF files (the one on PATH, else the one that "
        "scripts/llama_server built)",
        text,
        "",
        key="models.llama_server",
        earlier=("KAKEYA_LLAMA_SERVER",),
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

    def specs(
        self, tables: Mapping[str, ModelTable] = MappingProxyType({})
    ) -> tuple[ModelSpec, ...]:
        """List all models, those that have a table alone behind those of `serve`, each with its
        table as its manifest. Raises ConfigError if a model id occurs twice, or a table and a list
        differ."""
        named = tuple(self._named_by(tables))
        seen: dict[str, ModelSpec] = {}
        embedded = (parse_model("kakeya-tiny"), parse_proposer("ngram"))
        for spec in (*self.serve, *named, *self.proposers) or embedded:
            other = seen.setdefault(spec.model_id, spec)
            if other is not spec:
                raise ConfigError(
                    f"model {spec.model_id} is named twice, as {other.source} ({other.role}) and "
                    f"{spec.source} ({spec.role}); one node serves a model id once: give one of "
                    f"them another name, NAME={spec.source}"
                )
        for name, table in tables.items():
            if name not in seen or seen[name].is_ngram:
                raise ConfigError(
                    f"models.{name} has no path, and no model that is served has this name"
                    f"{nearest(name, seen)}"
                )
            seen[name] = _with_table(seen[name], table)
        return tuple(seen.values())

    def _named_by(self, tables: Mapping[str, ModelTable]) -> Iterator[ModelSpec]:
        """The models that have a table and stand in no list."""
        listed = {spec.model_id for spec in self.serve + self.proposers}
        for name, table in tables.items():
            if table.path and name not in listed:
                try:
                    yield named_model(name, table.path, table.usual_role)
                except Illegal as wrong:
                    raise ConfigError(f"models.{name}: {wrong}") from wrong


def _with_table(spec: ModelSpec, table: ModelTable) -> ModelSpec:
    where = f"models.{spec.model_id}"
    listed = "models.proposers" if spec.role is ModelRole.PROPOSER else "models.serve"
    if table.path and Path(table.path).absolute() != Path(spec.source).absolute():
        raise ConfigError(
            f"{where}.path is {table.path!r}, and {listed} says {spec.source!r}; leave one out"
        )
    if table.role is not None and table.role is not spec.role:
        raise ConfigError(
            f"{where}.role is {table.role}, and {listed} says {spec.role}; leave one out"
        )
    is_encoding = table.category is Category.EMBEDDING
    if table.category is not None and is_encoding != (spec.role is ModelRole.EMBEDDER):
        raise ConfigError(
            f"{where}.category is {table.category}, which is no work of its role, {spec.role}; "
            "leave one out"
        )
    return replace(spec, manifest=table)
