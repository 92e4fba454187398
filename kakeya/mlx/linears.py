"""A child process that tells which linear layers the network of a folder has.

An adapter names layers of the network. The files of its base may have other names for them, and
layers that the network lacks. No weight is read. Prints one JSON object, path -> [features in,
features out]. The agent never imports mlx, so this runs apart from it:
`python -m kakeya.mlx.linears FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kakeya.core.errors import ConfigError
from kakeya.mlx.imports import import_without_tokenizers


def main(folder: str) -> int:
    """Print the layers, or on stderr why there are none."""
    import_without_tokenizers()
    from kakeya.mlx.loader import read_network
    from kakeya.mlx.lora import linear_sizes

    try:
        network, _ = read_network(Path(folder))
    except ConfigError as fault:
        sys.stderr.write(fault.message + "\n")
        return 1
    sys.stdout.write(json.dumps(linear_sizes(network)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
