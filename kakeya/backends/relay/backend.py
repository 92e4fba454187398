"""The contract of a backend that takes a whole request, in messages or text, and answers it.

It reads no tokens and loads nothing into the memory of this node: a cloud, a program, or what an
installed package brings (`backends/registry.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

from kakeya.backends.request import Request
from kakeya.core.figures import Json
from kakeya.text.tools.answer import FinishReason, Part

ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an answer, and its account as the backend gives it; 0 tokens = not told.

    `stop_string` is the one of the request's that ended the answer, "" = none, or not told.
    """

    reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    stop_string: str = ""


class Backend(Protocol):
    """Answers whole requests, between `start` and `stop`."""

    async def start(self) -> None:
        """Open what requests need. Raises what keeps it from them."""
        ...

    async def stop(self) -> None:
        """Close it. No request runs any more."""
        ...

    def health(self) -> str:
        """Why it cannot answer now, in one sentence; "" = nothing is known against it."""
        ...

    def check(self, asked: Request) -> Sequence[str]:
        """The names of a request's parameters that its answer will not follow. Raises Unsupported
        for one without which the answer would not be what was asked for."""
        ...

    def handle(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """Answer a request that `check` took; of prompts it has one, and of rows one is meant.

        `asked.params.model` is the name by which the model was found. The last item is the one
        `Finished`. Calls are whole, without an id where the backend gives none. Closing the
        iterator ends the work at once. Raises KakeyaError.
        """
        ...


class BackendSettings(Protocol):
    """A table [KIND.NAME] of the configuration file: a dataclass of settings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def problem(self) -> str:
        """What is wrong with the values together, in one sentence; "" = nothing."""
        ...

    def model_ids(self, name: str) -> Sequence[str]:
        """The models that the table NAME tells of; the backend may serve others too."""
        ...

    def serves(self, name: str, model_id: str) -> bool:
        """Whether requests for a model go to the backend of the table NAME."""
        ...

    def shared_ids(self, name: str) -> Sequence[str]:
        """What other nodes may ask the table NAME for: names of models, or with `ANY` at its end
        what all of them begin with; none = the backend answers clients of this node alone."""
        ...

    def describe(self) -> Json:
        """The settings for people, without secrets."""
        ...

    def open(self, name: str) -> Backend:
        """Make the backend of the table NAME. Does not block."""
        ...
