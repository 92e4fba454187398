"""Random-weight models of the sizes that the performance goals name, with kakeya-tiny's tokenizer.

Their greedy texts are cyclic, so drafting on them shows the ceiling; real text is benchmarked on
kakeya-tiny itself. Folders are made once, below the system's temporary directory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent.parent / "kakeya" / "models" / "kakeya-tiny"
_SHAPES = {
    "05m": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352},
    "3m": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704},
}


def random_model(size: str) -> Path:
    """Make or find the folder of a random model: `05m` (0.7 M parameters) or `3m` (3.7 M)."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    folder = Path(tempfile.gettempdir()) / f"kakeya-bench-{size}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(exist_ok=True)
    config = json.loads((EMBEDDED / "config.json").read_text()) | _SHAPES[size]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
