"""The verifiers of this node, by id."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.adapters.manager import AdapterManager
from kakeya.backends.adapted import AdaptedModel
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import NotFound
from kakeya.generation.frames import Usage
from kakeya.generation.model import AdaptedId, ServedModel


class VerifierDirectory:
    """Finds a verifier, with or without an adapter; the first one is the default."""

    def __init__(self, verifiers: Sequence[ResidentModel], adapters: AdapterManager) -> None:
        self._verifiers = tuple(verifiers)
        self._adapters = adapters

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """Find a verifier; "" is the default, BASE:NAME a verifier with an adapter.

        Raises NotFound, which names the served models or a near one, and Denied.
        """
        for model in self._verifiers:
            if model_id in ("", model.model_id):
                return model
        base, _, _ = model_id.rpartition(":")
        for model in self._verifiers:
            if base == model.model_id:
                self._adapters.find(model_id, client)
                return AdaptedModel(model, model_id, client, self._adapters)
        if not self._verifiers:
            raise NotFound("this node decodes with no model; start one with --model ID_OR_PATH")
        served = ", ".join(model.model_id for model in self._verifiers)
        raise NotFound(f"model {model_id[:80]!r} is not served here; this node serves {served}")

    def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """List the models with adapters that a client may use."""
        return tuple(
            AdaptedId(model_id=record.model_id, parent=record.base)
            for record in self._adapters.usable(client)
        )

    def verifiers(self) -> tuple[ServedModel, ...]:
        """List the verifiers, the default first."""
        return self._verifiers


def failed_addresses(usage: Usage) -> tuple[str, ...]:
    """List the peers that failed to draft during a decode; late or wrong drafts do not count."""
    return tuple(
        source.source.rpartition("@")[2]
        for source in usage.sources
        if source.failed and "@" in source.source
    )
