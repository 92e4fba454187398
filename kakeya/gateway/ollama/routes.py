"""The paths of Ollama's API."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route

from kakeya.core.clock import Clock
from kakeya.gateway.coordinator_fields import COORDINATOR_FIELDS
from kakeya.gateway.embeddings import Embeddings
from kakeya.gateway.generation import Generations
from kakeya.gateway.http.fields import opaque
from kakeya.gateway.ollama.embed import EMBED, EMBED_NO_OPS, embed_body, parse_embed
from kakeya.gateway.ollama.models import OllamaModels
from kakeya.gateway.ollama.requests import (
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_NO_OPS,
    parse_chat,
    parse_generate,
)
from kakeya.gateway.openai.embeddings import EmbeddingRoute
from kakeya.gateway.openapi import BodyRoute
from kakeya.gateway.route import GenerationRoute
from kakeya.generation.model import ModelDirectory
from kakeya.text.text import TextModel


def ollama_routes(
    directory: ModelDirectory,
    generations: Generations,
    embeddings: Embeddings,
    clock: Clock,
    abilities: Callable[[TextModel], list[str]],
) -> list[Route]:
    """Build the routes. `abilities` are those that /v1/models tells of a model."""
    models = OllamaModels(directory, generations, abilities, clock)
    chat = GenerationRoute(lambda body, _: parse_chat(body), generations)
    generate = GenerationRoute(lambda body, _: parse_generate(body), generations)
    embed = EmbeddingRoute(embeddings, clock, parse_embed, embed_body)
    return [
        Route("/api/version", models.version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.loaded),
        BodyRoute("/api/show", models.show, opaque("model", "name"), takes_more=True),
        BodyRoute("/api/chat", chat, OLLAMA_CHAT | COORDINATOR_FIELDS, OLLAMA_NO_OPS),
        BodyRoute("/api/generate", generate, OLLAMA_GENERATE | COORDINATOR_FIELDS, OLLAMA_NO_OPS),
        BodyRoute("/api/embed", embed, EMBED, EMBED_NO_OPS),
    ]
