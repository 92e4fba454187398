"""The linear modules of a base model, as its folder describes them.

So an adapter of another model is refused when it is registered, not when a request waits for it.

Only headers and a little of each file are read; the weights stay where they are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kakeya.adapters.files.packed import PackedAdapter
from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import ArrayEntry, open_regular, read_header
from kakeya.core.weight_files import weight_files

_SAMPLE_BYTES = 4 << 10
_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShapes:
    """The linear modules of a model: path -> features in, features out.

    `fingerprint` is another one for other weights: of names, shapes, sizes and samples.
    """

    folder: Path
    fingerprint: str
    modules: Mapping[str, tuple[int, int]]

    def check(self, adapter: PackedAdapter) -> None:
        """Raise InvalidArgument unless every module of an adapter is here, and as large."""
        for tensor in adapter.tensors:
            found = self._find(tensor.path)
            if found != (tensor.in_size, tensor.out_size):
                raise InvalidArgument(
                    f"the adapter's {tensor.path[:80]!r} is made for {tensor.in_size} features in "
                    f"and {tensor.out_size} out; the base has {found[0]} and {found[1]}: it is an "
                    "adapter of another model"
                )

    def _find(self, path: str) -> tuple[int, int]:
        if path in self.modules:
            return self.modules[path]
        # Files of some architectures name their modules with a part in front.
        longer = [name for name in self.modules if name.endswith(f".{path}")]
        if len(longer) == 1:
            return self.modules[longer[0]]
        close = difflib.get_close_matches(path[:120], list(self.modules)[:2000], n=1)
        hint = f" (the nearest is {close[0]!r})" if close else ""
        raise InvalidArgument(
            f"the adapter changes {path[:80]!r}, which is no linear module of the base{hint}: it "
            "is an adapter of another model"
        )


def read_base(folder: Path) -> BaseShapes:
    """Read the modules of the model in a folder; blocks. Raises InvalidArgument."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as problem:
        raise InvalidArgument(f"{folder} has no config.json that can be read: {problem}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{folder}/config.json is not a JSON object")
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    entries: dict[str, ArrayEntry] = {}
    for file in weight_files(folder):
        header = read_header(file)
        entries.update(header)
        sha256.update(repr(sorted((n, e.dtype, e.shape) for n, e in header.items())).encode())
        sha256.update(_sample(file, header))
    if not entries:
        raise InvalidArgument(f"{folder} has no *.safetensors to compare an adapter with")
    return BaseShapes(
        folder=folder, fingerprint=sha256.hexdigest(), modules=_modules(entries, config)
    )


def _sample(file: Path, header: Mapping[str, ArrayEntry]) -> bytes:
    """A few bytes from the middle of every array: tuning may leave any of them unchanged."""
    parts = []
    with open_regular(file) as (opened, _):
        for begin, end in sorted((entry.begin, entry.end) for entry in header.values()):
            opened.seek(begin + max(0, end - begin - _SAMPLE_BYTES) // 2)
            parts.append(opened.read(min(_SAMPLE_BYTES, end - begin)))
    return b"".join(parts)


def _modules(
    entries: Mapping[str, ArrayEntry], config: Mapping[str, object]
) -> dict[str, tuple[int, int]]:
    quantization = config.get("quantization")
    widths = quantization if isinstance(quantization, dict) else {}
    modules: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(entry.shape) != 2:
            continue
        outs, ins = entry.shape
        if f"{path}.scales" in entries:
            ins = ins * _WORD_BITS // _bits(widths, path)
        modules[path] = (ins, outs)
    return modules


def _bits(widths: Mapping[str, object], path: str) -> int:
    """The width of a quantised module's values: its own, or that of all."""
    own = widths.get(path)
    bits = own.get("bits") if isinstance(own, dict) else widths.get("bits")
    return bits if isinstance(bits, int) and bits > 0 else 4
