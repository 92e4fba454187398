"""`python -m kakeya` is the command `kakeya`."""

from __future__ import annotations

import sys

from kakeya.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
