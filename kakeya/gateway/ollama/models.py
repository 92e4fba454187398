"""The models of a node as Ollama's clients ask for them.

GET  /api/version    the version of Ollama whose API is followed
GET  /api/tags       the served models
POST /api/show       one model: `model`, or `name` as older clients call it
GET  /api/ps         the models that are loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kakeya.backends.relay.relays import RelayedModel
from kakeya.core.clock import Clock
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.gateway.http.connection import read_request
from kakeya.gateway.ollama.requests import read_model
from kakeya.generation.facts import ModelState
from kakeya.generation.model import LoadableModel, ModelDirectory, ServedModel
from kakeya.text.text import TextModel

VERSION = "0.13.0"
"""Clients look for features by Ollama's version: chats with thinking, tools and logprobs."""
_KEPT_S = 300
"""Ollama's usual time; a node keeps a model as long as nothing else needs the memory."""


class OllamaModels:
    """The endpoints that describe models."""

    def __init__(
        self,
        directory: ModelDirectory,
        generations: Generations,
        abilities: Callable[[TextModel], list[str]],
        clock: Clock,
    ) -> None:
        """`abilities` are those that /v1/models tells."""
        self._directory = directory
        self._generations = generations
        self._abilities = abilities
        self._clock = clock
        self._began = self._time()

    async def version(self, request: Request) -> Response:
        """GET /api/version."""
        return JSONResponse({"version": VERSION})

    async def tags(self, request: Request) -> Response:
        """GET /api/tags."""
        models = [self._tag(one.model_id, one) for one in self._loadable()]
        by_id = {one.model_id: one for one in self._directory.verifiers()}
        models += [
            self._tag(one.model_id, by_id[one.parent])
            for one in await self._directory.adapted(client_of(request.scope))
            if one.parent in by_id
        ]
        names = self._generations.names
        relays, tasks = names.relays, names.tasks.tasks
        models += [self._tag(one.model_id, one) for one in relays.models()]
        for name, task in tasks.items():
            first = by_id.get(task.names[0]) or relays.find(task.names[0])
            if first is not None:
                models.append(self._tag(name, first))
        return JSONResponse({"models": models})

    async def loaded(self, request: Request) -> Response:
        """GET /api/ps."""
        until = self._time(_KEPT_S)
        models = [
            self._tag(one.model_id, one)
            | {
                "expires_at": until,
                "size_vram": one.facts.weight_bytes,
                "context_length": one.facts.longest_tokens or one.facts.context_tokens,
            }
            for one in self._loadable()
            if one.state is ModelState.READY and one.facts is not None
        ]
        return JSONResponse({"models": models})

    async def show(self, request: Request) -> Response:
        """POST /api/show."""
        model_id = await read_request(
            request.scope, request.receive, self._generations.limits, _shown_model
        )
        embedders = (one for one in self._directory.embedders() if one.model_id == model_id)
        model: LoadableModel | RelayedModel | None = next(embedders, None)
        abilities, parameters = ["embedding"], ""
        if model is None:
            model, _ = self._generations.names.choose(model_id, client_of(request.scope))
            abilities = ["completion", "tools"]
            if not isinstance(model, RelayedModel):
                abilities, parameters = await self._texts_of(model)
        facts = model.facts
        info = {"general.architecture": "kakeya"} | (
            {"kakeya.context_length": facts.longest_tokens or facts.context_tokens}
            if facts is not None
            else {}
        )
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": parameters,
                "template": "",
                "details": _details(model),
                "model_info": info,
                "capabilities": abilities,
                "modified_at": self._began,
            }
        )

    async def _texts_of(self, model: ServedModel) -> tuple[list[str], str]:
        """What a model can do, and its usual sampling as Ollama writes it."""
        text = await self._generations.preparation.text_of(model)
        if text is None:
            return ["completion"], ""
        known = [one for one in self._abilities(text) if one in ("completion", "tools", "thinking")]
        usual = text.sampling
        names = ("temperature", "top_k", "top_p", "min_p")
        lines = (f"{name} {getattr(usual, name):g}" for name in names)
        return known, "\n".join(lines)

    def _time(self, later_s: float = 0) -> str:
        return datetime.fromtimestamp(int(self._clock.wall() + later_s), UTC).isoformat()

    def _loadable(self) -> Iterable[LoadableModel]:
        return (*self._directory.verifiers(), *self._directory.embedders())

    def _tag(self, model_id: str, model: LoadableModel | RelayedModel) -> dict[str, object]:
        return {
            "name": model_id,
            "model": model_id,
            "modified_at": self._began,
            "size": 0 if model.facts is None else model.facts.weight_bytes,
            "digest": sha256(model_id.encode()).hexdigest(),
            "details": _details(model),
        }


def _shown_model(body: Mapping[str, object]) -> str:
    return read_model({"model": body.get("model") or body.get("name")})


def _details(model: LoadableModel | RelayedModel) -> Mapping[str, object]:
    facts = model.facts
    return {
        "parent_model": "",
        "format": "" if isinstance(model, RelayedModel) else "safetensors",
        "family": "kakeya",
        "families": ["kakeya"],
        "parameter_size": "",
        "quantization_level": "" if facts is None else facts.quantization or facts.dtype,
    }
