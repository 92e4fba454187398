"""POST /api/embed of Ollama's dialect: model, input (a text or a list), truncate (true where it is
absent), dimensions; options and keep_alive are accepted and change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.gateway.embeddings import Embedded
from kakeya.gateway.http.body import flag
from kakeya.gateway.http.fields import NoOps, is_object, opaque, refuse_unknown
from kakeya.gateway.ollama.requests import check_keep_alive, read_model
from kakeya.gateway.openai.embeddings import (
    EMBEDDING,
    EmbeddingRequest,
    numbers_of,
    parse_embedding,
)
from kakeya.gateway.openai.reply import compact

EMBED = opaque("keep_alive") | {
    name: EMBEDDING[name] for name in ("model", "input", "truncate", "dimensions")
}
EMBED_NO_OPS: NoOps = {"options": is_object}


def parse_embed(body: Mapping[str, object]) -> EmbeddingRequest:
    """Read a request. Raises InvalidArgument or Unsupported naming the field."""
    refuse_unknown(body, EMBED, EMBED_NO_OPS)
    check_keep_alive(body.get("keep_alive"))
    given = {name: body.get(name) for name in ("input", "dimensions")}
    truncates = body.get("truncate") is None or flag(body, "truncate")
    return parse_embedding({**given, "model": read_model(body), "truncate": truncates})


def embed_body(asked: EmbeddingRequest, made: Embedded) -> bytes:
    """The answer."""
    return compact(
        {
            "model": made.model_id,
            "embeddings": [numbers_of(vector) for vector in made.vectors],
            "prompt_eval_count": made.tokens,
        }
    )
