"""The models of this node that requests name, by id: verifiers, and embedders beside them."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.adapters.manager import AdapterManager
from kakeya.backends.adapted import AdaptedModel
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.settings import nearest
from kakeya.generation.frames import Usage
from kakeya.generation.image import ImageModel
from kakeya.generation.model import AdaptedId, EmbeddingModel
from kakeya.generation.spec import ModelRole


class VerifierDirectory:
    """Finds a verifier, with or without an adapter, the first one by default; or an embedder."""

    def __init__(
        self,
        verifiers: Sequence[ResidentModel],
        adapters: AdapterManager,
        embedders: Sequence[ResidentModel] = (),
        images: Sequence[ImageModel] = (),
    ) -> None:
        self._verifiers = tuple(verifiers)
        self._embedders = tuple(embedders)
        self._images = tuple(images)
        self._adapters = adapters

    def add(self, model: ResidentModel) -> None:
        """Serve one more verifier or embedder."""
        if model.role is ModelRole.EMBEDDER:
            self._embedders = (*self._embedders, model)
        else:
            self._verifiers = (*self._verifiers, model)

    def remove(self, model: ResidentModel) -> None:
        """Serve a verifier or an embedder no more."""
        self._verifiers = tuple(one for one in self._verifiers if one is not model)
        self._embedders = tuple(one for one in self._embedders if one is not model)

    def get(self, model_id: str, client: str = "") -> ResidentModel | AdaptedModel:
        """Find a verifier; "" is the default, BASE:NAME a verifier with an adapter.

        Raises NotFound, which names the served models or a near one, Denied, and InvalidArgument
        for an embedder or an image model.
        """
        for model in self._verifiers:
            if model_id in ("", model.model_id):
                return model
        base, _, _ = model_id.rpartition(":")
        for model in self._verifiers:
            if base == model.model_id:
                self._adapters.find(model_id, client)
                return AdaptedModel(model, model_id, client, self._adapters)
        if any(model_id == model.model_id for model in self._embedders):
            raise InvalidArgument(
                f"{model_id} makes embeddings (POST /v1/embeddings) and writes no text; "
                f"this node writes text with {_names(self._verifiers)}",
                param="model",
            )
        if any(model_id == model.model_id for model in self._images):
            raise InvalidArgument(
                f"{model_id} draws images (POST /v1/images/generations) and writes no text; "
                f"this node writes text with {_names(self._verifiers)}",
                param="model",
            )
        if not self._verifiers:
            raise NotFound("this node decodes with no model; start one with --model ID_OR_PATH")
        raise NotFound(
            f"model {model_id[:80]!r} is not served here; this node serves "
            f"{_names(self._verifiers)}"
        )

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """List the models with adapters that a client may use."""
        return tuple(
            AdaptedId(model_id=record.model_id, parent=record.base)
            for record in self._adapters.usable(client)
        )

    def verifiers(self) -> tuple[ResidentModel, ...]:
        """List the verifiers, the default first."""
        return self._verifiers

    def embedder(self, model_id: str) -> EmbeddingModel:
        """Find an embedder. Raises NotFound, and InvalidArgument for a verifier."""
        for model in self._embedders:
            if model_id == model.model_id:
                return model
        served = f"embeddings are made by {_names(self._embedders)}"
        if any(model_id == model.model_id for model in self._verifiers):
            raise InvalidArgument(
                f"{model_id} writes text and makes no embeddings; {served}", param="model"
            )
        raise NotFound(f"model {model_id[:80]!r} is not served here; {served}")

    def image_model(self, model_id: str) -> ImageModel:
        """Find an image model; "" is the first one. Raises NotFound, and InvalidArgument for a
        model of another kind."""
        for model in self._images:
            if model_id in ("", model.model_id):
                return model
        if not self._images:
            raise NotFound(
                "this node draws no images; start it with --model NAME=FOLDER, where FOLDER holds "
                "a diffusers pipeline (model_index.json)"
            )
        drawn = f"images are drawn by {_names(self._images)}"
        if any(model_id == one.model_id for one in (*self._verifiers, *self._embedders)):
            raise InvalidArgument(f"{model_id} draws no images; {drawn}", param="model")
        near = nearest(model_id[:80], [model.model_id for model in self._images])
        raise NotFound(f"model {model_id[:80]!r} is not served here; {drawn}{near}")

    def image_models(self) -> tuple[ImageModel, ...]:
        """List the image models."""
        return self._images

    def embedders(self) -> tuple[EmbeddingModel, ...]:
        """List the embedders."""
        return self._embedders


def _names(models: Sequence[ResidentModel | ImageModel]) -> str:
    return ", ".join(model.model_id for model in models) or "no model"


def failed_addresses(usage: Usage) -> tuple[str, ...]:
    """List the peers that failed to draft during a decode; late or wrong drafts do not count."""
    return tuple(
        source.source.rpartition("@")[2]
        for source in usage.sources
        if source.failed and "@" in source.source
    )
