"""What a process that only computes imports of mlx-lm."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kakeya.generation.spec import EMBEDDED_FOLDER

_LOADED = """
import sys
from kakeya.mlx.imports import import_without_tokenizers
{before}
import_without_tokenizers()
from kakeya.mlx.loader import load
load(sys.argv[1], "tiny")
print("transformers" in sys.modules, "mlx_lm.generate" in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "is_whole"),
    [
        ("", False),
        ("import mlx_lm", True),
        # A release of mlx-lm whose utils need another name of its tokenizers.
        ("import kakeya.mlx.imports as own; own._NAMES = ()", True),
    ],
)
def test_a_model_loads_with_as_little_of_mlx_lm_as_there_may_be(
    before: str, is_whole: bool
) -> None:
    program = [
        sys.executable,
        "-c",
        _LOADED.format(before=before),
        str(EMBEDDED_FOLDER / "kakeya-tiny"),
    ]
    found = subprocess.run(program, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(is_whole)] * 2
