"""The models that a node serves, by name: an embedded model, a folder, a GGUF file, or a Hugging
Face id.

    NAME=SOURCE                                 NAME
    kakeya-tiny, org/name                       the same
    .../models--org--name/snapshots/COMMIT      org/name: a folder of Hugging Face's cache
    any other folder, or a link to one          its own name
    NAME.gguf                                   NAME
    a model that `kakeya models pull` brought   the name by which it was pulled

Only names and folders are looked at here; weights belong to engine children.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.core.gguf import gguf_files
from kakeya.core.ids import BLOCK_DIFFUSION, ENCODERS, NGRAM
from kakeya.core.settings import Illegal
from kakeya.generation.manifest import DIFFUSERS, MLX, NO_MANIFEST, Category, Manifest

EMBEDDED_FOLDER = Path(__file__).resolve().parent.parent / "models"
EMBEDDED = ("kakeya-tiny", "kakeya-tiny-draft", "kakeya-tiny-dlm", "kakeya-tiny-tools")
"""Models that are shipped, with one tokenizer."""
GGUF = ".gguf"
PIPELINE_FILE = "model_index.json"
"""Of a folder that holds a diffusers pipeline, which draws images."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z", re.ASCII)
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*\Z", re.ASCII)
_NAME_THERE = re.compile(r"[^/~.\\][^/\\]*(?:/[^/\\]+)*\Z")
_CACHED = re.compile(r"models--([\w.-]+)\Z", re.ASCII)


class ModelRole(StrEnum):
    """The use of a served model."""

    VERIFIER = "verifier"
    PROPOSER = "proposer"
    EMBEDDER = "embedder"
    DIFFUSION = "diffusion"
    """Draws images from text."""


