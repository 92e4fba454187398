"""The part of mlx-lm that an engine imports: models, caches and formats of weights.

mlx-lm's own `__init__` and its tokenizers import transformers, which takes longer than weights of
500 MB take to read, and which an engine never uses: text becomes ids in the agent. So a process
that only computes imports `mlx_lm.utils` beside a bare package, with no tokenizers.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_PACKAGE = "mlx_lm"
_LEFT_OUT = f"{_PACKAGE}.tokenizer_utils"
_NAMES = ("TokenizerWrapper", "load")


def import_without_tokenizers() -> None:
    """Import `mlx_lm.utils` for a process that only computes, after a BLAS was preloaded.

    As usual where mlx-lm is there already, or needs more of its tokenizers than their names.
    """
    spec = find_spec(_PACKAGE)  # finding a package does not run it
    if _PACKAGE in sys.modules or spec is None:
        return
    sys.modules[_PACKAGE] = module_from_spec(spec)
    tokenizers = ModuleType(_LEFT_OUT)
    vars(tokenizers).update(dict.fromkeys(_NAMES))
    sys.modules[_LEFT_OUT] = tokenizers
    try:
        importlib.import_module(f"{_PACKAGE}.utils")
    except (ImportError, AttributeError):
        for name in [one for one in sys.modules if one.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
