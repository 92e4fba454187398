"""What `scripts/test` does to start processes sooner changes nothing of what they import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/quick_start"}
SEEN = """
import sitecustomize, sys
from pathlib import Path
sitecustomize.NAMES = sys.argv[1]
from transformers.utils import import_utils
reads = import_utils.define_import_structure
truth = reads.__wrapped__.__wrapped__.__wrapped__  # without the caches of both
models = Path(import_utils.__file__).parents[1] / "models"
for asked in ((models, "models"), (models / "__init__.py", None)):
    reads(*asked)
    reads.cache_clear()
    assert reads(*asked) == truth(*asked), "what the file holds, before a caller adds to it"
from transformers import AutoTokenizer, CONFIG_MAPPING
assert CONFIG_MAPPING["qwen3"]().model_type == "qwen3"
"""


def test_names_from_the_file_are_those_that_transformers_reads(tmp_path: Path) -> None:
    kept = tmp_path / "names"
    kept.write_bytes(b"not of marshal")
    seen = subprocess.run(
        [sys.executable, "-c", SEEN, str(kept)],
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=False,
    )
    assert seen.returncode == 0, seen.stderr
    assert kept.stat().st_size > 10_000