_CATEGORY_OF = {
    ModelRole.EMBEDDER: Category.EMBEDDING,
    ModelRole.DIFFUSION: Category.DIFFUSION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to serve: the name that callers use, its source as configured, its role, and its
    manifest as the node was started with it. `ring` are the flags of its ranks, () = one process
    holds it; one `is_on_demand` is loaded for requests alone, never ahead of them."""

    model_id: str
    source: str
    role: ModelRole
    manifest: Manifest = NO_MANIFEST
    ring: tuple[str, ...] = ()
    is_on_demand: bool = False

    @property
    def category(self) -> Category:
        """The kind of its work."""
        return self.manifest.category or _CATEGORY_OF.get(self.role, Category.TEXT)

    @property
    def backend(self) -> str:
        """The name of what runs it."""
        return DIFFUSERS if self.role is ModelRole.DIFFUSION else self.manifest.backend or MLX

    @property
    def is_ngram(self) -> bool:
        """Whether the spec is the proposer without a model."""
        return self.model_id == NGRAM


def parse_model(raw: object) -> ModelSpec:
    """Read [NAME=]ID_OR_PATH[:ROLE]. Raises Illegal."""
    name, text = _split_name(_text(raw))
    source, role = _split_role(text)
    if source == NGRAM and role is not ModelRole.PROPOSER:
        raise Illegal("ngram only drafts; give it as --proposer ngram")
    return _spec(name, source, role)


def parse_proposer(raw: object) -> ModelSpec:
    """Read ngram or [NAME=]ID_OR_PATH. Raises Illegal."""
    return _spec(*_split_name(_text(raw)), ModelRole.PROPOSER)


def named_model(name: str, source: str, role: ModelRole) -> ModelSpec:
    """The model of a table [models.NAME]. Raises Illegal."""
    if not _NAME.match(name) or NGRAM in (name, source):
        raise Illegal(f"{name!r} names no model; a name has letters, digits, and . _ - /")
    return _spec(name, source, role)


def where_pulled(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with the path of a model in the folder of pulled ones, if its source is the name of
    one there, and of nothing else here."""
    names_it = _NAME_THERE.match(spec.source) and ".." not in spec.source.split("/")
    if spec.source in EMBEDDED or not names_it or Path(spec.source).expanduser().exists():
        return spec
    path = folder / spec.source
    if not path.exists():
        return spec
    return replace(_spec(spec.model_id, str(path), spec.role), manifest=spec.manifest)


def pulled_model(name: str, path: Path) -> ModelSpec:
    """The spec of a model that a pull brought, in the role that its files call for. Blocks."""
    kind = kind_of(path)
    role = ModelRole.EMBEDDER if kind in ENCODERS else ModelRole.VERIFIER
    return replace(_spec(name, str(path), role), is_on_demand=True)


def resolve(spec: ModelSpec) -> str:
    """Return the folder, the GGUF file, or the Hugging Face id, that an engine loads; of a folder
    with a GGUF file, that file. Raises ConfigError."""
    is_embedded = spec.source in EMBEDDED
    path = EMBEDDED_FOLDER / spec.source if is_embedded else Path(spec.source).expanduser()
    if path.exists():
        folder = _snapshot(path.resolve())
        if spec.role is not ModelRole.PROPOSER and _only_drafts(folder):
            raise ConfigError(
                f"model {spec.source!r} only drafts for others; give it as --proposer {spec.source}"
            )
        is_pipeline = spec.role is ModelRole.DIFFUSION and _is_pipeline(folder)
        return str(folder if is_pipeline else _checked(folder, spec.source))
    if _HUB_ID.match(spec.source) and not spec.source.startswith("."):
        return spec.source
    close = difflib.get_close_matches(spec.source, EMBEDDED, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"model {spec.source!r} is not known: {hint}give {', '.join(EMBEDDED)}, "
        f"an existing folder, a file *{GGUF}, a model that was pulled (`kakeya models list`), or a "
        "Hugging Face id such as org/name"
    )


def _snapshot(folder: Path) -> Path:
    """The folder of the current commit, of a repository in Hugging Face's cache."""
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return folder
    return folder / "snapshots" / commit if _CACHED.match(folder.name) else folder


def _only_drafts(folder: Path) -> bool:
    """Whether a folder holds a drafter that fills blocks of masks. Blocks."""
    return kind_of(folder) == BLOCK_DIFFUSION


def kind_of(folder: Path) -> str:
    """The kind of the model in a folder, "" = it says none. Blocks."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def is_gguf(resolved: str) -> bool:
    """Whether an engine loads a GGUF file."""
    return resolved.endswith(GGUF)


def _is_pipeline(folder: Path) -> bool:
    return (folder / PIPELINE_FILE).is_file()


def _checked(folder: Path, source: str) -> Path:
    if folder.is_file() and folder.suffix == GGUF:
        return folder
    if not folder.is_dir():
        raise ConfigError(
            f"model {source!r} is no folder: {folder}; name the folder that holds it, or a file "
            f"*{GGUF}"
        )
    if not any(folder.glob("*.safetensors")) and (files := gguf_files(folder)):
        if len(files) > 1:
            names = ", ".join(one.name for one in files)
            raise ConfigError(f"model folder {folder} holds several models: {names}; name one file")
        return files[0]
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


def _split_name(text: str) -> tuple[str, str]:
    """The name that is given to a model, "" = none, and the rest."""
    name, equals, source = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return "", text
    if not source or not _NAME.match(name):
        raise Illegal(f"{text!r} is no NAME=ID_OR_PATH; a name has letters, digits, and . _ - /")
    if name == NGRAM or source == NGRAM:
        raise Illegal(f"{text!r}: {NGRAM} is a name of its own; no model is called so")
    return name, source


def _split_role(text: str) -> tuple[str, ModelRole]:
    source, colon, role = text.rpartition(":")
    if not colon or "/" in role or Path(text).expanduser().exists():
        return text, ModelRole.VERIFIER
    if not source or role not in list(ModelRole):
        raise Illegal(f"{role!r} of {text!r} is no role; give {' or '.join(ModelRole)}")
    return source, ModelRole(role)


def _spec(name: str, source: str, role: ModelRole) -> ModelSpec:
    if role is ModelRole.VERIFIER and _is_pipeline(_snapshot(Path(source).expanduser())):
        role = ModelRole.DIFFUSION
    return ModelSpec(model_id=name or _model_id(source), source=source, role=role)


def _model_id(source: str) -> str:
    path = Path(source).expanduser()
    if source in EMBEDDED or source == NGRAM or not path.exists():
        return source
    path = path.absolute()
    if path.name in ("", ".."):
        path = path.resolve()
    repository = path.parent.parent if path.parent.name == "snapshots" else path
    if cached := _CACHED.match(repository.name):
        return cached[1].replace("--", "/", 1)
    if path.name == NGRAM:
        raise Illegal(f"{source!r} would be served as {NGRAM}, which is a name of its own; rename")
    return path.stem if path.suffix == GGUF else path.name
