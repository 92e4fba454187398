"""The names by which requests find their models.

A name is that of a model, of an adapter, of a task, which then chooses one of its models, or of a
model behind a backend. Where it is none of them, the profile of the client may name another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kakeya.backends.relay.relays import RelayedModel
from kakeya.backends.request import ModelNotFound
from kakeya.core.errors import NotFound, Unsupported
from kakeya.core.settings import nearest
from kakeya.dispatch.registry import TaskRegistry
from kakeya.dispatch.tasks import TaskChoice
from kakeya.generation.model import ModelDirectory, ServedModel


class RelayDirectory(Protocol):
    """Backends that answer whole requests, by the names of their models."""

    def find(self, model_id: str) -> RelayedModel | None:
        """Find a model by its name; None = it is of no backend."""
        ...

    def models(self, named: Sequence[str] = ()) -> list[RelayedModel]:
        """The models that the backends tell of, and those of them that are `named` elsewhere."""
        ...


class ModelNames:
    """Finds models by their names."""

    def __init__(
        self, directory: ModelDirectory, tasks: TaskRegistry, relays: RelayDirectory
    ) -> None:
        self._directory = directory
        self.tasks = tasks
        self.relays = relays

    def meant(self, name: str, other: str) -> str:
        """The name that a request means by `name`: `other`, where there is one and no model of this
        name."""
        is_known = name in self._names() or self.relays.find(name) is not None
        if not other or is_known or self._is_served(name.rpartition(":")[0]):
            return name
        return other

    def find(self, name: str, client: str = "") -> ServedModel:
        """Find the model of a name for a client. Raises as `choose`, and Unsupported for a model
        of a backend, as its tokens are not known here."""
        found = self.choose(name, client)[0]
        if isinstance(found, RelayedModel):
            raise Unsupported(
                f"{found.model_id} is answered by the backend {found.relay.name}, and its tokens "
                "are not known here; name a model of this node",
                param="model",
            )
        return found

    def choose(
        self, name: str, client: str = ""
    ) -> tuple[ServedModel | RelayedModel, TaskChoice | None]:
        """Find a model for a client, by its own name or that of a task, which then chooses.

        Raises ModelNotFound with the names that are served, and Denied for an adapter of another
        client.
        """
        own = {model.model_id: model for model in self._directory.verifiers()}
        choice = self.tasks.choose(name, lambda one: own.get(one) or self.relays.find(one))
        return self._served(name if choice is None else choice.model_id, client), choice

    def _served(self, model_id: str, client: str) -> ServedModel | RelayedModel:
        if relayed := self.relays.find(model_id):
            return relayed
        try:
            if model_id:  # the directory takes "" for its default
                return self._directory.get(model_id, client)
        except ModelNotFound:
            raise
        except NotFound as unknown:
            if self._is_served(model_id.rpartition(":")[0]):
                raise ModelNotFound(unknown.message) from None
        names = self._names()
        served = ", ".join(names)
        raise ModelNotFound(
            f"the model {model_id[:80]!r} is not served here; served: {served or 'none'}"
            f"{nearest(model_id[:80], names)}"
        )

    def _names(self) -> list[str]:
        names = [model.model_id for model in self._directory.verifiers()]
        return [*names, *(model.model_id for model in self.relays.models()), *self.tasks.tasks]

    def _is_served(self, base: str) -> bool:
        return any(model.model_id == base for model in self._directory.verifiers())
