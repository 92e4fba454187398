"""The text files of a model folder, made from the metadata of a GGUF file.

    tokenizer.json           byte-level BPE, with the cuts of the file's pre-tokenizer
    tokenizer_config.json    named special tokens and the chat template
    generation_config.json   tokens that end an answer
    config.json              the length of the context

A prompt gets the token ids that llama.cpp gives it: there is no normalizer, whatever the maker of
the model had. Folders lie in the cache of the user, one for each state of a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.core.folders import cache_folder
from kakeya.core.gguf import read_gguf

RECIPE = 1
"""Raised with each change of the written files, so that older folders are made again."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens: marks that are no text, and texts that are always one token."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS, _MARKS = r"\p{L}", r"\p{L}\p{M}"


def _cuts_of_words(digits: str, letters: str = _LETTERS) -> str:
    """The cuts of newer models: line ends stay with signs, and `digits` together."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PIECES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "trillion"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_cuts_of_words(r"\p{N}"),)
    ),
    "qwen35": (_cuts_of_words(r"\p{N}", _MARKS),),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "dbrx", "smaug-bpe"),
        ),
        (_cuts_of_words(r"\p{N}{1,3}"),),
    ),
}
"""Pre-tokenizer of a file -> the expressions whose matches are pieces, one after the other."""
_WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
)
"""Pre-tokenizers of vocabularies in which a piece that is a token is not merged from parts; prompts
begin with their token for the beginning unless the file says otherwise."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
        *("<end_of_turn>", "<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>"),
    }
)
"""Control tokens that end an answer, whatever else a file names."""


def text_folder(path: Path) -> Path:
    """The folder of a GGUF file's text, made or not. Raises OSError without a file."""
    found = path.stat()
    state = f"{RECIPE} {path.resolve()} {found.st_size} {found.st_mtime_ns}"
    name = hashlib.sha256(state.encode()).hexdigest()[:16]
    return cache_folder(os.environ, Path.home()) / "gguf" / f"{path.stem[:60]}-{name}"


def make_text_folder(path: Path) -> Path:
    """Make the folder of a GGUF file's text, unless it is there. Blocks for a second or two.

    Raises InvalidArgument for a damaged file, Unsupported for a tokenizer that is not known.
    """
    folder = text_folder(path)
    if folder.is_dir():
        return folder
    meta = read_gguf(path)
    try:
        files = _files(meta)
    except (KeyError, IndexError, TypeError, ValueError) as fault:
        raise InvalidArgument(f"{path} describes no text: {fault!r}; download it again") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, content in files.items():
            (fresh / name).write_text(content, encoding="utf-8")
        fresh.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another node has made it
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def end_ids(meta: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, in order."""
    named = (meta.get(f"tokenizer.ggml.{one}_token_id") for one in ("eos", "eot", "eom"))
    found = {one for one in named if isinstance(one, int)}
    return sorted(found | {index for index, token in _tokens(meta, _CONTROL) if token in _ENDS})


def known_cuts(meta: Mapping[str, Any]) -> str:
    """The name of a file's pre-tokenizer. Raises Unsupported for a tokenizer that is not known."""
    kind, cuts = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cuts not in _PIECES:
        raise Unsupported(
            f"the file has the tokenizer {kind!r} with the pre-tokenizer {cuts!r}; a GGUF model "
            f"needs 'gpt2' (byte-level BPE) with one of: {', '.join(sorted(_PIECES))}"
        )
    return str(cuts)


def gguf_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file. Raises Unsupported for another kind than byte-level BPE."""
    cuts = known_cuts(meta)
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [_pair(merge) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cuts in _WHOLE_WORDS))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in _PIECES[cuts]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_added(token, True) for _, token in _tokens(meta, _CONTROL)])
    made.add_tokens([_added(token, False) for _, token in _tokens(meta, _USER_DEFINED)])
    if meta.get("tokenizer.ggml.add_bos_token", cuts in _WHOLE_WORDS):
        begin = int(meta["tokenizer.ggml.bos_token_id"])
        name = tokens[begin]
        made.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], special_tokens=[(name, begin)]
        )
    return made


def _files(meta: Mapping[str, Any]) -> dict[str, str]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    ids = {
        name: meta[key]
        for name in ("bos", "eos", "padding", "unknown")
        if isinstance(meta.get(key := f"tokenizer.ggml.{name}_token_id"), int)
    }
    short = {"padding": "pad", "unknown": "unk"}
    named = {f"{short.get(name, name)}_token": tokens[index] for name, index in ids.items()}
    architecture = meta["general.architecture"]
    context = meta[f"{architecture}.context_length"]
    template = meta.get("tokenizer.chat_template")
    described: dict[str, Mapping[str, object]] = {
        "config.json": {
            "model_type": architecture,
            "max_position_embeddings": context,
            "vocab_size": len(tokens),
        },
        "generation_config.json": {"eos_token_id": end_ids(meta)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "model_max_length": context,
            **({"chat_template": template} if isinstance(template, str) else {}),
        },
    }
    written = {name: json.dumps(content, indent=2) + "\n" for name, content in described.items()}
    return written | {"tokenizer.json": gguf_tokenizer(meta).to_str()}


def _tokens(meta: Mapping[str, Any], kind: int) -> Iterator[tuple[int, str]]:
    """The tokens of a type, with their ids."""
    kinds = meta.get("tokenizer.ggml.token_type") or ()
    for index, (token, one) in enumerate(zip(meta["tokenizer.ggml.tokens"], kinds, strict=False)):
        if one == kind:
            yield index, token


def _pair(merge: str) -> tuple[str, str]:
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _added(token: str, is_special: bool) -> AddedToken:
    return AddedToken(token, special=is_special, normalized=False)
