"""The paths of Ollama's API."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route

from kakeya.core.clock import Clock
from kakeya.gateway.embeddings import Embeddings
from kakeya.gateway.generation import Generations
from kakeya.gateway.ollama.embed import embed_body, parse_embed
from kakeya.gateway.ollama.models import OllamaModels
from kakeya.gateway.ollama.requests import parse_chat, parse_generate
from kakeya.gateway.openai.embeddings import EmbeddingRoute
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
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
    ]
