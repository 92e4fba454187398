"""The models that a node serves, by name: an embedded model, a folder, or a Hugging Face id.

Only names and folders are looked at here; weights belong to engine children.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.core.ids import NGRAM
from kakeya.core.settings import Illegal

EMBEDDED_FOLDER = Path(__file__).resolve().parent.parent / "models"
EMBEDDED = ("kakeya-tiny", "kakeya-tiny-draft")
"""Models that are shipped, with one tokenizer."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z", re.ASCII)


class ModelRole(StrEnum):
    """The use of a served model."""

    VERIFIER = "verifier"
    PROPOSER = "proposer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to serve: the name that callers use, its source as configured, and its role."""

    model_id: str
    source: str
    role: ModelRole

    @property
    def is_ngram(self) -> bool:
        """Whether the spec is the proposer without a model."""
        return self.model_id == NGRAM


def parse_model(raw: object) -> ModelSpec:
    """Read ID_OR_PATH[:ROLE]. Raises Illegal."""
    source, role = _split_role(_text(raw))
    if source == NGRAM and role is ModelRole.VERIFIER:
        raise Illegal("ngram only drafts; give it as --proposer ngram")
    return ModelSpec(model_id=_model_id(source), source=source, role=role)


def parse_proposer(raw: object) -> ModelSpec:
    """Read ngram or ID_OR_PATH. Raises Illegal."""
    source = _text(raw)
    return ModelSpec(model_id=_model_id(source), source=source, role=ModelRole.PROPOSER)


def resolve(spec: ModelSpec) -> str:
    """Return the folder, or the Hugging Face id, that an engine loads. Raises ConfigError."""
    if spec.source in EMBEDDED:
        return str(_checked(EMBEDDED_FOLDER / spec.source, spec.source))
    path = Path(spec.source).expanduser()
    if path.exists():
        return str(_checked(path.resolve(), spec.source))
    if _HUB_ID.match(spec.source) and not spec.source.startswith("."):
        return spec.source
    close = difflib.get_close_matches(spec.source, EMBEDDED, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"model {spec.source!r} is not known: {hint}give {' or '.join(EMBEDDED)}, "
        "an existing folder, or a Hugging Face id such as org/name"
    )


def _checked(folder: Path, source: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"model {source!r} is no folder: {folder}; name the folder that holds it")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model folder {folder} lacks {' and '.join(missing)}; "
            "a model folder holds config.json, *.safetensors and tokenizer files"
        )
    return folder


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise Illegal(f"{raw!r} is no model; give a name, a folder or a Hugging Face id")
    return raw.strip()


def _split_role(text: str) -> tuple[str, ModelRole]:
    source, colon, role = text.rpartition(":")
    if not colon or "/" in role or Path(text).expanduser().exists():
        return text, ModelRole.VERIFIER
    if not source or role not in list(ModelRole):
        raise Illegal(f"{role!r} of {text!r} is no role; give {' or '.join(ModelRole)}")
    return source, ModelRole(role)


def _model_id(source: str) -> str:
    path = Path(source).expanduser()
    if source in EMBEDDED or source == NGRAM or not path.exists():
        return source
    name = path.resolve().name
    if name == NGRAM:
        raise Illegal(f"{source!r} would be served as {NGRAM}, which is a name of its own; rename")
    return name
