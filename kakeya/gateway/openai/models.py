"""GET /v1/models and /v1/models/{id}: what is told of each model, and of each task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kakeya.backends.relay.relays import RelayedModel
from kakeya.dispatch.routed.images import RoutedImageModel
from kakeya.dispatch.tasks import TaskSpec
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.authorization import client_of
from kakeya.generation.image import ImageModel
from kakeya.generation.manifest import DIFFUSERS, MLX, Category, Manifest
from kakeya.generation.model import EmbeddingModel, LoadableModel, ModelDirectory, ServedModel
from kakeya.generation.request import Sampling
from kakeya.text.text import TextModel


class ModelRoutes:
    """The endpoints."""

    def __init__(
        self, directory: ModelDirectory, generations: Generations, *, created_at: int
    ) -> None:
        """`created_at` is told of all models, in seconds of the wall clock."""
        self._directory = directory
        self._generations = generations
        self._created_at = created_at

    def routes(self) -> list[Route]:
        """The served paths."""
        return [
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model_id:path}", self.describe_model),
        ]

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        bodies = {
            model.model_id: await self._model_body(model) for model in self._directory.verifiers()
        }
        models = list(bodies.values())
        for one in await self._directory.adapted(client_of(request.scope)):
            base = bodies.get(one.parent, {})
            own = {"id": one.model_id, "display_name": one.model_id, "parent": one.parent}
            models.append(base | own)
        tasks = self._generations.names.tasks.tasks
        named = [name for task in tasks.values() for name in task.names if name not in bodies]
        relayed = self._relayed_bodies(named)
        models += relayed.values()
        bodies |= relayed
        for name, task in tasks.items():
            models.append(task_body(name, task, bodies))
        models += map(self._embedder_body, self._directory.embedders())
        models += (image_body(one, self._created_at) for one in self._directory.image_models())
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
        pages = {"has_more": False, "first_id": None, "last_id": None, **ends}
        return _json({"object": "list", "data": models, **pages})

    async def describe_model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        if not request.path_params["model_id"]:
            raise HTTPException(404)  # the router's words name the path without the slash
        client, model_id = client_of(request.scope), request.path_params["model_id"]
        for one in self._directory.embedders():
            if one.model_id == model_id:
                return _json(self._embedder_body(one))
        for drawing in self._directory.image_models():
            if drawing.model_id == model_id:
                return _json(image_body(drawing, self._created_at))
        found, choice = self._generations.names.choose(model_id, client)
        if choice is not None:
            bodies = {
                one.model_id: await self._model_body(one)
                for one in self._directory.verifiers()
                if one.model_id in choice.spec.names
            }
            bodies |= self._relayed_bodies(choice.spec.names)
            return _json(task_body(model_id, choice.spec, bodies))
        if isinstance(found, RelayedModel):
            return _json(self._relayed_body(found))
        adapted = await self._directory.adapted(client) if ":" in found.model_id else ()
        parents = [{"parent": one.parent} for one in adapted if one.model_id == found.model_id]
        return _json(await self._model_body(found) | (parents[0] if parents else {}))

    async def _model_body(self, model: ServedModel) -> dict[str, object]:
        text, common = await self._generations.preparation.text_of(model), self._common_body(model)
        return common | {
            "role": "verifier",
            "max_output_tokens": common["context_length"],  # of an empty prompt: both share it
            "modalities": {"input": ["text"], "output": ["text"]},
            "capabilities": text and abilities(text),
            "default_parameters": text and shown_defaults(text.sampling, model.manifest),
            "category": model.manifest.category or Category.TEXT,
        }

    def _embedder_body(self, model: EmbeddingModel) -> dict[str, object]:
        return self._common_body(model) | {
            "role": "embedder",
            "category": Category.EMBEDDING,
            "modalities": {"input": ["text"], "output": ["embeddings"]},
            "capabilities": ["embedding"],
            "dimensions": model.facts and model.facts.vector_size,
        }

    def _relayed_bodies(self, named: Sequence[str]) -> dict[str, dict[str, object]]:
        """Those of the backends' models, the `named` ones among them, by name."""
        models = self._generations.names.relays.models(named)
        return {one.model_id: self._relayed_body(one) for one in models}

    def _relayed_body(self, model: RelayedModel) -> dict[str, object]:
        return self._common_body(model) | {
            "role": "relay",
            "kind": model.relay.kind,
            "modalities": {"input": ["text"], "output": ["text"]},
            **_nodes(model.relay.nodes),
        }

    def _common_body(self, model: LoadableModel | RelayedModel) -> dict[str, object]:
        facts = model.facts
        context = facts and (facts.longest_tokens or facts.context_tokens)
        return model_head(model.model_id, self._created_at) | {
            # Clients look for the context under one of three names. None before the first load.
            "context_length": context,
            "max_model_len": context,
            "max_context_length": context,
            "state": model.state.value,
            "backend": model.relay.name
            if isinstance(model, RelayedModel)
            else model.manifest.backend or MLX,
            "quantization": facts and (facts.quantization or facts.dtype),
        }


def task_body(
    name: str, task: TaskSpec, bodies: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """A task as /v1/models tells it: as its first model, with the context that all of them have."""
    ladder = [bodies[one] for one in task.names if one in bodies]
    known = [int(str(size)) for one in ladder if (size := one["context_length"])]
    contexts = ("context_length", "max_model_len", "max_context_length", "max_output_tokens")
    return {
        **(ladder[0] if ladder else {}),
        "id": name,
        "display_name": name,
        "kind": "task",
        **dict.fromkeys(contexts, min(known, default=None)),
        **task.describe(),
    }


def model_head(model_id: str, created_at: int) -> dict[str, object]:
    """What is told of a model of any kind, in one body: `object` and `created` for OpenAI's
    clients; `type`, `display_name` and `created_at` for Anthropic's."""
    return {
        "id": model_id,
        "object": "model",
        "type": "model",
        "display_name": model_id,
        "created": created_at,
        "created_at": datetime.fromtimestamp(created_at, UTC).isoformat(),
        "owned_by": "kakeya",
    }


def image_body(model: ImageModel, created_at: int) -> dict[str, object]:
    """A model that draws, as /v1/models tells it."""
    return model_head(model.model_id, created_at) | {
        "role": "diffusion",
        "kind": "image",
        "pipeline": model.kind,
        "category": model.manifest.category or Category.DIFFUSION,
        "backend": DIFFUSERS,
        "modalities": {"input": ["text"], "output": ["image"]},
        "capabilities": ["image"],
        "state": model.state.value,
        **_nodes(model.nodes if isinstance(model, RoutedImageModel) else ()),
    }


def _nodes(labels: Sequence[str]) -> dict[str, object]:
    """The peers that have a model, where this node passes requests for it on."""
    return {"nodes": list(labels)} if labels else {}


def abilities(text: TextModel) -> list[str]:
    """What requests a model can answer, by its folder's files."""
    if not text.has_chat_template:
        return ["completion", "json"]
    return ["completion", "json", "chat", "tools", *(["thinking"] if text.thinks else [])]


def shown_defaults(sampling: Sampling, manifest: Manifest) -> dict[str, object]:
    """What a request that says nothing gets, as it would ask for it: of the manifest, else of the
    model's files."""
    own = {
        "temperature": manifest.temperature,
        "top_p": manifest.top_p,
        "max_tokens": manifest.max_tokens,
        "enable_thinking": manifest.template_args.get("enable_thinking"),
    }
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        **{name: value for name, value in own.items() if value is not None},
    }


def _json(value: object) -> Response:
    return Response(json.dumps(value, default=str), media_type="application/json")
