"""What /v1/models tells of a model beside the facts of its load, and of a task."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from kakeya.dispatch.tasks import TaskSpec
from kakeya.generation.image import ImageModel
from kakeya.generation.manifest import DIFFUSERS, Category, Manifest
from kakeya.generation.request import Sampling
from kakeya.text.text import TextModel


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
        "pipeline": model.kind.value,
        "category": model.manifest.category or Category.DIFFUSION,
        "backend": DIFFUSERS,
        "modalities": {"input": ["text"], "output": ["image"]},
        "capabilities": ["image"],
        "state": model.state.value,
    }


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
