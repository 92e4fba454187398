"""The manifest of a model: what its owner says of it, in the table [models.NAME] of the file.

stays as at the start   size_mb, category, backend, options
live                    all others: a reload of the file takes them to a node that runs
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from kakeya.core.errors import ConfigError
from kakeya.core.figures import Json
from kakeya.core.settings import (
    Illegal,
    megabytes,
    nearest,
    number,
    one_of,
    setting,
    switch,
    text,
    whole,
)

MOST_MB = 64 * 1024 * 1024
MOST_WARM_S = 7 * 86_400.0
BACKENDS = MLX, LLAMA = ("mlx", "llama-server")
"""What runs models; of a model without a `backend` its files decide."""
DIFFUSERS = "diffusers"
"""What runs models that draw: no others, so that it is not said."""
LIVE = frozenset(
    {
        *("pin", "stay_warm_s", "may_displace_text"),
        *("template", "thinking", "temperature", "top_p", "max_tokens"),
    }
)
"""The fields that a reload changes."""
_SWITCHES = ("enable_thinking", "thinking")
_OF_TEMPLATES = ("{{", "{%")
Thinking = Literal["on", "off", "auto"]
Option = str | int | float | bool
"""The value of an option of a backend."""


class Category(StrEnum):
    """The kind of a model's work: how long the model stays warm where nothing else tells it."""

    TEXT = "text"
    VISION = "vision"
    DIFFUSION = "diffusion"
    EMBEDDING = "embedding"


class GivenTemplate(NamedTuple):
    """A chat template in place of the model's own. `origin` is its file, "" = the table itself."""

    source: str
    origin: str


def _template(raw: object) -> GivenTemplate:
    said = text(raw)
    if any(mark in said for mark in _OF_TEMPLATES):
        return GivenTemplate(said, "")
    path = Path(said).expanduser()
    try:
        return GivenTemplate(path.read_text("utf-8"), said)
    except (OSError, ValueError) as problem:
        raise Illegal(
            f"{said!r} cannot be read ({problem}); give a file with a chat template, or the "
            "template itself"
        ) from None


def _options(raw: object) -> tuple[tuple[str, Option], ...]:
    if not isinstance(raw, dict):
        raise Illegal(f"{raw!r} is no table; write NAME = VALUE in braces, or a table of its own")
    for name, value in raw.items():
        if not isinstance(value, Option):
            raise Illegal(f"{name} is {value!r}; give a text, a number, true or false")
    return tuple(raw.items())


def thinking_args(thinking: Thinking) -> Mapping[str, object]:
    """The variables of a chat template that say whether the model thinks, under both names of the
    switch; none for "auto"."""
    return {} if thinking == "auto" else dict.fromkeys(_SWITCHES, thinking == "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """See the module. None = nothing is said."""

    pin: bool | None = setting("stays in memory once it is loaded", switch, None)
    size_bytes: int | None = setting(
        "its size in memory, in place of an estimate", megabytes(1, MOST_MB), None
    )
    stay_warm_s: float | None = setting(
        "for so long after its last use it goes only for a more urgent or a long wait",
        number(0, MOST_WARM_S, "seconds"),
        None,
    )
    may_displace_text: bool = setting(
        "its load may take the room of idle models that write text", switch, False
    )
    template: GivenTemplate | None = setting(
        "a chat template, or the file that has it, in place of the model's own", _template, None
    )
    thinking: Thinking = setting(
        "whether it thinks where a request does not say; auto: as its template does",
        one_of("on", "off", "auto"),
        "auto",
    )
    temperature: float | None = setting(
        "the temperature of requests that give none", number(0, 100, "temperature"), None
    )
    top_p: float | None = setting(
        "the top_p of requests that give none", number(1e-6, 1, "probability"), None
    )
    max_tokens: int | None = setting(
        "the most tokens of an answer where a request does not say",
        whole(1, 1 << 30, "tokens"),
        None,
    )
    category: Category | None = setting("the kind of its work", one_of(*Category), None)
    backend: str = setting("what runs it, where not its files decide", one_of(*BACKENDS), "")
    options: tuple[tuple[str, Option], ...] = setting("options of its backend", _options, ())

    @property
    def template_args(self) -> Mapping[str, object]:
        """The variables of the chat template where a request gives none."""
        return thinking_args(self.thinking)

    def with_live(self, other: Manifest) -> Manifest:
        """The manifest with the live fields of another."""
        return replace(self, **{name: getattr(other, name) for name in LIVE})

    def describe(self) -> Json:
        """What is said, as JSON."""
        template = self.template and (self.template.origin or self.template.source)
        said = {
            "pin": self.pin,
            "size_mb": self.size_bytes and self.size_bytes >> 20,
            "stay_warm_s": self.stay_warm_s,
            "may_displace_text": self.may_displace_text or None,
            "template": template,
            "thinking": None if self.thinking == "auto" else self.thinking,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "category": self.category,
            "backend": self.backend or None,
            "options": dict(self.options) or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def check_options(self, model_id: str, backend: str, known: Collection[str]) -> None:
        """Raise ConfigError for an option that the backend of the model does not have."""
        for name, _ in self.options:
            if name not in known:
                raise ConfigError(
                    f"models.{model_id}.options.{name}: {backend} has "
                    f"{'the options ' + ', '.join(known) if known else 'no options'}"
                    f"{nearest(name, known)}"
                )


NO_MANIFEST = Manifest()
