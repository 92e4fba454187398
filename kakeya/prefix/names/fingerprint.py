"""Fingerprints: everything that KV depends on beside its tokens. Equal fingerprints, equal blocks.

Two questions are asked of two fingerprints. `compat`: could an engine of one take the blocks of the
other at all (weights, layout, dtype, block size)? `exact`: are they the very bits that it would
have computed itself (versions, device, arithmetic library, prefill grid)? Ids of blocks are seeded
by `exact`, so that a block that is found may be used without a further check.

On the wire a fingerprint is a CacheCompatibility of 12 fields that any node compares by equality.
Long texts (layout, exactness, RoPE) travel as their digests; the digests of a fingerprint do not
change by that.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kakeya.core.errors import InvalidArgument
from kakeya.prefix.names.blocks import check_block_tokens
from kakeya.v1 import distributed_pb2 as pb

FORMAT_VERSION = 1
"""Of what lies in a block; another one where equal fields mean other bytes."""

_MARK = "sha256:"
_CONDENSED = re.compile(r"sha256:[0-9a-f]{64}")
_FORMAT = re.compile(r"kvb([1-9][0-9]{0,8})/(sha256:[0-9a-f]{64})")
_BETWEEN = "+"  # the weights and the adapter that changes them


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFingerprint:
    """The engine, weights and arithmetic of blocks of KV. Raises InvalidArgument where blocks could
    be mistaken.

    `model_id` is for people, and not compared: names differ between nodes. `layout` and `exactness`
    are the engine's own, canonical JSON, or their digests. "" = none, or not known, which
    `weights_digest`, `layout` and `exactness` must not be: blocks of unknown origin would look
    equal. `weights_digest` has no "+", as it stands before that of the adapter on the wire.
    """

    model_id: str
    weights_digest: str
    config_digest: str = ""
    tokenizer_digest: str = ""
    rope: str = ""
    layout: str
    kv_dtype: str = ""
    block_tokens: int
    format_version: int = FORMAT_VERSION
    tenant: str = ""
    adapter: str = ""
    exactness: str

    def __post_init__(self) -> None:
        check_block_tokens(self.block_tokens)
        needed = {
            "weights_digest": self.weights_digest,
            "layout": self.layout,
            "exactness": self.exactness,
        }
        for name, value in needed.items():
            if not value:
                raise InvalidArgument(
                    f"the {name} of {self.model_id[:80]!r} is not known; without it KV of another "
                    "model would be taken for its own"
                )
        if _BETWEEN in self.weights_digest:
            raise InvalidArgument(
                f"weights_digest is {self.weights_digest[:80]!r}; it must have no {_BETWEEN!r}"
            )
        if self.format_version < 1:
            raise InvalidArgument(f"format_version is {self.format_version}; it must be 1 or more")

    def compat(self) -> bytes:
        """Digest the facts that must be equal for blocks to be taken at all; 32 bytes."""
        return _digest_of(
            "compat",
            self.weights_digest,
            self.config_digest,
            self.tokenizer_digest,
            _condensed(self.rope),
            _condensed(self.layout),
            self.kv_dtype,
            str(self.block_tokens),
            str(self.format_version),
            self.tenant,
            self.adapter,
        )

    def exact(self) -> bytes:
        """Digest the facts that must be equal for blocks to be the same bits; 32 bytes, the seed of
        ids."""
        return _digest_of("exact", self.compat().hex(), _condensed(self.exactness))

    def condensed(self) -> KvFingerprint:
        """Put digests in place of long texts; the digests of the whole stay the same."""
        return replace(
            self,
            rope=_condensed(self.rope),
            layout=_condensed(self.layout),
            exactness=_condensed(self.exactness),
        )

    def to_wire(self) -> pb.CacheCompatibility:
        """Say it on the wire. Windows and sinks of layers are part of the layout, so 0 here."""
        return pb.CacheCompatibility(
            model_id=self.model_id,
            model_revision=self.weights_digest + (self.adapter and _BETWEEN + self.adapter),
            tokenizer_revision=self.tokenizer_digest,
            cache_format_version=f"kvb{self.format_version}/{_condensed(self.exactness)}",
            quantization=self.config_digest,
            rope_hash=_condensed(self.rope),
            layer_geometry_hash=_condensed(self.layout),
            kv_dtype=self.kv_dtype,
            block_size_tokens=self.block_tokens,
            tenant_namespace=self.tenant,
        )

    @staticmethod
    def from_wire(message: pb.CacheCompatibility) -> KvFingerprint | None:
        """Read the fingerprint of a peer; None = blocks of a kind that this program does not know:
        a miss.
        """
        found = _FORMAT.fullmatch(message.cache_format_version)
        weights, between, adapter = message.model_revision.partition(_BETWEEN)
        texts = (message.rope_hash, message.layer_geometry_hash)
        if (
            found is None
            or not weights
            or bool(between) != bool(adapter)
            or not message.layer_geometry_hash
            or any(text and not _CONDENSED.fullmatch(text) for text in texts)
            or message.sink_size
            or message.window_size
        ):
            return None
        try:
            return KvFingerprint(
                model_id=message.model_id,
                weights_digest=weights,
                config_digest=message.quantization,
                tokenizer_digest=message.tokenizer_revision,
                rope=message.rope_hash,
                layout=message.layer_geometry_hash,
                kv_dtype=message.kv_dtype,
                block_tokens=message.block_size_tokens,
                format_version=int(found[1]),
                tenant=message.tenant_namespace,
                adapter=adapter,
                exactness=found[2],
            )
        except InvalidArgument:
            return None


def fingerprint_of(
    *,
    model_id: str,
    base_fingerprint: str,
    quantization: str,
    dtype: str,
    vocabulary_digest: str,
    kv_block_tokens: int,
    kv_layout: str,
    kv_exactness: str,
    adapter: str = "",
    tenant: str = "",
    config: str = "",
    rope: str = "",
) -> KvFingerprint:
    """Make the fingerprint of a loaded model from the facts of its engine, by the same names.

    `adapter` is the digest of an adapter's content, `config` the text of the model's configuration
    as far as weights and layout do not show it. Raises InvalidArgument as KvFingerprint does.
    """
    return KvFingerprint(
        model_id=model_id,
        weights_digest=base_fingerprint,
        config_digest=_digest_of(quantization, config).hex(),
        tokenizer_digest=vocabulary_digest,
        rope=rope,
        layout=kv_layout,
        kv_dtype=dtype,
        block_tokens=kv_block_tokens,
        tenant=tenant,
        adapter=adapter,
        exactness=kv_exactness,
    )


# Each request and each look at the card asks for the digests of the same few models.
@functools.lru_cache(maxsize=256)
def _condensed(text: str) -> str:
    """Digest a text, once: "" and digests stay."""
    if not text or _CONDENSED.fullmatch(text):
        return text
    return _MARK + hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _digest_of(*fields: str) -> bytes:
    """Digest texts so that no two lists of them look alike: each with its length before it."""
    sha256 = hashlib.sha256()
    for field in fields:
        encoded = field.encode()
        sha256.update(len(encoded).to_bytes(4, "little"))
        sha256.update(encoded)
    return sha256.digest()


Facts = Mapping[str, str | int]
